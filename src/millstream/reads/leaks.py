"""Exact sequences that two splits share, on either strand: measured on samples of both."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millstream.core.batches import fetch_batch
from millstream.core.collection import Collection, Numbers
from millstream.core.kernels import kernel
from millstream.core.order import Permutation
from millstream.reads.batch import ReadBatch
from millstream.reads.features import COMPLEMENT, UPPER
from millstream.reads.files import SEQUENCE
from millstream.reads.tokenizers.kmers import Bases

SAMPLED = 2_000  # reads that are looked up
SCANNED = 1_000_000  # reads that they are looked up in, in runs of neighbours
RUN = 1 << 12
READ_BYTES = 8 << 20  # of sequences at a time
SHORTEST, LONGEST = 30, 20_000  # bases: shorter ones may agree by chance, and contigs are no reads


class Shared(NamedTuple):
    """Of `sampled` reads, `found` have the sequence of one of a `share` of the reads they were looked up in."""

    found: int
    sampled: int
    share: float

    @property
    def estimate(self) -> float:
        """The share of reads that have the sequence of any of them."""
        return min(self.found / max(self.sampled, 1) / self.share, 1.0)


def shared_sequences(held_out: Collection, train: Collection) -> Shared:
    """How many reads of a sample of `held_out` have exactly the sequence of a read in a sample of `train`."""
    some = np.sort(Permutation(len(held_out), 0)(np.arange(min(SAMPLED, len(held_out)))))
    wanted = np.concatenate(
        [np.empty(0, np.int64), *(_hashes(held_out, at) for at in np.split(some, range(64, len(some), 64)))]
    )
    known = np.unique(wanted)
    is_found, scanned = np.zeros(len(known), np.bool_), 0
    for run in _runs(len(train)):
        scanned += len(run)
        is_found |= np.isin(known, _hashes(train, run))
    found = np.isin(wanted, known[is_found])
    return Shared(int(found.sum()), len(wanted), scanned / max(len(train), 1))


def _runs(size: int) -> Iterator[Numbers]:
    """Runs of neighbours, evenly spaced, of `SCANNED` numbers in all."""
    count = -(-size // RUN)
    for place in np.unique(np.linspace(0, count - 1, min(count, SCANNED // RUN)).astype(np.int64)).tolist():
        yield np.arange(place * RUN, min((place + 1) * RUN, size), dtype=np.int64)


def _hashes(reads: Collection, numbers: Numbers) -> Numbers:
    """A hash of each sequence that is neither short nor long, the same for both strands."""
    sizes = reads.sizes(numbers, [SEQUENCE])  # the bases, and a little more
    numbers, sizes = numbers[sizes < LONGEST], sizes[sizes < LONGEST]
    hashes = [np.empty(0, np.int64)]
    for some in np.split(numbers, np.flatnonzero(np.diff(np.cumsum(sizes) // READ_BYTES)) + 1):
        if len(some):
            batch = fetch_batch(reads, some, [SEQUENCE])
            assert isinstance(batch, ReadBatch)
            out = np.empty(len(some), np.int64)
            _hash_sequences(batch.flat, batch.offsets, UPPER, COMPLEMENT, out)
            hashes.append(out[np.diff(batch.offsets) >= SHORTEST])
    return np.concatenate(hashes)


@kernel
def _hash_sequences(flat: Bases, offsets: Numbers, upper: Bases, complement: Bases, out: Numbers) -> None:
    for read in range(len(out)):
        forward = backward = np.int64(1469598103934665603)
        first, end = offsets[read], offsets[read + 1]
        for place in range(first, end):
            forward = (forward ^ np.int64(upper[flat[place]])) * np.int64(1099511628211)
            backward = (backward ^ np.int64(complement[upper[flat[end - 1 - (place - first)]]])) * np.int64(
                1099511628211
            )
        out[read] = min(forward, backward)
