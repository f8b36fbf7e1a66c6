"""What reads are made of, from a sample: some neighbouring reads at places spread over all of them.

Neighbours, because a compressed file is decoded block by block: a few places cost a few blocks, however large the file.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millstream.store.read_batch import ReadBatch
from millstream.store.reads import Reads
from millstream.view.background import PATIENCE_S, Background

_READS, _LETTERS = 4096, 2 << 20  # of a sample, at most
_PLACES, _DECODED = 64, 24 << 20
_POSITIONS = 500  # for which qualities are told
_GC_BARS = 40
_PHRED = 33
Numbers = NDArray[np.int64]
Letters = NDArray[np.uint8]


class Sample:
    """Shares of the letters, GC of the reads and qualities by position; `tell` also says how many reads they are of."""

    def __init__(self, reads: Reads) -> None:
        self._total = len(reads)
        self._window = max(200, _LETTERS // max(min(self._total, _READS), 1))
        self._tally = _Tally()
        self._work = Background(self._look(reads))
        self._work.start()

    def tell(self, seconds: float | None = PATIENCE_S) -> dict[str, object]:
        """What was found so far; `is_done` says whether that is all that is looked at."""
        self._work.wait(seconds)
        with self._work.lock:
            found = self._tally.tell()
        return {**found, "of": self._total, "window": self._window, "is_done": self._work.is_done}

    def _look(self, reads: Reads) -> Iterator[None]:
        has_quality = all(part.has_quality for part in reads.parts)
        for numbers in _places(reads):
            lengths = reads.lengths(numbers)
            seen = np.minimum(lengths, self._window)
            if has_quality and not (lengths > seen).any():
                batch = reads.fetch(numbers, ["sequence", "quality"])
            else:
                shares = np.random.default_rng(int(numbers[0])).random(len(numbers))
                starts = (shares * (lengths - seen + 1)).astype(np.int64)
                batch = reads.regions(numbers, starts, starts + seen)
            with self._work.lock:
                self._tally.add(batch, lengths)
            yield


def _places(reads: Reads) -> Iterator[Numbers]:
    """Runs of neighbouring reads, in an order that is spread over the file from the first few on."""
    medium, total = reads.medium, len(reads)
    if total <= _READS and medium.num_bytes <= _DECODED:
        yield from [np.arange(total, dtype=np.int64)] if total else []
        return
    most = _PLACES if medium.is_random else min(max(_DECODED // max(medium.run_bytes, 1), 4), _PLACES)
    num_places = min(most, total)
    each = max(1, min(_READS // num_places, total // num_places))
    for place in np.random.default_rng(0).permutation(num_places).tolist():
        first = place * (total - each) // max(num_places - 1, 1)
        numbers = np.arange(first, first + each, dtype=np.int64)
        before = np.cumsum(reads.lengths(numbers))
        yield numbers[: max(1, int(np.searchsorted(before, max(medium.run_bytes, 1 << 20))))]


class _Tally:
    def __init__(self) -> None:
        self.weights = np.zeros(256)  # letters of all sampled reads, those not looked at as those that were
        self.gc: list[NDArray[np.float64]] = []
        self.grades = np.zeros((_POSITIONS, 94), np.int64)
        self.num_reads = self.num_letters = self.num_places = 0
        self.is_cut = False  # whether of some reads only a window was looked at

    def add(self, batch: ReadBatch, lengths: Numbers) -> None:
        """Reads, or windows of reads of these lengths."""
        seen = batch.lengths
        if batch.quality is not None:
            self._grade(batch.quality, batch.offsets)
        rows = np.repeat(np.arange(len(batch)), seen)
        counts = np.bincount(rows * 256 + batch.flat, minlength=256 * len(batch)).reshape(-1, 256)
        counts[:, ord("A") : ord("Z") + 1] += counts[:, ord("a") : ord("z") + 1]
        counts[:, ord("a") : ord("z") + 1] = 0
        self.weights += (counts * (lengths / np.maximum(seen, 1))[:, None]).sum(axis=0)
        strong, weak = counts[:, list(b"GC")].sum(axis=1), counts[:, list(b"ATU")].sum(axis=1)
        known = strong + weak > 0
        self.gc.append(strong[known] / (strong + weak)[known])
        self.num_reads += len(batch)
        self.num_letters += int(seen.sum())
        self.num_places += 1
        self.is_cut = self.is_cut or bool((lengths > seen).any())

    def _grade(self, quality: Letters, offsets: Numbers) -> None:
        positions = np.arange(len(quality)) - np.repeat(offsets[:-1], np.diff(offsets))
        near = positions < _POSITIONS
        grades = np.clip(quality[near].astype(np.int64) - _PHRED, 0, 93)
        self.grades += np.bincount(positions[near] * 94 + grades, minlength=self.grades.size).reshape(-1, 94)

    def tell(self) -> dict[str, object]:
        total = max(self.weights.sum(), 1e-300)
        letters = [(chr(place), self.weights[place] / total) for place in np.flatnonzero(self.weights).tolist()]
        nucleotides = sum(share for letter, share in letters if letter in "ACGTUN")
        gc, edges = np.histogram(np.concatenate([np.empty(0), *self.gc]), _GC_BARS, (0, 1))
        return {
            "reads": self.num_reads,
            "letters_seen": self.num_letters,
            "places": self.num_places,
            "is_cut": self.is_cut,
            "letters": sorted(letters, key=lambda pair: -pair[1]),
            # of proteins there is none
            "gc": {"from": edges[:-1], "to": edges[1:], "count": gc} if nucleotides > 0.9 else None,
            "gc_mean": _share(dict(letters), "GC", "GCATU"),
            "quality": self._qualities(),
        }

    def _qualities(self) -> dict[str, object] | None:
        reads = self.grades.sum(axis=1)
        (positions,) = np.nonzero(reads)
        if not len(positions):
            return None
        before = np.cumsum(self.grades[positions], axis=1) / reads[positions, None]
        low, middle = ((before >= share).argmax(axis=1) for share in (0.1, 0.5))
        return {"position": positions, "median": middle, "low": low}


def _share(letters: dict[str, float], some: str, of: str) -> float | None:
    whole = sum(letters.get(letter, 0.0) for letter in of)
    return sum(letters.get(letter, 0.0) for letter in some) / whole if whole else None
