"""Genomes -> labelled reads. Order, positions and errors of all reads are a function of the seed."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import Between, Count, Natural, NonNegative, Rate, check_settings, config_hash, parse_bytes
from millstream.core.console import Progress, format_bytes, say, silent
from millstream.core.files import already_exists, publish
from millstream.core.order import Permutation, mix
from millstream.core.outputs import STDOUT, find_finished, publishing_text, remember_finished
from millstream.core.record import crc32c
from millstream.errors import BadSetting, BadSource
from millstream.reads.features import BASES, COMPLEMENT, UPPER
from millstream.reads.mapping import load_mapping
from millstream.reads.open import open_reads
from millstream.reads.reads import Reads
from millstream.reads.tokenizers.kmers import Bases, Numbers

CHUNK = 1 << 14  # fragments drawn at a time; another number gives other reads
PIECE = 16 << 20  # bases read at a time
READING = 256 << 20  # memory budget of one genome while it is read
MEMORY = "4GB"
SPECIES = "species"
BINOMIAL = re.compile(r"[A-Z][a-z]+_[a-z]+")
SPREAD = 1.5  # standard deviation of log abundances
ROOM = 32  # extra bases per read, to make up for deletions
ABUNDANCES = ("length", "equal", "lognormal")


@dataclass(frozen=True)
class SimulateSettings:
    """How reads are sampled from genomes, and their sequencing errors."""

    reads: Count = 100_000  # a read pair counts as two
    length: Count = 150  # of a read, in bases
    error: Rate = 0.01  # per-base substitution rate
    indel: Annotated[float, Between(0, 0.1)] = 0.0  # per-base insertion and deletion rate
    insert: Count | None = None  # simulate read pairs, with this mean fragment length
    insert_sd: NonNegative = 30.0  # standard deviation of the fragment length
    abundance: str = "length"  # length (equal coverage), equal (reads per class), or lognormal
    seed: Natural = 0

    def check(self) -> None:
        """Raise BadSetting before any file is read."""
        check_settings(self)
        if self.insert is not None and self.insert < self.length:
            raise BadSetting(f"insert={self.insert}: a fragment must be at least as long as a read, {self.length}")
        if self.insert is not None and self.reads % 2:
            raise BadSetting(f"reads={self.reads}: must be even for read pairs")
        if self.abundance not in ABUNDANCES:
            raise BadSetting(f"abundance={self.abundance}: must be one of {', '.join(ABUNDANCES)}")

    @property
    def mates(self) -> int:
        return 1 if self.insert is None else 2


@dataclass(frozen=True)
class Genome:
    """One file: its class, and where its sequences are among the bases of all genomes."""

    path: Path
    class_id: int
    tax_id: int  # 0 if it is not known
    names: Sequence[str]
    starts: Numbers
    lengths: Numbers

    def places(self, length: int) -> Numbers:
        """The number of positions in each sequence where a fragment of this length fits."""
        return np.maximum(self.lengths - length + 1, 0)


@dataclass(frozen=True)
class Simulated:
    """What was written; coverage per genome, by file name, or by path if several files have that name."""

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
    memory: int | str = MEMORY,
    progress: Progress = silent,
) -> Simulated:
    """Write labelled reads of genomes; read pairs into one file, or into two, one per mate.

    Each file is one genome. Its taxon is the number at the start of its name, or that of `kraken:taxid|N` in its first
    header. Class ids are looked up in `mapping` by `tax_id`; if the file does not exist it is written, with one class
    per taxon. Genomes are held in memory, one byte per base, and must not take more than `memory`. The path `-` is
    stdout. Files that the same call has written are not written again.

    >>> simulate([Path("562_E_coli.fna.gz")], [Path("reads.fa.gz")], settings=SimulateSettings(reads=1000))
    """
    settings.check()
    if len(out) > settings.mates:
        raise BadSetting(f"{len(out)} output files: two are only for read pairs, which need insert=")
    if len(set(out)) < len(out):
        raise BadSetting(f"{out[0]}: given twice; give it once for both mates in one file, or two different files")
    bases, found = _load_genomes(genomes, mapping, index_dir, parse_bytes(memory))
    made = _Fragments(bases, found, settings)
    done = Simulated(settings.reads, settings.reads * settings.length, made.coverage())
    about = [[genome.path.name, genome.class_id, genome.tax_id, genome.names] for genome in found]
    terms = {**asdict(settings), "genomes": config_hash({"bases": crc32c(bases), "about": about})}
    files = [path for path in out if str(path) != STDOUT]
    known = [find_finished(path, terms) for path in files]
    if files and all(known):
        return done
    if any(known):
        raise already_exists(next(path for path, is_known in zip(files, known, strict=True) if is_known))
    is_fastq = [path.name.removesuffix(".gz").endswith((".fq", ".fastq")) for path in out]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(publishing_text(path)) if path in files else sys.stdout.buffer.write for path in out
        ]
        progress(0)
        for first in range(0, made.num_fragments, CHUNK):
            texts = made.texts(first, fastq=is_fastq)
            for write, text in zip(writers, texts, strict=True):
                write(text)
            progress(min(first + CHUNK, made.num_fragments) * settings.mates)
    for path in files:
        remember_finished(path, terms)
    return done


class _Fragments:
    """The simulated fragments by number: each from a genome, a position in it, and a strand."""

    def __init__(self, bases: Bases, genomes: Sequence[Genome], settings: SimulateSettings) -> None:
        self.bases, self.genomes, self.settings = bases, genomes, settings
        self.num_fragments = settings.reads // settings.mates
        self.longest = settings.length + (ROOM if settings.indel else 0)
        if settings.insert is not None:
            self.longest = max(self.longest, round(settings.insert + 4 * settings.insert_sd))
        short = [genome.path.name for genome in genomes if not genome.places(self.longest).any()]
        if short:
            raise BadSource(
                f"{short[0]}: has no sequence of at least {self.longest} bases, the longest possible fragment"
            )
        self.ends = np.cumsum(_apportioned(self.num_fragments, self._weights()))
        self.order = Permutation(self.num_fragments, mix(settings.seed, 1))

    def coverage(self) -> dict[str, float]:
        """Mean coverage of each genome."""
        counts = np.diff(self.ends, prepend=0) * self.settings.mates * self.settings.length
        names = Counter(path.name for path in {genome.path for genome in self.genomes})
        found: dict[str, float] = {}
        for genome, count in zip(self.genomes, counts.tolist(), strict=True):
            key = genome.path.name if names[genome.path.name] == 1 else str(genome.path)
            found[key] = found.get(key, 0.0) + count / int(genome.lengths.sum())  # a file may be given twice
        return found

    def texts(self, first: int, *, fastq: Sequence[bool]) -> list[bytes]:
        """The text of a chunk of fragments from `first` on, for each file."""
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
        mates = [self._bases(start, length, is_reverse, rng)]
        if settings.mates == 2:
            mates.append(self._bases(start, length, ~is_reverse, rng))
        headers = [self._headers(numbers, owner, sequence, start, is_reverse, mate) for mate in range(settings.mates)]
        if len(fastq) == 2:
            return [_text([headers[mate]], [mates[mate]], fastq=fastq[mate]) for mate in range(2)]
        return [_text(headers, mates, fastq=fastq[0])]

    def _weights(self) -> NDArray[np.float64]:
        """The relative number of fragments of each genome."""
        sizes = np.array([genome.places(self.longest).sum() for genome in self.genomes], np.float64)
        if self.settings.abundance == "length":
            return sizes
        classes, of_class = np.unique([genome.class_id for genome in self.genomes], return_inverse=True)
        rng = np.random.default_rng([self.settings.seed, 1 << 32])
        common = np.exp(rng.normal(0, SPREAD, len(classes))) if self.settings.abundance == "lognormal" else 1
        return sizes / np.bincount(of_class, sizes)[of_class] * np.broadcast_to(common, len(classes))[of_class]

    def _places(self, owner: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
        """Where each fragment starts among the bases of all genomes, and the number of its sequence in its genome."""
        starts, sequences = np.empty_like(owner), np.empty_like(owner)
        drawn = rng.random(owner.size)
        for index in map(int, np.unique(owner)):
            genome = self.genomes[index]
            mine = np.flatnonzero(owner == index)
            ends = np.cumsum(genome.places(self.longest))
            place = (drawn[mine] * ends[-1]).astype(np.int64)
            which = np.asarray(np.searchsorted(ends, place, side="right"), np.int64)
            sequences[mine] = which
            starts[mine] = genome.starts[which] + place - (ends[which] - genome.places(self.longest)[which])
        return starts, sequences

    def _bases(self, start: Numbers, length: Numbers, is_reverse: NDArray[np.bool_], rng: np.random.Generator) -> Bases:
        """[fragment, base]: the left end, or the right end of the other strand, with sequencing errors."""
        settings = self.settings
        shape = (start.size, settings.length)
        places = np.broadcast_to(np.arange(settings.length), shape)
        inserted = np.zeros(shape, bool)
        if settings.indel:
            drawn = rng.random(shape, np.float32)
            inserted = drawn < settings.indel / 2
            deleted = (drawn >= settings.indel / 2) & (drawn < settings.indel)
            places = np.clip(
                places + np.cumsum(deleted.astype(np.int64) - inserted, axis=1), 0, settings.length + ROOM - 1
            )
        first, step = np.where(is_reverse, start + length - 1, start), np.where(is_reverse, -1, 1)
        bases = self.bases[first[:, None] + places * step[:, None]]
        bases[is_reverse] = COMPLEMENT[bases[is_reverse]]
        if settings.error or settings.indel:
            wrong = rng.random(shape, np.float32) < settings.error
            _randomise(bases, np.flatnonzero((wrong & ~inserted).reshape(-1)), rng, other=True)
            _randomise(bases, np.flatnonzero(inserted.reshape(-1)), rng, other=False)
        return bases

    def _headers(
        self,
        numbers: Numbers,
        owner: Numbers,
        sequence: Numbers,
        start: Numbers,
        is_reverse: NDArray[np.bool_],
        mate: int,
    ) -> list[str]:
        """`lbl|class|tax|len|name/mate`; the name has the position of the fragment."""
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


def _randomise(bases: Bases, at: Numbers, rng: np.random.Generator, *, other: bool) -> None:
    """Put random bases at these positions; with `other`, always different ones."""
    flat = bases.reshape(-1)
    if not other:
        flat[at] = BASES[rng.integers(0, 4, at.size)]
        return
    code = np.searchsorted(BASES, flat[at])  # N and other codes become any base
    flat[at] = BASES[(code + rng.integers(1, 4, at.size)) % 4]


def _text(headers: Sequence[list[str]], mates: Sequence[Bases], *, fastq: bool) -> bytes:
    """FASTA or FASTQ, the mates of a fragment one after the other."""
    size = mates[0].shape[1]
    flats = [bases.tobytes().decode("latin-1") for bases in mates]
    quality = f"\n+\n{'I' * size}" if fastq else ""
    mark = "@" if fastq else ">"
    lines = [
        f"{mark}{names[row]}\n{flat[row * size : (row + 1) * size]}{quality}\n"
        for row in range(len(mates[0]))
        for names, flat in zip(headers, flats, strict=True)
    ]
    return "".join(lines).encode("latin-1")


def _load_genomes(
    paths: Sequence[Path], mapping: Path | None, index_dir: Path | None, memory: int
) -> tuple[Bases, list[Genome]]:
    """The bases of all genomes, in upper case, and the genomes."""
    opened = [open_reads([path], index_dir=index_dir, memory=READING) for path in paths]
    total = sum(reads.num_bases for reads in opened)
    if total > memory:
        largest = max(opened, key=lambda reads: reads.num_bases)
        raise BadSetting(
            f"{largest.paths[0]}: {largest.num_bases:,} of the {total:,} bases of all genomes, too many for the memory "
            f"budget of {format_bytes(memory)}. Raise memory to {format_bytes(total * 1.05)}, or give fewer genomes"
        )
    bases = np.empty(total, np.uint8)
    genomes: list[Genome] = []
    at = 0
    for path in paths:
        reads = opened.pop(0)  # decoded blocks are not kept
        numbers = np.arange(len(reads))
        lengths = reads.lengths(numbers)
        first = at
        for piece in _pieces(reads, lengths):
            bases[at : at + piece.size] = UPPER[piece]
            if bad := np.flatnonzero(COMPLEMENT[bases[at : at + piece.size]] == 0)[:1].tolist():
                found = chr(bases[at + bad[0]])
                raise BadSource(f"{path}: {found!r} is not a nucleotide; reads can only be simulated from DNA")
            at += piece.size
        names = [str(name) for name in reads.fetch(numbers, ["name"]).columns["name"]]
        ascii_names = [re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII) for name in names]
        starts = first + np.cumsum(lengths) - lengths
        genomes.append(Genome(path, 0, _taxon(path, names), ascii_names, starts, lengths))
    class_ids = _class_ids(genomes, mapping)
    return bases, [replace(g, class_id=own) for g, own in zip(genomes, class_ids, strict=True)]


def _pieces(reads: Reads, lengths: Numbers) -> Iterator[Bases]:
    """The bases of all sequences in order, some megabytes at a time however long a sequence is."""
    counts = np.maximum(-(-lengths // PIECE), 1)
    numbers = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE
    ends = np.minimum(starts + PIECE, lengths[numbers])
    edges = np.flatnonzero(np.diff(np.cumsum(ends - starts) // PIECE)) + 1
    for some in np.split(np.arange(len(numbers)), edges):
        yield reads.regions(numbers[some], starts[some], ends[some]).flat


def _taxon(path: Path, names: Sequence[str]) -> int:
    match = re.match(r"(\d+)[_.]", path.name) or re.search(r"kraken:taxid\|(\d+)", names[0] if names else "")
    return int(match[1]) if match else 0


def _species(path: Path) -> str:
    """The species in the name of a file, as in `562_Escherichia_coli_K12.fna`; otherwise the whole name."""
    stem = re.sub(r"^\d+[_.]", "", path.name.split(".")[0])
    return " ".join(stem.split("_")[:2]) if BINOMIAL.match(stem) else stem or path.name


def _class_ids(genomes: Sequence[Genome], mapping: Path | None) -> list[int]:
    """The class of each genome: from the mapping, or one per taxon, which are written to it if it does not exist."""
    if mapping is not None and mapping.exists():
        known = load_mapping(mapping)
        if "tax_id" not in known.labels:
            raise BadSource(f"{mapping}: has no column tax_id to look up the genomes by")
        ids = known.ids.tolist()
        of_taxon = dict(zip(known.column("tax_id").to_pylist(), ids, strict=True))
        of_species = dict(zip(known.column(SPECIES).to_pylist(), ids, strict=True)) if SPECIES in known.labels else {}
        found = [of_taxon.get(g.tax_id) if g.tax_id else of_species.get(_species(g.path)) for g in genomes]
        unknown = [genome.path.name for genome, own in zip(genomes, found, strict=True) if own is None]
        if unknown:
            raise BadSource(
                f"{unknown[0]}: its taxon is not in {mapping}. Add it, or start the file name with its taxon: 562_..."
            )
        return [own for own in found if own is not None]
    keys = [genome.tax_id or -1 - place for place, genome in enumerate(genomes)]  # without a taxon, one class each
    classes = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if mapping is not None:
        _write_mapping(mapping, {classes[key]: genome for key, genome in zip(keys, genomes, strict=True)})
    return [classes[key] for key in keys]


def _write_mapping(out: Path, genomes: dict[int, Genome]) -> None:
    """`class_id tax_id species genus`, from the names of the files."""
    lines = [f"class_id\ttax_id\t{SPECIES}\tgenus"]
    for class_id, genome in genomes.items():
        name = _species(genome.path)
        genus = name.split()[0] if " " in name else ""
        lines.append(f"{class_id}\t{genome.tax_id}\t{name}\t{genus}")
    publish(out, ("\n".join(lines) + "\n").encode())
    say(f"{out}: {len(genomes)} classes")


def _apportioned(count: int, weights: NDArray[np.float64]) -> Numbers:
    """Divide `count` in proportion to the weights, by largest remainder."""
    exact = weights / weights.sum() * count
    counts = np.floor(exact).astype(np.int64)
    lost = np.argsort(counts - exact, kind="stable")[: count - int(counts.sum())]
    counts[lost] += 1
    return counts
