"""Reads as model inputs: augmented, as token ids or bags of k-mers, on one strand or both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.batches import Batch
from millstream.core.config import Count, Probability
from millstream.core.kernels import kernel
from millstream.core.order import mix, mix_words
from millstream.errors import BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.files import QUALITY
from millstream.reads.qualities import qualities_of, token_qualities
from millstream.reads.tokenizers import tokenizer
from millstream.reads.tokenizers.kmers import (
    CODES,
    FOREIGN,
    LARGEST_K,
    Bases,
    IdType,
    Kmers,
    Numbers,
    Pad,
    Tokenizer,
    foreign_bytes,
    frozen,
)

LOW = 0xFFFFFFFF
CERTAIN = 1 << 32  # a draw is below this
STRAND, CROP, PER_BASE = 0, 1, 2  # what a draw is for; of base i: 2 + 2 * i for its mask, one more for its value
OTHER, QUALITIES = "other_", "qualities"
Buckets = NDArray[np.int32]
STIR = 0x5D588B65
LOW_31_BITS = 0x7FFFFFFF  # products of two such numbers fit into 62 bits: nothing overflows
KEEP_N, RANDOM_N, DROP_N = range(3)
N, LOWER_N = b"Nn"
BASES = np.frombuffer(b"ACGT", np.uint8)
NUM_BACKGROUND = 1 << 22  # bases of random DNA


def _complement() -> Bases:
    """The complement of each nucleotide code (IUPAC, either case, U as T), X and gap character; 0 for other bytes."""
    table = np.zeros(256, np.uint8)
    bases, complements = "ACGTURYSWKMBDHVNX", "TGCAAYRSWMKVHDBNX"
    for text, other in ((bases, complements), (bases.lower(), complements.lower()), ("-.*", "-.*")):
        table[list(text.encode())] = list(other.encode())
    return table


# byte -> byte
SAME = np.arange(256, dtype=np.uint8)
UPPER = np.array(list(bytes(range(256)).upper()), np.uint8)
COMPLEMENT = _complement()


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of reads, in this order: upper case, N, crop, reverse complement, mask.

    reads = Augment(reverse_complement=0.5, max_length=100, seed=7).apply(flat, offsets, numbers, epoch=3)
    """

    n: Literal["keep", "random", "drop"] = "keep"
    """Keep every N, replace it by a random base, or drop it."""
    max_length: int | None = None
    """Longer reads are cropped to this many bases ..."""
    crop: Literal["random", "start"] = "random"
    """... at a random position, or at the start."""
    reverse_complement: bool | float = 0.0
    """Fraction of reads to reverse-complement; True or 1.0: all."""
    mask: float = 0.0
    """Per-base masking rate: the fraction of bases replaced by N."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("reverse_complement", "mask"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be from 0 to 1")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: must be at least 1, or None for no cropping")
        for name, known in (("n", ("keep", "random", "drop")), ("crop", ("random", "start"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")

    @property
    def is_idle(self) -> bool:
        """Whether `apply` only makes bases upper case."""
        return self.n == "keep" and self.max_length is None and not self.reverse_complement and not self.mask

    def apply(self, flat: Bases, offsets: Numbers, numbers: Numbers, *, epoch: int = 0) -> tuple[Bases, Numbers]:
        """New arrays with the augmented reads of this epoch; `numbers` are the record numbers of the reads."""
        if numbers.size != offsets.size - 1:
            raise ValueError(f"{numbers.size} record numbers for {offsets.size - 1} reads; must be one per read")
        flat, offsets = frozen(flat, offsets)
        out, out_offsets, read = self._apply(flat, offsets, numbers, epoch, UPPER, COMPLEMENT[UPPER])
        if read >= 0:
            found = foreign_bytes(flat[offsets[read] : offsets[read + 1]], COMPLEMENT == 0)
            raise BadSource(
                f"read {read} of the batch (record {numbers[read]}) contains {found}, which has no complement; "
                "protein and other text need reverse_complement=0"
            )
        return out, out_offsets

    def apply_to_qualities(self, quality: Bases, offsets: Numbers, numbers: Numbers, *, epoch: int = 0) -> Bases:
        """The qualities of the bases that `apply` gives, cropped and reversed as they are."""
        quality, offsets = frozen(quality, offsets)
        return replace(self, n="keep", mask=0.0)._apply(quality, offsets, numbers, epoch, SAME, SAME)[0]

    def _apply(
        self, flat: Bases, offsets: Numbers, numbers: Numbers, epoch: int, forward: Bases, backward: Bases
    ) -> tuple[Bases, Numbers, int]:
        """Characters translated by strand, offsets, and the first read without a translation, or -1."""
        out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
        out_offsets = np.zeros(offsets.size, np.int64)
        read = _augment(
            flat,
            offsets,
            record_keys(numbers, seed=self.seed, epoch=epoch),
            forward,
            backward,
            ("keep", "random", "drop").index(self.n),
            int(offsets[-1]) if self.max_length is None else self.max_length,
            self.crop == "random",
            int(self.reverse_complement * CERTAIN),
            int(self.mask * CERTAIN),
            out,
            out_offsets,
        )
        return out[: out_offsets[-1]], out_offsets, read


def record_keys(numbers: Numbers, *, seed: int, epoch: int) -> Numbers:
    """63 random bits per record."""
    return (mix_words(numbers, seed, epoch) >> np.uint64(1)).astype(np.int64)


@dataclass(frozen=True)
class TokenFeature:
    """Reads as token ids. Made by `ms.features.tokens`.

    feature = ms.features.tokens("kmer(6)", max_length=128, reverse_complement=0.5)
    batch = feature(reads.fetch(numbers, feature.fields))  # {"input_ids": ..., "attention_mask": ..., "class_id": ...}
    """

    tokenizer: Tokenizer
    augment: Augment
    columns: tuple[str, ...]
    max_length: int | None
    pad: Pad
    dtype: IdType
    qualities: bool = False

    @property
    def fields(self) -> list[str]:
        return ["sequence", *([QUALITY] if self.qualities else []), *self.columns]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """Depends only on seed, epoch and record: the same in any batch, order, thread or process."""
        if not isinstance(batch, ReadBatch):
            raise ValueError("features.tokens needs reads; these records are traces")
        augment = replace(self.augment, seed=mix(self.augment.seed, seed)) if seed else self.augment
        flat, offsets = batch.flat, batch.offsets
        if not (augment.is_idle and isinstance(self.tokenizer, Kmers)):  # which read either case
            flat, offsets = augment.apply(flat, offsets, batch.numbers, epoch=epoch)
        ids, mask = self.tokenizer.tokenize(flat, offsets, max_length=self.max_length, pad=self.pad, dtype=self.dtype)
        made: dict[str, object] = {"input_ids": ids, "attention_mask": mask}
        if self.qualities:
            assert isinstance(self.tokenizer, Kmers)
            lines = augment.apply_to_qualities(qualities_of(batch), batch.offsets, batch.numbers, epoch=epoch)
            of_tokens = {"k": self.tokenizer.k, "stride": self.tokenizer.stride}
            made[QUALITIES] = token_qualities(*frozen(lines, offsets), width=ids.shape[1], **of_tokens)
        return made | {name: batch.columns[name] for name in self.columns}


@checked
def tokens(
    spec: str | Tokenizer,
    *,
    columns: tuple[str, ...] | list[str] = (),
    max_length: Count | None = None,
    pad: Pad = "longest",
    dtype: IdType = np.int64,
    crop_length: Count | None = None,
    crop: Literal["random", "start"] = "random",
    reverse_complement: bool | float = 0.0,
    mask: Probability = 0.0,
    n: Literal["keep", "random", "drop"] = "keep",
    qualities: bool = False,
    seed: int = 0,
) -> TokenFeature:
    """Token ids of reads from a tokenizer (`"base"`, `"kmer(6)"`, `"hf(folder)"`), and these columns.

    `max_length` counts tokens. Before tokenization, a read longer than `crop_length` bases is cropped;
    `reverse_complement` (fraction of reads), `mask` (per-base rate of N) and `n` (what happens to an N) are drawn from
    (seed, epoch, record number); a loader's seed is mixed into this one. `spec` may also be your own object that
    follows `millstream.reads.tokenizers.kmers.Tokenizer`. With `qualities`, tokens of FASTQ come with `qualities`, the
    lowest Phred value of the bases of each.

    >>> feature = ms.features.tokens("kmer(6)", columns=["label"], max_length=128, reverse_complement=0.5)
    >>> batch = next(iter(ms.Loader(reads, batch_size=4, features=feature)))  # input_ids, attention_mask, label
    """
    augment = Augment(
        max_length=crop_length, crop=crop, reverse_complement=reverse_complement, mask=mask, n=n, seed=seed
    )
    chosen = tokenizer(spec) if isinstance(spec, str) else spec
    if qualities and not isinstance(chosen, Kmers):
        raise ValueError(
            f"qualities=True: the tokenizer must be base or kmer(k); tokens of {chosen.name} differ in length"
        )
    if qualities and n == "drop":
        raise ValueError('qualities=True: bases would not have the qualities of their places; use n="keep" or "random"')
    return TokenFeature(chosen, augment, tuple(columns), max_length, pad, dtype, qualities)


@dataclass(frozen=True)
class BothStrands:
    """`feature` of each read, and, with the prefix `other_`, of its reverse complement."""

    feature: TokenFeature

    @property
    def fields(self) -> Sequence[str]:
        return self.feature.fields

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        made: dict[str, object] = {}
        for prefix, fraction in (("", 0.0), (OTHER, 1.0)):
            feature = replace(self.feature, augment=replace(self.feature.augment, reverse_complement=fraction))
            found = feature(batch, seed=seed, epoch=epoch)
            made |= {prefix + name: value for name, value in found.items()}
        return made


@dataclass(frozen=True)
class KmerBag:
    """For each k, `buckets_k` [k-mers of all reads] and `starts_k` [read]: where each read starts in it.

    k-mers are canonical, so both strands of a read give the same bag. One in `every[i]` k-mers of length `ks[i]` is
    kept, selected by a hash: the same ones in every read. k-mers are hashed to `2^bits` buckets. k-mers with an N are
    skipped.
    """

    ks: tuple[int, ...]
    every: tuple[int, ...]
    bits: int

    def __post_init__(self) -> None:
        if not self.ks or not all(1 <= k <= LARGEST_K for k in self.ks) or not 1 <= self.bits <= 30:
            raise ValueError(f"ks={self.ks}, bits={self.bits}: k must be from 1 to {LARGEST_K}, bits from 1 to 30")
        if len(self.every) != len(self.ks) or min(self.every) < 1:
            raise ValueError(f"every={self.every}: must be one number per k in ks={self.ks}, each at least 1")

    @property
    def fields(self) -> list[str]:
        return ["sequence"]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ReadBatch):
            raise ValueError("a bag of k-mers needs reads; these records are traces")
        flat, offsets = frozen(batch.flat, batch.offsets)
        lengths = np.diff(offsets)
        made: dict[str, object] = {}
        for k, every in zip(self.ks, self.every, strict=True):
            buckets = np.empty(int(np.maximum(lengths - k + 1, 0).sum()), np.int32)
            starts = np.zeros(lengths.size, np.int32)
            used = _fill(flat, offsets, CODES, k, every, self.bits, buckets, starts)
            if used < 0:
                found = foreign_bytes(flat[offsets[-1 - used] : offsets[-used]], CODES == FOREIGN)
                raise BadSource(f"record {batch.numbers[-1 - used]} contains {found}, which is not a nucleotide")
            made[f"buckets_{k}"] = buckets[:used].copy() if every > 1 else buckets[:used]
            made[f"starts_{k}"] = starts
        return made

    def background(self) -> Mapping[int, Buckets]:
        """For each k, the buckets of the k-mers of random DNA, always the same."""
        flat = BASES[np.random.default_rng(0).integers(0, 4, NUM_BACKGROUND, np.uint8)]
        random = self(ReadBatch(np.zeros(1, np.int64), flat, np.array([0, flat.size], np.int64), {}))
        return {k: cast(Buckets, random[f"buckets_{k}"]) for k in self.ks}


@kernel
def _draw(key: int, what: int) -> int:
    """32 random bits for one purpose of one record.

    Two rounds of a 32-bit hash (hash-prospector, bias 0.107), one per half of the key. Numbers stay below 2^63:
    nothing overflows.
    """
    x = (what * 0x1E3779B1 + (key & LOW)) & LOW
    for half in range(2):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW
        x = ((x ^ (x >> 15)) * 0x735A2D97) & LOW
        x = x ^ (x >> 15)
        if half == 0:
            x = x ^ (key >> 32)
    return x


@kernel
def _augment(
    flat: Bases,
    offsets: Numbers,
    keys: Numbers,
    forward: Bases,
    backward: Bases,
    n: int,
    max_length: int,
    crop_anywhere: bool,
    reverse_below: int,
    mask_below: int,
    out: Bases,
    out_offsets: Numbers,
) -> int:
    """Write the reads one after another; returns the first one that needs a complement but has none, or -1."""
    at = 0
    for read in range(keys.size):
        key = keys[read]
        bases = flat[offsets[read] : offsets[read + 1]]
        if n == DROP_N:
            bases = bases[np.flatnonzero((bases != N) & (bases != LOWER_N))]
        size = min(bases.size, max_length)
        skip = (_draw(key, CROP) * (bases.size - size + 1)) >> 32 if crop_anywhere else 0
        reverse = _draw(key, STRAND) < reverse_below
        bases, target = bases[skip : skip + size], out[at : at + size]
        if reverse:
            missing = 0
            for i in range(size):
                base = backward[bases[i]]
                missing += base == 0
                target[size - 1 - i] = base
            if missing > 0:
                return read
        else:
            for i in range(size):
                target[i] = forward[bases[i]]
        if n == RANDOM_N or mask_below > 0:
            _change(target, reverse, key, skip, n, mask_below)
        at += size
        out_offsets[read + 1] = at
    return -1


@kernel
def _change(bases: Bases, reverse: bool, key: int, skip: int, n: int, mask_below: int) -> None:
    """Draw for every base of one read, by its position before cropping and reverse complement."""
    for i in range(bases.size):
        place = skip + (bases.size - 1 - i if reverse else i)
        if n == RANDOM_N and bases[i] == N:
            bases[i] = BASES[_draw(key, PER_BASE + 2 * place + 1) >> 30]
        if mask_below > 0 and _draw(key, PER_BASE + 2 * place) < mask_below:
            bases[i] = N


@kernel
def _fill(
    flat: Bases, offsets: Numbers, codes: Numbers, k: int, every: int, bits: int, buckets: Buckets, starts: Buckets
) -> int:
    """The number of k-mers in total, or -1 - i if read i is the first with a foreign byte."""
    at = 0
    top = 2 * (k - 1)
    stay = (1 << top) - 1
    mask = (1 << bits) - 1
    most = LOW_31_BITS // every
    kept = np.empty(1 + (np.diff(offsets).max() if offsets.size > 1 else 0), np.int64)
    for read in range(offsets.size - 1):
        starts[read] = at
        bases = flat[offsets[read] : offsets[read + 1]]
        forward = backward = known = count = 0
        for i in range(bases.size):
            code = codes[bases[i]]
            if code & FOREIGN:
                return -1 - read
            forward = ((forward & stay) << 2) | (code & 3)
            backward = (backward >> 2) | ((3 - (code & 3)) << top)
            known = 0 if code > 3 else known + 1
            kmer = min(int(forward), int(backward))
            kept[count] = kmer  # overwritten by the next one unless it is kept: no branch to mispredict
            count += (((kmer ^ (kmer >> 31)) & LOW_31_BITS) * STIR & LOW_31_BITS <= most) & (known >= k)
        for i in range(count):
            buckets[at + i] = hash_kmer(kept[i], k) & mask
        at += count
    return at


@kernel
def hash_kmer(kmer: int, k: int) -> int:
    """A 62-bit hash: two rounds over both halves of the number, each mixed into the other."""
    low, high = kmer & LOW_31_BITS, (kmer >> 31) + k
    for _ in range(2):
        low = (low ^ (low >> 15)) * 0x2C1B3C6D & LOW_31_BITS
        high = ((high + low) & LOW_31_BITS ^ (high >> 12)) * 0x297A2D39 & LOW_31_BITS
        low = (low + high) & LOW_31_BITS ^ (high >> 14)
    return (high << 31) | low
