"""Genomes -> labelled reads. Order, positions and errors of all reads are a function of the seed."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import Between, Count, Natural, NonNegative, Rate, check_settings, config_hash, parse_bytes
from millstream.core.console import Progress, silent
from millstream.core.files import already_exists
from millstream.core.order import Permutation, mix
from millstream.core.outputs import STDOUT, find_finished, publishing_text, remember_finished, stdout
from millstream.core.record import crc32c
from millstream.errors import BadSetting, BadSource
from millstream.reads.genomes import Genome, load_genomes
from millstream.reads.profiles import PROFILES, UNIFORM, Profile, Sequenced, draw_lengths, sequence
from millstream.reads.qualities import PHRED
from millstream.reads.tokenizers.kmers import Bases, Numbers

CHUNK = 1 << 14  # fragments drawn at a time, fewer if they are long; another number gives other reads
CHUNK_BASES = CHUNK * 150
MEMORY = "4GB"
SPREAD = 1.5  # standard deviation of log abundances
CONSTANT = "I"  # the quality of all bases of a profile without qualities
ABUNDANCES = ("length", "equal", "lognormal")


@dataclass(frozen=True)
class SimulateSettings:
    """How reads are sampled from genomes, and their sequencing errors."""

    reads: Count = 100_000  # a read pair counts as two
    length: Count | None = None  # of a read, in bases, on average; this and the rates: None is that of the profile
    error: Rate | None = None  # per-base substitution rate
    indel: Annotated[float, Between(0, 0.1)] | None = None  # per-base insertion and deletion rate
    insert: Count | None = None  # simulate read pairs, with this mean fragment length
    insert_sd: NonNegative = 30.0  # standard deviation of the fragment length
    abundance: str = "length"  # length (equal coverage), equal (reads per class), or lognormal
    seed: Natural = 0
    profile: str = UNIFORM  # of the sequencer

    def check(self) -> None:
        """Raise BadSetting before any file is read."""
        check_settings(self)
        if self.profile not in PROFILES:
            raise BadSetting(f"profile={self.profile}: must be one of {', '.join(PROFILES)}")
        length = self.sequencer.length
        if self.insert is not None and self.sequencer.length_spread:
            raise BadSetting(f"insert={self.insert}: reads of profile={self.profile} have no mates")
        if self.insert is not None and self.insert < length:
            raise BadSetting(f"insert={self.insert}: a fragment must be at least as long as a read, {length}")
        if self.insert is not None and self.reads % 2:
            raise BadSetting(f"reads={self.reads}: must be even for read pairs")
        if self.abundance not in ABUNDANCES:
            raise BadSetting(f"abundance={self.abundance}: must be one of {', '.join(ABUNDANCES)}")

    @property
    def mates(self) -> int:
        return 1 if self.insert is None else 2

    @property
    def sequencer(self) -> Profile:
        """The profile, with the length and the rates of these settings."""
        given = {name: getattr(self, name) for name in ("length", "error", "indel")}
        return replace(PROFILES[self.profile], **{name: value for name, value in given.items() if value is not None})

    def terms(self) -> dict[str, object]:
        """What the reads depend on; of a uniform profile, as before there were others."""
        used = asdict(self.sequencer) if self.profile != UNIFORM else {}
        found = {
            **asdict(self),
            **{name: getattr(self.sequencer, name) for name in ("length", "error", "indel")},
            **used,
        }
        return found if used else {name: value for name, value in found.items() if name != "profile"}


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
    header. Class ids are looked up in `mapping` by its column `file`, or by `tax_id`; if the mapping does not exist it
    is written, with one class per taxon. Genomes are held in memory, one byte per base, and must not take more than
    `memory`. The path `-` is stdout. Files that the same call has written are not written again.

    >>> simulate([Path("562_E_coli.fna.gz")], [Path("reads.fa.gz")], settings=SimulateSettings(reads=1000))
    """
    settings.check()
    if len(out) > settings.mates:
        raise BadSetting(f"{len(out)} output files: two are only for read pairs, which need insert=")
    if len(set(out)) < len(out):
        raise BadSetting(f"{out[0]}: given twice; give it once for both mates in one file, or two different files")
    bases, found = load_genomes(genomes, mapping, index_dir, parse_bytes(memory))
    made = _Fragments(bases, found, settings)
    about = [[genome.path.name, genome.class_id, genome.tax_id, genome.names] for genome in found]
    terms = {**settings.terms(), "genomes": config_hash({"bases": crc32c(bases), "about": about})}
    files = [path for path in out if str(path) != STDOUT]
    known = [find_finished(path, terms) for path in files]
    if files and all(known):
        return made.summary(known[0])
    if any(known):
        raise already_exists(next(path for path, is_known in zip(files, known, strict=True) if is_known))
    is_fastq = [path.name.removesuffix(".gz").endswith((".fq", ".fastq")) for path in out]
    with ExitStack() as stack:
        writers = [stack.enter_context(publishing_text(path)) if path in files else stdout().write for path in out]
        progress(0)
        for first in range(0, made.num_fragments, made.chunk):
            texts = made.texts(first, fastq=is_fastq)
            for write, text in zip(writers, texts, strict=True):
                write(text)
            progress(min(first + made.chunk, made.num_fragments) * settings.mates)
    state = made.num_bases.tolist()
    for path in files:
        remember_finished(path, terms, state)
    return made.summary(state)


class _Fragments:
    """The simulated fragments by number: each from a genome, a position in it, and a strand."""

    def __init__(self, bases: Bases, genomes: Sequence[Genome], settings: SimulateSettings) -> None:
        self.bases, self.genomes, self.settings = bases, genomes, settings
        self.profile = profile = settings.sequencer
        self.num_fragments = settings.reads // settings.mates
        self.longest = profile.span
        self.chunk = CHUNK
        if not profile.is_uniform:
            self.chunk = 1 << int(np.clip(CHUNK_BASES // profile.length, 1, CHUNK)).bit_length() - 1
        if settings.insert is not None:
            self.longest = max(self.longest, round(settings.insert + 4 * settings.insert_sd))
        short = [genome.path.name for genome in genomes if not genome.places(self.longest).any()]
        if short:
            raise BadSource(
                f"{short[0]}: has no sequence of at least {self.longest} bases, the longest possible fragment"
            )
        self.ends = np.cumsum(_apportioned(self.num_fragments, self._weights()))
        self.num_bases = np.zeros(len(genomes), np.int64)  # written, of each genome
        self.order = Permutation(self.num_fragments, mix(settings.seed, 1))

    def summary(self, state: Any) -> Simulated:
        """What was written, from the bases of each genome; an older version did not record them, but all reads
        had the same length."""
        counts = np.diff(self.ends, prepend=0) * self.settings.mates * self.profile.length if state is True else state
        names = Counter(path.name for path in {genome.path for genome in self.genomes})
        found: dict[str, float] = {}
        for genome, count in zip(self.genomes, map(int, counts), strict=True):
            key = genome.path.name if names[genome.path.name] == 1 else str(genome.path)
            found[key] = found.get(key, 0.0) + count / int(genome.lengths.sum())  # a file may be given twice
        return Simulated(self.settings.reads, sum(map(int, counts)), found)

    def texts(self, first: int, *, fastq: Sequence[bool]) -> list[bytes]:
        """The text of a chunk of fragments from `first` on, for each file."""
        settings = self.settings
        numbers = np.arange(first, min(first + self.chunk, self.num_fragments), dtype=np.int64)
        rng = np.random.default_rng([settings.seed, first // self.chunk])
        owner = np.searchsorted(self.ends, self.order(numbers), side="right")
        start, which = self._places(owner, rng)
        is_reverse = rng.random(numbers.size) < 0.5
        length = np.full(numbers.size, self.longest)
        if settings.insert is not None:
            drawn = np.rint(rng.normal(settings.insert, settings.insert_sd, numbers.size)).astype(np.int64)
            length = np.clip(drawn, self.profile.span, self.longest)
        if self.profile.length_spread:
            start, length = self._fitted(owner, which, start, draw_lengths(self.profile, numbers.size, rng))
        strands = (is_reverse, ~is_reverse)[: settings.mates]
        mates = [sequence(self.bases, start, length, strand, self.profile, rng) for strand in strands]
        for one in mates:
            np.add.at(self.num_bases, owner, one.lengths)
        names = self._names(numbers, owner, which, start, is_reverse)
        heads = [f"lbl|{genome.class_id}|{genome.tax_id}|" for genome in self.genomes]
        before = [heads[own] for own in map(int, owner)]
        if len(fastq) == 2:
            return [
                _text([one], before, names, first_mate=mate + 1, fastq=fastq[mate]) for mate, one in enumerate(mates)
            ]
        return [_text(mates, before, names, first_mate=1, fastq=fastq[0])]

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

    def _fitted(self, owner: Numbers, which: Numbers, start: Numbers, length: Numbers) -> tuple[Numbers, Numbers]:
        """Start and length of each fragment, shortened to its sequence, and moved evenly so that it lies within it."""
        sizes, firsts = np.empty_like(start), np.empty_like(start)
        for index in map(int, np.unique(owner)):
            mine = np.flatnonzero(owner == index)
            sizes[mine], firsts[mine] = (
                of[which[mine]] for of in (self.genomes[index].lengths, self.genomes[index].starts)
            )
        length = np.minimum(length, sizes)
        return firsts + (start - firsts) * (sizes - length + 1) // sizes, length

    def _names(
        self, numbers: Numbers, owner: Numbers, which: Numbers, start: Numbers, is_reverse: NDArray[np.bool_]
    ) -> list[str]:
        """The name of each fragment: its number, sequence, position and strand."""
        rows = zip(numbers.tolist(), owner.tolist(), which.tolist(), start.tolist(), is_reverse.tolist(), strict=True)
        firsts: list[list[int]] = [genome.starts.tolist() for genome in self.genomes]
        names = [genome.names for genome in self.genomes]
        return [
            f"|r{number}_{names[own][where]}_{place - firsts[own][where]}{'-' if back else '+'}/"
            for number, own, where, place, back in rows
        ]


def _text(
    mates: Sequence[Sequenced], heads: Sequence[str], names: Sequence[str], *, first_mate: int, fastq: bool
) -> bytes:
    """FASTA or FASTQ with headers `lbl|class|tax|len|name/mate`, the mates of a fragment one after the other."""
    mark = "@" if fastq else ">"
    made: list[list[str]] = []
    for mate, one in enumerate(mates, first_mate):
        flat = one.bases.tobytes().decode("latin-1")
        quality = "" if one.phred is None else (one.phred + PHRED).tobytes().decode("latin-1")
        edges = zip(one.starts.tolist(), one.lengths.tolist(), strict=True)
        made.append(
            [
                f"{mark}{head}{size}{name}{mate}\n{flat[at : at + size]}\n"
                + (f"+\n{quality[at : at + size] or CONSTANT * size}\n" if fastq else "")
                for head, name, (at, size) in zip(heads, names, edges, strict=True)
            ]
        )
    return "".join(text for texts in zip(*made, strict=True) for text in texts).encode("latin-1")


def _apportioned(count: int, weights: NDArray[np.float64]) -> Numbers:
    """Divide `count` in proportion to the weights, by largest remainder."""
    exact = weights / weights.sum() * count
    counts = np.floor(exact).astype(np.int64)
    lost = np.argsort(counts - exact, kind="stable")[: count - int(counts.sum())]
    counts[lost] += 1
    return counts
