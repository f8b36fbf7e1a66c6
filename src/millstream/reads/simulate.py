"""Genomes -> labelled reads. Which read comes where, of which place, with which errors, is a function of the seed."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.console import Progress, say, silent
from millstream.dataset.augment import COMPLEMENT, UPPER
from millstream.dataset.permutation import Permutation, mix
from millstream.errors import BadSetting, BadSource
from millstream.source.mapping import load_mapping
from millstream.store.layout import publish
from millstream.store.open_reads import open_reads
from millstream.store.text_file import writing_text

ABUNDANCES = ("length", "equal", "lognormal")
Numbers = NDArray[np.int64]
Letters = NDArray[np.uint8]

CHUNK = 1 << 14  # fragments made at once, whose chance is drawn together: another number gives other reads
SPECIES = "species"
BINOMIAL = re.compile(r"[A-Z][a-z]+_[a-z]+")
SPREAD = 1.5  # of the logarithm of abundances
ROOM = 32  # letters more than a read's, for those that are left out
BASES = np.frombuffer(b"ACGT", np.uint8)


@dataclass(frozen=True)
class SimulateSettings:
    """How reads are drawn, and what goes wrong with them."""

    reads: int = 100_000  # the two of a pair count as two
    length: int = 150
    error: float = 0.01  # share of letters that are replaced by another
    indel: float = 0.0  # share of letters that are left out or put in, each as often
    insert: int | None = None  # mean length of fragments of which both ends are read; none: single reads
    insert_sd: float = 30.0
    abundance: str = "length"  # same coverage for all; or as many reads of each class; or some rare, some common
    seed: int = 0

    def check(self) -> None:
        """Say what is wrong before anything is read."""
        if min(self.reads, self.length) < 1:
            raise BadSetting(f"reads={self.reads}, length={self.length}: at least 1")
        if not 0 <= self.error < 1 or not 0 <= self.indel <= 0.1:
            raise BadSetting(f"error={self.error}, indel={self.indel}: shares of letters, indel at most 0.1")
        if self.insert is not None and (self.insert < self.length or self.insert_sd < 0):
            raise BadSetting(f"insert={self.insert}: a fragment is at least as long as a read, {self.length}")
        if self.insert is not None and self.reads % 2:
            raise BadSetting(f"reads={self.reads}: there are two to a pair, so an even number")
        if self.abundance not in ABUNDANCES:
            raise BadSetting(f"abundance={self.abundance}: there is length, equal and lognormal")
        if self.seed < 0:
            raise BadSetting(f"seed={self.seed}: a number from 0 on")

    @property
    def mates(self) -> int:
        return 1 if self.insert is None else 2


@dataclass(frozen=True)
class Genome:
    """One file: its class, and where its sequences lie among the letters of all."""

    path: Path
    class_id: int
    tax_id: int
    names: Sequence[str]
    starts: Numbers
    lengths: Numbers

    def places(self, needed: int) -> Numbers:
        """In how many places of each sequence so many letters can be taken."""
        return np.maximum(self.lengths - needed + 1, 0)


@dataclass(frozen=True)
class Simulated:
    """What was written; coverage is of each genome, by the name of its file."""

    reads: int
    bases: int
    coverage: dict[str, float]


def simulate(
    genomes: Sequence[Path],
    out: Sequence[Path],
    *,
    settings: SimulateSettings,
    mapping: Path | None = None,
    index_dir: Path | None = None,
    progress: Progress = silent,
) -> Simulated:
    """Write labelled reads of genomes; of pairs, both into one file or, if two are named, the second reads apart.

    A file is a genome. Its taxon is the number that its name begins with, or that of `kraken:taxid|N` in its first
    header. Class ids come from `mapping`, whose `tax_id` says which is which; if it is not there it is written, with a
    class for each taxon. Genomes are held in memory, a byte a letter.

    >>> simulate([Path("562_E_coli.fna.gz")], [Path("reads.fa.gz")], settings=SimulateSettings(reads=1000))
    """
    settings.check()
    if len(out) > settings.mates:
        raise BadSetting(f"{len(out)} files to write: two are for pairs, which insert= makes")
    if len(set(out)) < len(out):
        raise BadSetting(f"{out[0]}: named twice; name it once for both mates in one file, or two files")
    letters, found = _load(genomes, mapping, index_dir)
    made = _Reads(letters, found, settings)
    is_fastq = [path.name.removesuffix(".gz").endswith((".fq", ".fastq")) for path in out]
    with ExitStack() as stack:
        writers = [stack.enter_context(writing_text(path)) for path in out]
        progress(0)
        for first in range(0, made.num_fragments, CHUNK):
            texts = made.texts(first, fastq=is_fastq)
            for write, text in zip(writers, texts, strict=True):
                write(text)
            progress(min(first + CHUNK, made.num_fragments) * settings.mates)
    return Simulated(settings.reads, settings.reads * settings.length, made.coverage)


class _Reads:
    """The fragments by number: each is of a genome, of a place in it, and of a strand."""

    def __init__(self, letters: Letters, genomes: Sequence[Genome], settings: SimulateSettings) -> None:
        self.letters, self.genomes, self.settings = letters, genomes, settings
        self.num_fragments = settings.reads // settings.mates
        self.longest = settings.length + (ROOM if settings.indel else 0)
        if settings.insert is not None:
            self.longest = max(self.longest, round(settings.insert + 4 * settings.insert_sd))
        short = [genome.path.name for genome in genomes if not genome.places(self.longest).any()]
        if short:
            raise BadSource(f"{short[0]}: no sequence of {self.longest} letters, which a read or a fragment may take")
        self.ends = np.cumsum(_shared_out(self.num_fragments, self._weights()))
        self.order = Permutation(self.num_fragments, mix(settings.seed, 1))

    @cached_property
    def coverage(self) -> dict[str, float]:
        """How often a letter of each genome is read, in the mean."""
        counts = np.diff(self.ends, prepend=0) * self.settings.mates * self.settings.length
        lengths = [int(genome.lengths.sum()) for genome in self.genomes]
        return {g.path.name: n / size for g, n, size in zip(self.genomes, counts.tolist(), lengths, strict=True)}

    def texts(self, first: int, *, fastq: Sequence[bool]) -> list[bytes]:
        """The text of the fragments from `first` on, for each file."""
        settings = self.settings
        numbers = np.arange(first, min(first + CHUNK, self.num_fragments), dtype=np.int64)
        rng = np.random.default_rng([settings.seed, first // CHUNK])
        owner = np.searchsorted(self.ends, self.order(numbers), side="right")
        start, sequence = self._places(owner, rng)
        is_reverse = rng.random(numbers.size) < 0.5
        length = np.full(numbers.size, self.longest)
        if settings.insert is not None:
            drawn = np.rint(rng.normal(settings.insert, settings.insert_sd, numbers.size)).astype(np.int64)
            length = np.clip(drawn, settings.length + (ROOM if settings.indel else 0), self.longest)
        mates = [self._read(start, length, is_reverse, rng)]
        if settings.mates == 2:
            mates.append(self._read(start, length, ~is_reverse, rng))
        headers = [self._headers(numbers, owner, sequence, start, is_reverse, mate) for mate in range(settings.mates)]
        if len(fastq) == 2:
            return [_text([headers[mate]], [mates[mate]], fastq=fastq[mate]) for mate in range(2)]
        return [_text(headers, mates, fastq=fastq[0])]

    def _weights(self) -> NDArray[np.float64]:
        """How many of the fragments are of each genome, as shares of their sum."""
        sizes = np.array([genome.places(self.longest).sum() for genome in self.genomes], np.float64)
        if self.settings.abundance == "length":
            return sizes
        classes, of_class = np.unique([genome.class_id for genome in self.genomes], return_inverse=True)
        rng = np.random.default_rng([self.settings.seed, 1 << 32])
        common = np.exp(rng.normal(0, SPREAD, len(classes))) if self.settings.abundance == "lognormal" else 1
        return sizes / np.bincount(of_class, sizes)[of_class] * np.broadcast_to(common, len(classes))[of_class]

    def _places(self, owner: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
        """Where each fragment starts among all letters, and the number of its sequence in its genome."""
        starts, sequences = np.empty_like(owner), np.empty_like(owner)
        chance = rng.random(owner.size)
        for index in map(int, np.unique(owner)):
            genome = self.genomes[index]
            mine = np.flatnonzero(owner == index)
            ends = np.cumsum(genome.places(self.longest))
            place = (chance[mine] * ends[-1]).astype(np.int64)
            which = np.asarray(np.searchsorted(ends, place, side="right"), np.int64)
            sequences[mine] = which
            starts[mine] = genome.starts[which] + place - (ends[which] - genome.places(self.longest)[which])
        return starts, sequences

    def _read(
        self, start: Numbers, length: Numbers, is_reverse: NDArray[np.bool_], rng: np.random.Generator
    ) -> Letters:
        """[fragment, letter]: from the left end, or from the right end of the other strand, errors and all."""
        settings = self.settings
        shape = (start.size, settings.length)
        places = np.broadcast_to(np.arange(settings.length), shape)
        added = np.zeros(shape, bool)
        if settings.indel:
            chance = rng.random(shape, np.float32)
            added = chance < settings.indel / 2
            left_out = (chance >= settings.indel / 2) & (chance < settings.indel)
            places = np.clip(
                places + np.cumsum(left_out.astype(np.int64) - added, axis=1), 0, settings.length + ROOM - 1
            )
        first, step = np.where(is_reverse, start + length - 1, start), np.where(is_reverse, -1, 1)
        letters = self.letters[first[:, None] + places * step[:, None]]
        letters[is_reverse] = COMPLEMENT[letters[is_reverse]]
        if settings.error or settings.indel:
            wrong = rng.random(shape, np.float32) < settings.error
            _replace(letters, np.flatnonzero((wrong & ~added).reshape(-1)), rng, other=True)
            _replace(letters, np.flatnonzero(added.reshape(-1)), rng, other=False)
        return letters

    def _headers(
        self,
        numbers: Numbers,
        owner: Numbers,
        sequence: Numbers,
        start: Numbers,
        is_reverse: NDArray[np.bool_],
        mate: int,
    ) -> list[str]:
        """`lbl|class|tax|len|name/mate`; the name says where the fragment is from."""
        tails = (f"+/{mate + 1}", f"-/{mate + 1}")
        heads = [f"lbl|{genome.class_id}|{genome.tax_id}|{self.settings.length}|r" for genome in self.genomes]
        rows = zip(
            numbers.tolist(), owner.tolist(), sequence.tolist(), start.tolist(), is_reverse.tolist(), strict=True
        )
        firsts: list[list[int]] = [genome.starts.tolist() for genome in self.genomes]
        names = [genome.names for genome in self.genomes]
        return [
            f"{heads[own]}{number}_{names[own][where]}_{place - firsts[own][where]}{tails[back]}"
            for number, own, where, place, back in rows
        ]


def _replace(letters: Letters, at: Numbers, rng: np.random.Generator, *, other: bool) -> None:
    """Put random bases at these places; `other` ones than are there."""
    flat = letters.reshape(-1)
    if not other:
        flat[at] = BASES[rng.integers(0, 4, at.size)]
        return
    code = np.searchsorted(BASES, flat[at])  # N and the like come out as any
    flat[at] = BASES[(code + rng.integers(1, 4, at.size)) % 4]


def _text(headers: Sequence[list[str]], mates: Sequence[Letters], *, fastq: bool) -> bytes:
    """FASTA or FASTQ, the mates of a fragment one after the other."""
    size = mates[0].shape[1]
    flats = [letters.tobytes().decode("latin-1") for letters in mates]
    quality = f"\n+\n{'I' * size}" if fastq else ""
    mark = "@" if fastq else ">"
    lines = [
        f"{mark}{names[row]}\n{flat[row * size : (row + 1) * size]}{quality}\n"
        for row in range(len(mates[0]))
        for names, flat in zip(headers, flats, strict=True)
    ]
    return "".join(lines).encode("latin-1")


def _load(genomes: Sequence[Path], mapping: Path | None, index_dir: Path | None) -> tuple[Letters, list[Genome]]:
    """All letters of all genomes, upper case, and what each genome is."""
    pieces: list[Letters] = []
    found: list[tuple[Path, int | None, list[str], Numbers, Numbers]] = []
    at = 0
    for path in genomes:
        reads = open_reads([path], index_dir=index_dir)
        batch = reads.fetch(np.arange(len(reads)), ["sequence", "name"])
        names = [str(name) for name in batch.columns["name"]]
        pieces.append(UPPER[batch.flat])
        if bad := np.setdiff1d(pieces[-1], np.flatnonzero(COMPLEMENT)).tolist():
            raise BadSource(f"{path}: {chr(bad[0])!r} is no nucleotide: reads are simulated of DNA")
        found.append(
            (path, _taxon(path, names), [_plain(name) for name in names], batch.offsets[:-1] + at, batch.lengths)
        )
        at += batch.flat.size
    classes = _classes([(path, taxon) for path, taxon, *_ in found], mapping)
    return np.concatenate(pieces), [
        Genome(path, *classes[path], names, starts, lengths) for path, _, names, starts, lengths in found
    ]


def _taxon(path: Path, names: Sequence[str]) -> int | None:
    match = re.match(r"(\d+)[_.]", path.name) or re.search(r"kraken:taxid\|(\d+)", names[0] if names else "")
    return int(match[1]) if match else None


def _name(path: Path) -> str:
    """The species, as the name of a file has it: `562_Escherichia_coli_K12.fna`; or all of the name."""
    stem = re.sub(r"^\d+[_.]", "", path.name.split(".")[0])
    return " ".join(stem.split("_")[:2]) if BINOMIAL.match(stem) else stem or path.name


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)


def _classes(genomes: Sequence[tuple[Path, int | None]], mapping: Path | None) -> dict[Path, tuple[int, int]]:
    """The class and the taxon of each genome."""
    if mapping is not None and mapping.exists():
        known = load_mapping(mapping)
        if "tax_id" not in known.labels:
            raise BadSource(f"{mapping}: has no column tax_id, which says of which genome a class is")
        of_taxon = dict(zip(known.column("tax_id").to_pylist(), known.ids.tolist(), strict=True))
        named = known.column(SPECIES).to_pylist() if SPECIES in known.labels else []
        of_name = dict(zip(named, known.ids.tolist(), strict=False))
        found = {path: of_name.get(_name(path)) if taxon is None else of_taxon.get(taxon) for path, taxon in genomes}
        strange = [path.name for path, class_id in found.items() if class_id is None]
        if strange:
            raise BadSource(
                f"{strange[0]}: its taxon is not in {mapping}. Add it, or begin the file's name with its taxon: 562_..."
            )
        return {path: (found[path] or 0, taxon or 0) for path, taxon in genomes}
    keys = [taxon if taxon is not None else -1 - place for place, (_, taxon) in enumerate(genomes)]
    classes = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if mapping is not None:
        _write_mapping(mapping, {classes[key]: (taxon, path) for key, (path, taxon) in zip(keys, genomes, strict=True)})
    return {path: (classes[key], taxon or 0) for key, (path, taxon) in zip(keys, genomes, strict=True)}


def _write_mapping(out: Path, rows: dict[int, tuple[int | None, Path]]) -> None:
    """`class_id tax_id species genus`, as far as names of files say."""
    lines = [f"class_id\ttax_id\t{SPECIES}\tgenus"]
    for class_id, (taxon, path) in rows.items():
        name = _name(path)
        genus = name.split()[0] if " " in name else ""
        lines.append(f"{class_id}\t{taxon or 0}\t{name}\t{genus}")
    publish(out, ("\n".join(lines) + "\n").encode())
    say(f"{out}: {len(rows)} classes")


def _shared_out(count: int, weights: NDArray[np.float64]) -> Numbers:
    """So many, in these shares; what is left after rounding down goes to those that lost most."""
    exact = weights / weights.sum() * count
    counts = np.floor(exact).astype(np.int64)
    lost = np.argsort(counts - exact, kind="stable")[: count - int(counts.sum())]
    counts[lost] += 1
    return counts
