"""Long reads as overlapping windows, for nets that read a limited length; all windows of a read vote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millstream.core.batches import Batch
from millstream.core.features import Feature
from millstream.reads.batch import ReadBatch
from millstream.reads.features import BASES
from millstream.reads.files.texts import gather
from millstream.reads.tokenizers.kmers import Bases, Kmers, Numbers, Tokenizer

WINDOWS = "windows"
WINDOW = 1000  # bases, unless the settings have a number of tokens
OVERLAP = 4  # neighbouring windows share at least a quarter
SAMPLE = 20_000  # bases of random DNA, to count the tokens in
SAFE = 0.9  # tokens of some regions are shorter than those of random DNA


@dataclass(frozen=True)
class Windows:
    """`feature` of the windows of all reads, and `windows` [read]: how many each has, if one is longer than `bases`."""

    feature: Feature
    bases: int
    growth = 28  # bytes per base at most: ids, mask and qualities of both strands, and the overlap

    @property
    def fields(self) -> Sequence[str] | None:
        return self.feature.fields

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ReadBatch):
            raise ValueError("windows need reads; these records are traces")
        lengths = batch.lengths
        if lengths.max(initial=0) <= self.bases:
            return self.feature(batch, seed=seed, epoch=epoch)
        counts, starts, sizes = windows_of(lengths, self.bases)
        owner = np.repeat(np.arange(len(batch)), counts)
        begins, zeros = batch.offsets[owner] + starts, np.zeros(len(owner), np.int64)
        flat, offsets = gather(batch.flat, begins, sizes, zeros, zeros)
        quality = None if batch.quality is None else gather(batch.quality, begins, sizes, zeros, zeros)[0]
        windows = ReadBatch(batch.numbers[owner], flat, offsets, {}, quality)
        return {**self.feature(windows, seed=seed, epoch=epoch), WINDOWS: counts}


def windows_of(lengths: Numbers, bases: int) -> tuple[Numbers, Numbers, Numbers]:
    """The number of windows of each read; and of each window, where it starts in its read, and its length.

    They are spread evenly over the read, from its first base to its last.
    """
    step = max(bases - bases // OVERLAP, 1)
    counts: Numbers = 1 + np.maximum(-(-(lengths - bases) // step), 0)
    firsts: Numbers = np.cumsum(counts) - counts
    place = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
    left = np.repeat(np.maximum(lengths - bases, 0), counts)
    return (
        counts,
        left * place // np.maximum(np.repeat(counts, counts) - 1, 1),
        np.minimum(np.repeat(lengths, counts), bases),
    )


def bases_in(tokenizer: Tokenizer, num_tokens: int) -> int:
    """A window of so many bases has about this many tokens."""
    if isinstance(tokenizer, Kmers):
        return tokenizer.k + (num_tokens - 1) * tokenizer.stride
    num_special, per_base = _density(tokenizer)
    return max(1, int(SAFE * (num_tokens - num_special) / per_base))


def tokens_in(tokenizer: Tokenizer, bases: int) -> int:
    """A window of so many bases has about this many tokens."""
    if isinstance(tokenizer, Kmers):
        return max(1, (bases - tokenizer.k) // tokenizer.stride + 1)
    num_special, per_base = _density(tokenizer)
    return num_special + max(1, int(bases * per_base / SAFE))


def _density(tokenizer: Tokenizer) -> tuple[int, float]:
    """The number of special tokens per read, and of other tokens per base."""
    flat: Bases = BASES[np.random.default_rng(0).integers(0, 4, SAMPLE)]
    special, whole = tokenizer.tokenize(flat, np.array([0, 0, SAMPLE])).attention_mask.sum(axis=1).tolist()
    return special, (whole - special) / SAMPLE
