"""Reads as some of their k-mers: closed syncmers, which depend on the k-mer alone and are never far apart."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.core.batches import Batch
from millstream.core.kernels import kernel
from millstream.errors import BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.features import LOW_31_BITS, STIR, hash_kmer
from millstream.reads.tokenizers.kmers import CODES, FOREIGN, LARGEST_K, Bases, Numbers, foreign_bytes, frozen

Places = NDArray[np.int32]


@dataclass(frozen=True)
class Syncmers:
    """`kmers` [chosen k-mers of all reads], `places` in their reads, `starts` [read] in both, and `lengths` [read].

    A k-mer is chosen if, of the s-mers in it, the one of the smallest hash is the first or the last: two in k - s + 1,
    the same ones in every read. k-mers are canonical, so both strands give the same, and are given as hashes of 62
    bits. Those with an N are skipped.
    """

    k: int
    s: int

    def __post_init__(self) -> None:
        if not 1 <= self.s <= self.k <= LARGEST_K:
            raise ValueError(f"k={self.k}, s={self.s}: must be from 1 to {LARGEST_K}, s at most k")

    @property
    def share(self) -> float:
        """Of the k-mers of random DNA."""
        return min(2 / (self.k - self.s + 1), 1.0)

    @property
    def fields(self) -> list[str]:
        return ["sequence"]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ReadBatch):
            raise ValueError("syncmers need reads; these records are traces")
        flat, offsets = frozen(batch.flat, batch.offsets)
        lengths = np.diff(offsets)
        most = int(np.maximum(lengths - self.k + 1, 0).sum())
        kmers, places = np.empty(most + 1, np.int64), np.empty(most + 1, np.int32)
        starts = np.zeros(lengths.size, np.int32)
        used = _choose(flat, offsets, CODES, self.k, self.s, kmers, places, starts)
        if used < 0:
            found = foreign_bytes(flat[offsets[-1 - used] : offsets[-used]], CODES == FOREIGN)
            raise BadSource(f"record {batch.numbers[-1 - used]} contains {found}, which is not a nucleotide")
        return {
            "kmers": kmers[:used].copy(),
            "places": places[:used].copy(),
            "starts": starts,
            "lengths": lengths.astype(np.int32),
        }


@kernel
def _choose(
    flat: Bases, offsets: Numbers, codes: Numbers, k: int, s: int, kmers: Numbers, places: Places, starts: Places
) -> int:
    """The number of k-mers in total, or -1 - i if read i is the first with a foreign byte."""
    top, short_top = 2 * (k - 1), 2 * (s - 1)
    stay, short_mask, short_stay = (1 << top) - 1, (1 << 2 * s) - 1, (1 << short_top) - 1
    longest = np.diff(offsets).max() if offsets.size > 1 else 0
    whole, order = np.empty(longest + 1, np.int64), np.empty(longest + 1, np.int64)
    at = 0
    for read in range(offsets.size - 1):
        starts[read] = first = at
        bases = flat[offsets[read] : offsets[read + 1]]
        forward = backward = short = short_back = known = 0
        for i in range(bases.size):
            code = codes[bases[i]]
            if code & FOREIGN:
                return -1 - read
            base = code & 3
            forward = ((forward & stay) << 2) | base
            backward = (backward >> 2) | ((3 - base) << top)
            short = ((short & short_stay) << 2) | base
            short_back = (short_back >> 2) | ((3 - base) << short_top)
            known = 0 if code > 3 else known + 1
            whole[i] = min(int(forward), int(backward)) if known >= k else -1  # of the k-mer that ends here
            smer = min(int(short), int(short_back)) & short_mask
            order[i] = ((smer ^ (smer >> 31)) & LOW_31_BITS) * STIR & LOW_31_BITS
        for i in range(k - 1, bases.size):
            begin = i - k + s
            least = min(order[begin], order[i])
            is_least = True
            for j in range(begin + 1, i):
                is_least &= order[j] >= least
            kmers[at] = whole[i]  # overwritten by the next one unless it is chosen: no branch to mispredict
            places[at] = i - k + 1
            at += is_least & (whole[i] >= 0)
        for i in range(first, at):
            kmers[i] = hash_kmer(kmers[i], k)
    return at
