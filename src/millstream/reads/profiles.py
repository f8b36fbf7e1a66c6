"""Sequencing profiles: how long reads are, and where their errors are. A quality tells the probability of an error."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import kernel
from millstream.reads.features import BASES, COMPLEMENT
from millstream.reads.tokenizers.kmers import CODES, Bases, Numbers

UNIFORM = "uniform"
LEAST, MOST = 2, 60  # Phred values; an N has the least
ROOM = 32  # extra bases per read, to make up for deletions
SHORTEST = 200  # of reads that differ in length, unless they are shorter on average
LONGEST = 10  # times the mean length
QUANTILES = 500
SLACK = 1.25  # bases of a read per base of its genome, at most
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
PROBABILITY: Doubles = np.power(10.0, -0.1 * np.arange(MOST + 1))  # of an error, by Phred value


@dataclass(frozen=True)
class Profile:
    """What reads of a sequencer are like. Rates are per base, means over all reads."""

    length: int  # the mean, in bases
    error: float  # substitutions
    indel: float  # insertions and deletions
    length_spread: float = 0.0  # standard deviation of read lengths, relative to the mean; 0: all have the same
    read_spread: float = 0.0  # standard deviation of the log error rate between reads,
    base_spread: float = 0.0  # and along a read, where neighbours are alike
    alike: float = 0.0  # correlation of neighbours
    fall: float = 0.0  # log of the error rate at the end of a read, relative to its start
    homopolymer: float = 0.0  # from the third base of a homopolymer on, what each adds to its indel rate of 1
    insertions: float = 0.5  # of the indels, which share inserts a base
    best: int = 40  # the largest Phred value

    @property
    def span(self) -> int:
        """How many bases of the genome a read may need; 1 if it is drawn for each."""
        if self.length_spread:
            return 1
        more = 0 if self.is_uniform else round(self.length * self.indel)
        return self.length + (ROOM + more if self.indel else 0)

    @property
    def is_uniform(self) -> bool:
        """Whether all bases have the same error rate, which says nothing about qualities."""
        return not self.base_spread


PROFILES: Mapping[str, Profile] = {
    UNIFORM: Profile(150, 0.01, 0.0),
    "illumina": Profile(150, 0.003, 0.0001, read_spread=0.8, base_spread=1.5, alike=0.3, fall=2.3),
    "hifi": Profile(15_000, 0.0005, 0.0015, 0.2, read_spread=0.8, base_spread=1.5, alike=0.3, homopolymer=8.0, best=50),
    "ont": Profile(
        10_000, 0.03, 0.04, 0.8, read_spread=0.4, base_spread=0.7, alike=0.6, homopolymer=1.0, insertions=0.4, best=50
    ),
}


@dataclass(frozen=True)
class Sequenced:
    """Reads: read i is `bases[starts[i] : starts[i] + lengths[i]]`, its Phred values the same slice of `phred`."""

    bases: Bases
    phred: Bases | None
    starts: Numbers
    lengths: Numbers


def draw_lengths(profile: Profile, count: int, rng: np.random.Generator) -> Numbers:
    """How many bases of a genome each read is of."""
    shape = profile.length_spread**-2
    drawn = rng.gamma(shape, profile.length / shape, count)
    return np.rint(np.clip(drawn, min(SHORTEST, profile.length), LONGEST * profile.length)).astype(np.int64)


def sequence(
    genome: Bases,
    starts: Numbers,
    spans: Numbers,
    is_reverse: NDArray[np.bool_],
    profile: Profile,
    rng: np.random.Generator,
) -> Sequenced:
    """The reads of these fragments: the left end, or the right end of the other strand, with sequencing errors."""
    firsts = np.where(is_reverse, starts + spans - 1, starts)
    if profile.is_uniform:
        bases = _uniform(genome, firsts, is_reverse, profile, rng)
        size = np.full(starts.size, profile.length)
        return Sequenced(bases.reshape(-1), None, np.cumsum(size) - size, size)
    return _with_qualities(genome, firsts, spans, is_reverse, profile, rng)


def _uniform(
    genome: Bases, firsts: Numbers, is_reverse: NDArray[np.bool_], profile: Profile, rng: np.random.Generator
) -> Bases:
    """[fragment, base]"""
    shape = (firsts.size, profile.length)
    places = np.broadcast_to(np.arange(profile.length), shape)
    inserted = np.zeros(shape, bool)
    if profile.indel:
        drawn = rng.random(shape, np.float32)
        inserted = drawn < profile.indel / 2
        deleted = (drawn >= profile.indel / 2) & (drawn < profile.indel)
        places = np.clip(places + np.cumsum(deleted.astype(np.int64) - inserted, axis=1), 0, profile.span - 1)
    bases = genome[firsts[:, None] + places * np.where(is_reverse, -1, 1)[:, None]]
    bases[is_reverse] = COMPLEMENT[bases[is_reverse]]
    if profile.error or profile.indel:
        wrong = rng.random(shape, np.float32) < profile.error
        _randomise(bases, np.flatnonzero((wrong & ~inserted).reshape(-1)), rng, other=True)
        _randomise(bases, np.flatnonzero(inserted.reshape(-1)), rng, other=False)
    return bases


def _randomise(bases: Bases, at: Numbers, rng: np.random.Generator, *, other: bool) -> None:
    """Put random bases at these positions; with `other`, always different ones."""
    flat = bases.reshape(-1)
    if not other:
        flat[at] = BASES[rng.integers(0, 4, at.size)]
        return
    code = np.searchsorted(BASES, flat[at])  # N and other codes become any base
    flat[at] = BASES[(code + rng.integers(1, 4, at.size)) % 4]


def _with_qualities(
    genome: Bases,
    firsts: Numbers,
    spans: Numbers,
    is_reverse: NDArray[np.bool_],
    profile: Profile,
    rng: np.random.Generator,
) -> Sequenced:
    """The error probability of each base is drawn first, and rounded to a Phred value.

    With that probability the base is replaced, is inserted, or has the one before it deleted.
    """
    size = firsts.size
    room = np.full(size, profile.length) if not profile.length_spread else np.ceil(spans * SLACK).astype(np.int64)
    ends = np.cumsum(room)
    total = int(ends[-1]) if size else 0
    bases, phred, lengths = np.empty(total, np.uint8), np.empty(total, np.uint8), np.empty(size, np.int64)
    level, along = _mean_of_one(profile)
    levels = level + profile.read_spread * rng.standard_normal(size)
    _sequence(
        genome,
        firsts,
        spans,
        is_reverse,
        ends - room,
        room,
        levels,
        along,
        rng.standard_normal(total, np.float32),
        rng.random(total, np.float32),
        PROBABILITY,
        COMPLEMENT,
        CODES,
        BASES,
        profile.error,
        profile.indel,
        profile.base_spread,
        profile.alike,
        profile.homopolymer,
        profile.insertions,
        profile.best,
        bases,
        phred,
        lengths,
    )
    return Sequenced(bases, phred, ends - room, lengths)


@cache
def _mean_of_one(profile: Profile) -> tuple[float, Doubles]:
    """The log of error rates relative to their mean: of a middling base, and what each place in a read adds."""
    along = profile.fall * np.linspace(0, 1, profile.length if profile.fall else 0) ** 2
    normal = NormalDist(0, np.hypot(profile.read_spread, profile.base_spread))
    drawn = np.array([normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES)])
    wanted, level = profile.error + profile.indel, 0.0
    rates = wanted * np.exp(drawn[:, None] + (along[:: -(-along.size // 100)] if along.size else np.zeros(1)))
    for _ in range(20 if wanted else 0):  # Phred values end somewhere, which changes the mean
        found = np.clip(rates * np.exp(level), PROBABILITY[profile.best], PROBABILITY[LEAST])
        level += float(np.log(wanted / found.mean()))
    return level, along


@kernel
def _sequence(
    genome: Bases,
    firsts: Numbers,
    spans: Numbers,
    is_reverse: NDArray[np.bool_],
    starts: Numbers,
    room: Numbers,
    levels: Doubles,
    along: Doubles,
    noise: Floats,
    draws: Floats,
    probability: Doubles,
    complement: Bases,
    codes: Numbers,
    alphabet: Bases,
    error: float,
    indel: float,
    spread: float,
    alike: float,
    homopolymer: float,
    insertions: float,
    best: int,
    bases: Bases,
    phred: Bases,
    lengths: Numbers,
) -> None:
    """One draw decides whether a base is wrong, and if it is, its remainder how."""
    fresh = np.sqrt(1 - alike * alike)
    in_runs = 1 + homopolymer / 12  # the mean over random DNA: 1/16 + 1/64 + ... of bases are third, fourth, ...
    for read in range(firsts.size):
        first, step, span = firsts[read], -1 if is_reverse[read] else 1, spans[read]
        out, quality = bases[starts[read] :], phred[starts[read] :]
        place = run = written = 0
        last, state = 255, 0.0
        while written < room[read] and place < span:
            base = genome[first + place * step]
            if step < 0:
                base = complement[base]
            at = starts[read] + written
            state = alike * state + fresh * noise[at] if written else float(noise[at])
            third = max((run + 1 if base == last else 1) - 2, 0)
            lost = indel * (1 + homopolymer * third) / in_runs
            total = error + lost
            code, value = codes[base], best
            if code > 3:
                value = LEAST
            elif total > 0:
                level = levels[read] + spread * state
                if along.size:
                    level += along[written]
                value = min(max(int(np.floor(-10 * np.log10(total * np.exp(level)) + 0.5)), LEAST), best)
            is_inserted = False
            if code <= 3 and total > 0 and draws[at] < probability[value]:
                rest = draws[at] / probability[value] * total
                if error > 0 and rest >= lost:
                    out[written] = alphabet[(code + 1 + min(int((rest - lost) / error * 3), 2)) % 4]
                elif rest < lost * insertions:
                    is_inserted = True
                    which = int(rest / (lost * insertions) * 8)  # half of the insertions repeat a base
                    out[written] = base if which >= 4 else alphabet[which]
                else:
                    run, last = (run + 1 if base == last else 1), base
                    place += 1
                    if place == span:
                        break
                    base = genome[first + place * step]
                    out[written] = complement[base] if step < 0 else base
                    base = out[written]
            else:
                out[written] = base
            quality[written] = value
            written += 1
            if not is_inserted:
                run, last = (run + 1 if base == last else 1), base
                place += 1
        lengths[read] = written
