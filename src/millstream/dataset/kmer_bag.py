"""Reads as bags of hashed k-mers, of several lengths at once: the input of a linear model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.batch import Batch
from millstream.dataset.kmers import CODES, FOREIGN
from millstream.dataset.tokens import Letters, Numbers, frozen
from millstream.errors import BadSource
from millstream.kernels import kernel
from millstream.store.read_batch import ReadBatch

Buckets = NDArray[np.int32]
LARGEST_K = 31
STIR = 0x5D588B65
LOW = 0x7FFFFFFF  # products of two such numbers fit into 62 bits, so plain Python gives the same as compiled code


@dataclass(frozen=True)
class KmerBag:
    """For each k, `buckets_k` [k-mers of all reads] and `starts_k` [read]: where in it each read begins.

    A k-mer and its reverse complement are the same one, so a read is the same bag from either strand. Of `every[i]`
    k-mers of length `ks[i]` one is kept, chosen by a hash: the same one wherever it comes. Each of the `2^bits`
    buckets serves all k-mers whose hash it is. K-mers with an N are left out.
    """

    ks: tuple[int, ...]
    every: tuple[int, ...]
    bits: int

    def __post_init__(self) -> None:
        if not self.ks or not all(1 <= k <= LARGEST_K for k in self.ks) or not 1 <= self.bits <= 30:
            raise ValueError(f"ks={self.ks}, bits={self.bits}: k-mers of 1 to {LARGEST_K} letters, 1 to 30 bits")
        if len(self.every) != len(self.ks) or min(self.every) < 1:
            raise ValueError(f"every={self.every}: for each of ks={self.ks} a number from 1 on")

    @property
    def fields(self) -> list[str]:
        return ["sequence"]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ReadBatch):
            raise ValueError("a bag of k-mers is made of reads; these records are traces")
        flat, offsets = frozen(batch.flat, batch.offsets)
        lengths = np.diff(offsets)
        made: dict[str, object] = {}
        for k, every in zip(self.ks, self.every, strict=True):
            buckets = np.empty(int(np.maximum(lengths - k + 1, 0).sum()), np.int32)
            starts = np.zeros(lengths.size, np.int32)
            used = _fill(flat, offsets, CODES, k, every, self.bits, buckets, starts)
            if used < 0:
                letters = np.unique(flat[offsets[-1 - used] : offsets[-used]])
                found = " ".join(ascii(chr(letter)) for letter in letters[CODES[letters] == FOREIGN])
                raise BadSource(f"record {batch.numbers[-1 - used]} holds {found}, which is no nucleotide")
            made[f"buckets_{k}"] = buckets[:used].copy() if every > 1 else buckets[:used]
            made[f"starts_{k}"] = starts
        return made


@kernel
def _fill(
    flat: Letters, offsets: Numbers, codes: Numbers, k: int, every: int, bits: int, buckets: Buckets, starts: Buckets
) -> int:
    """How many k-mers there are in all; or -1 less the number of the first read with a foreign letter."""
    at = 0
    top = 2 * (k - 1)
    stay = (1 << top) - 1
    mask = (1 << bits) - 1
    most = LOW // every
    kept = np.empty(1 + (np.diff(offsets).max() if offsets.size > 1 else 0), np.int64)
    for read in range(offsets.size - 1):
        starts[read] = at
        letters = flat[offsets[read] : offsets[read + 1]]
        forward = backward = known = count = 0
        for i in range(letters.size):
            code = codes[letters[i]]
            if code & FOREIGN:
                return -1 - read
            forward = ((forward & stay) << 2) | (code & 3)
            backward = (backward >> 2) | ((3 - (code & 3)) << top)
            known = 0 if code > 3 else known + 1
            kmer = min(int(forward), int(backward))
            kept[count] = kmer  # written over by the next one if it is not to be kept: no branch, no guess that fails
            count += (((kmer ^ (kmer >> 31)) & LOW) * STIR & LOW <= most) & (known >= k)
        for i in range(count):
            buckets[at + i] = _hash(kept[i], k) & mask
        at += count
    return at


@kernel
def _hash(kmer: int, k: int) -> int:
    """62 bits that look random: two rounds over the halves of the number, each stirred into the other."""
    low, high = kmer & LOW, (kmer >> 31) + k
    for _ in range(2):
        low = (low ^ (low >> 15)) * 0x2C1B3C6D & LOW
        high = ((high + low) & LOW ^ (high >> 12)) * 0x297A2D39 & LOW
        low = (low + high) & LOW ^ (high >> 14)
    return (high << 31) | low
