"""Reads -> reads as training wants them: upper case, cropped, reverse-complemented, masked.

Chance is a function of (seed, epoch, record number) alone, so a record comes out the same in every batch, order, thread
and process.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from millstream.dataset.permutation import mix_words
from millstream.dataset.tokens import Letters, Numbers, frozen
from millstream.errors import BadSource
from millstream.kernels import kernel

LOW = 0xFFFFFFFF
CERTAIN = 1 << 32  # a draw is below this
STRAND, CROP, PER_LETTER = 0, 1, 2  # what a draw is for; letter i: 2 + 2 * i its mask, one more its base


class Reads(NamedTuple):
    """A batch of reads: read i is flat[offsets[i]:offsets[i + 1]], its quality the same slice of `quality`."""

    flat: Letters
    offsets: Numbers
    quality: Letters | None


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to a read, in this order: upper case, N, crop, reverse complement, mask.

    reads = Augment(reverse_complement=0.5, max_length=100, seed=7).apply(flat, offsets, numbers, epoch=3)
    """

    upper: bool = True
    n: Literal["keep", "random", "drop"] = "keep"
    """An N stays, becomes a random base, or is taken out."""
    max_length: int | None = None
    """Longer reads are cut to so many letters ..."""
    crop: Literal["random", "start"] = "random"
    """... at a random place, or after the first ones."""
    reverse_complement: bool | float = 0.0
    """The share of reads; True or 1.0 is all."""
    mask: float = 0.0
    """The share of letters that become N."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("reverse_complement", "mask"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: a share is from 0 to 1")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: a read keeps at least one letter; None crops nothing")
        for name, known in (("n", ("keep", "random", "drop")), ("crop", ("random", "start"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: there is {', '.join(known)}")

    def apply(
        self, flat: Letters, offsets: Numbers, numbers: Numbers, *, epoch: int = 0, quality: Letters | None = None
    ) -> Reads:
        """New arrays with the reads as they are to be in this epoch; `numbers` are the record numbers of the reads."""
        if numbers.size != offsets.size - 1:
            raise ValueError(f"{numbers.size} record numbers for {offsets.size - 1} reads; give one for each")
        if quality is not None and quality.size != flat.size:
            raise ValueError(f"{quality.size} quality values for {flat.size} letters; give one for each")
        flat, offsets = frozen(flat, offsets)
        values, _ = frozen(flat[:0] if quality is None else quality, offsets)
        out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
        out_offsets = np.zeros(offsets.size, np.int64)
        out_quality = np.empty(0 if quality is None else out.size, np.uint8)
        case = UPPER if self.upper else AS_IS
        read = _augment(
            flat,
            offsets,
            values,
            record_keys(numbers, seed=self.seed, epoch=epoch),
            case,
            COMPLEMENT[case],
            ("keep", "random", "drop").index(self.n),
            int(offsets[-1]) if self.max_length is None else self.max_length,
            self.crop == "random",
            int(self.reverse_complement * CERTAIN),
            int(self.mask * CERTAIN),
            out,
            out_offsets,
            out_quality,
        )
        if read >= 0:
            letters = np.unique(flat[offsets[read] : offsets[read + 1]])
            found = " ".join(ascii(chr(letter)) for letter in letters[COMPLEMENT[letters] == 0])
            raise BadSource(
                f"read {read} of the batch (record {numbers[read]}) holds {found}, of which there is no complement; "
                "protein and other text need reverse_complement=0"
            )
        size = out_offsets[-1]
        return Reads(out[:size], out_offsets, None if quality is None else out_quality[:size])


def record_keys(numbers: Numbers, *, seed: int, epoch: int) -> Numbers:
    """63 random bits for every record."""
    return (mix_words(numbers, seed, epoch) >> np.uint64(1)).astype(np.int64)


def _complement() -> Letters:
    """Of each nucleotide letter (IUPAC, both cases, U as T), of X and of the gap signs; 0 for all else."""
    table = np.zeros(256, np.uint8)
    letters, complements = "ACGTURYSWKMBDHVNX", "TGCAAYRSWMKVHDBNX"
    for text, other in ((letters, complements), (letters.lower(), complements.lower()), ("-.*", "-.*")):
        table[list(text.encode())] = list(other.encode())
    return table


AS_IS = np.arange(256, dtype=np.uint8)
UPPER = np.array(list(bytes(range(256)).upper()), np.uint8)
COMPLEMENT = _complement()
KEEP_N, RANDOM_N, DROP_N = range(3)
N, LOWER_N = b"Nn"
BASES = np.frombuffer(b"ACGT", np.uint8)


@kernel
def _draw(key: int, what: int) -> int:
    """32 random bits for one purpose of one record.

    Two rounds of a 32-bit hash (hash-prospector, bias 0.107), one for each half of the key. Numbers stay below 2^63, so
    plain Python gives the same bits without overflowing.
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
    flat: Letters,
    offsets: Numbers,
    quality: Letters,
    keys: Numbers,
    forward: Letters,
    backward: Letters,
    n: int,
    max_length: int,
    crop_anywhere: bool,
    reverse_below: int,
    mask_below: int,
    out: Letters,
    out_offsets: Numbers,
    out_quality: Letters,
) -> int:
    """Write the reads one after another; the number of the first one that has no complement but needs it, or -1."""
    at = 0
    for read in range(keys.size):
        key = keys[read]
        letters = flat[offsets[read] : offsets[read + 1]]
        values = quality[offsets[read] : offsets[read + 1]]  # empty when there is no quality
        if n == DROP_N:
            known = np.flatnonzero((letters != N) & (letters != LOWER_N))
            letters = letters[known]
            values = values[known] if values.size > 0 else values
        size = min(letters.size, max_length)
        skip = (_draw(key, CROP) * (letters.size - size + 1)) >> 32 if crop_anywhere else 0
        reverse = _draw(key, STRAND) < reverse_below
        letters, target = letters[skip : skip + size], out[at : at + size]
        if reverse:
            missing = 0
            for i in range(size):
                letter = backward[letters[i]]
                missing += letter == 0
                target[size - 1 - i] = letter
            if missing > 0:
                return read
        else:
            for i in range(size):
                target[i] = forward[letters[i]]
        if values.size > 0:
            values = values[skip : skip + size]
            out_quality[at : at + size] = values[::-1] if reverse else values
        if n == RANDOM_N or mask_below > 0:
            _change(target, reverse, key, skip, n, mask_below)
        at += size
        out_offsets[read + 1] = at
    return -1


@kernel
def _change(letters: Letters, reverse: bool, key: int, skip: int, n: int, mask_below: int) -> None:
    """Draw for every letter of one read, by its place in the read before it was cropped and turned round."""
    for i in range(letters.size):
        place = skip + (letters.size - 1 - i if reverse else i)
        letter = letters[i]
        if n == RANDOM_N and letter in (N, LOWER_N):
            letters[i] = BASES[_draw(key, PER_LETTER + 2 * place + 1) >> 30] | (letter & 32)  # of the same case
        if mask_below > 0 and _draw(key, PER_LETTER + 2 * place) < mask_below:
            letters[i] = N
