"""Bases -> k-mer ids in one pass (single bases are k = 1), and the rectangle of ids that every tokenizer returns."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import kernel
from millstream.core.memory import empty
from millstream.errors import BadSource

# A batch of reads is `flat` (the bases of all reads, one after another) and `offsets`, one more than reads: read i is
# flat[offsets[i]:offsets[i + 1]].

Bases = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Ids = NDArray[np.int32 | np.int64]
IdType = type[np.int32 | np.int64]
Pad = Literal["longest", "max_length"]
T = TypeVar("T", bound=np.generic)
_U8 = np.uint8
_LANES = 32  # bytes at a time
UNKNOWN, FOREIGN = 4, 8  # codes of bases: bits above the two of A C G T
LARGEST_K, LARGEST_K_INT32 = 31, 15  # k-mer ids take 2 bits per base


class Tokens(NamedTuple):
    """One row per read, padded on the right; the mask is 1 on tokens and 0 on padding, with the dtype of the ids."""

    input_ids: Ids
    attention_mask: Ids


@runtime_checkable
class Tokenizer(Protocol):
    """Reads in, token ids out. Must be thread-safe, and small to pickle for a spawned worker."""

    @property
    def name(self) -> str:
        """The name of this tokenizer in a configuration: `tokenizer(name)` makes it again."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of rows of an embedding."""
        ...

    @property
    def pad_id(self) -> int: ...

    def tokenize(
        self,
        flat: Bases,
        offsets: Numbers,
        *,
        max_length: int | None = None,
        pad: Pad = "longest",
        dtype: IdType = np.int32,
    ) -> Tokens:
        """The tokens of every read, truncated to `max_length` (special tokens included) and padded to one width."""
        ...


def frozen(flat: Bases, offsets: Numbers) -> tuple[Bases, Numbers]:
    """The batch as read-only arrays: numba would compile again for writable ones."""
    return _frozen(np.ascontiguousarray(flat, np.uint8)), _frozen(np.ascontiguousarray(offsets, np.int64))


def _frozen(array: NDArray[T]) -> NDArray[T]:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def width_of(counts: Numbers, *, max_length: int | None, pad: Pad) -> int:
    """The number of columns for reads with these numbers of tokens."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length={max_length}: must be at least 1; leave it out to truncate nothing")
    if pad == "max_length":
        if max_length is None:
            raise ValueError('pad="max_length" needs a max_length; pad="longest" does not')
        return max_length
    longest = int(counts.max()) if counts.size else 0
    return longest if max_length is None else min(longest, max_length)


def rectangle(num_reads: int, width: int, *, dtype: IdType) -> Tokens:
    """Ids and mask, uninitialised, in one allocation: large enough for huge pages."""
    both = cast(Ids, empty((2, num_reads, width), dtype))
    return Tokens(both[0], both[1])


def pad_rows(tokens: NDArray[np.int32], starts: Numbers, counts: Numbers, *, width: int, pad_id: int) -> Tokens:
    """Flat tokens, `counts[i]` from `starts[i]` on, as the rows of a rectangle."""
    rows = rectangle(counts.size, width, dtype=np.int32)
    _pad_rows(tokens, starts, counts, pad_id, rows.input_ids, rows.attention_mask)
    return rows


@kernel
def _pad_rows(
    tokens: NDArray[np.int32],
    starts: Numbers,
    counts: Numbers,
    pad_id: int,
    ids: Ids,
    mask: Ids,
) -> None:
    width = ids.shape[1]
    for row in range(counts.size):
        start, count = starts[row], min(counts[row], width)
        for column in range(count):
            ids[row, column] = tokens[start + column]
            mask[row, column] = 1
        for column in range(count, width):
            ids[row, column] = pad_id
            mask[row, column] = 0


def _codes() -> Numbers:
    """Code of each byte, either case: 0-3 for A C G T (U is T), UNKNOWN for other IUPAC codes, FOREIGN otherwise."""
    codes = np.full(256, FOREIGN, np.int64)
    for bases, code in (("A", 0), ("C", 1), ("G", 2), ("TU", 3), ("NRYSWKMBDHV", UNKNOWN)):
        codes[list((bases + bases.lower()).encode())] = code
    return codes


CODES = _codes()


def foreign_bytes(read: Bases, is_foreign: NDArray[np.bool_]) -> str:
    """The bytes of a read that `is_foreign`, one entry per byte value, marks; for messages."""
    present = np.unique(read)
    return " ".join(ascii(chr(byte)) for byte in present[is_foreign[present]])


def base() -> "Kmers":
    """One token per base: A 1, C 2, G 3, T and U 4, N and every other IUPAC code 5; 0 is padding.

    tokens = base().tokenize(flat, offsets, max_length=512)
    """
    return Kmers(k=1)


def kmer(k: int, *, stride: int = 1, canonical: bool = False) -> "Kmers":
    """One token per k-mer, `stride` bases apart; canonical: a k-mer and its reverse complement are the same token.

    Ids: 0 is padding; a k-mer is 1 + its number in base 4 (A C G T = 0 1 2 3); every k-mer with an N or another IUPAC
    code is 4^k + 1. A read shorter than k has no tokens.

    tokens = kmer(6).tokenize(flat, offsets)
    """
    for name, value in (("k", k), ("stride", stride)):
        if type(value) is not int or value < 1:
            raise ValueError(f"kmer: {name}={value!r}: must be an integer of at least 1")
    if k > LARGEST_K:
        raise ValueError(f"kmer: k={k}: ids would not fit into int64; must be at most {LARGEST_K}")
    if type(canonical) is not bool:
        raise ValueError(f"kmer: canonical={canonical!r}: must be True or False")
    return Kmers(k=k, stride=stride, canonical=canonical)


@dataclass(frozen=True, kw_only=True)
class Kmers:
    """The tokenizer made by `base` and `kmer`."""

    k: int
    stride: int = 1
    canonical: bool = False
    pad_id: int = 0

    @property
    def name(self) -> str:
        if self == base():
            return "base"
        stride = f", stride={self.stride}" if self.stride > 1 else ""
        return f"kmer({self.k}{stride}{', canonical=True' if self.canonical else ''})"

    @property
    def vocab_size(self) -> int:
        return 4**self.k + 2

    def tokenize(
        self,
        flat: Bases,
        offsets: Numbers,
        *,
        max_length: int | None = None,
        pad: Pad = "longest",
        dtype: IdType = np.int32,
    ) -> Tokens:
        if dtype == np.int32 and self.k > LARGEST_K_INT32:
            raise ValueError(f"{self.name}: int32 ids allow k up to {LARGEST_K_INT32}; use dtype=np.int64")
        flat, offsets = frozen(flat, offsets)
        counts = offsets[:0]  # of no interest: not counted, which would take as long as the tokens of one read
        if pad == "longest":
            counts = np.maximum((np.diff(offsets) - self.k) // self.stride + 1, 0)
        width = width_of(counts, max_length=max_length, pad=pad)
        tokens = rectangle(offsets.size - 1, width, dtype=dtype)
        read = _fill(flat, offsets, CODES, self.k, self.stride, self.canonical, *tokens)
        if read >= 0:
            found = foreign_bytes(flat[offsets[read] : offsets[read + 1]], CODES == FOREIGN)
            raise BadSource(
                f"read {read} of the batch contains {found}: the {self.name} tokenizer accepts A C G T U N and the "
                "IUPAC codes R Y S W K M B D H V; for protein or other text use another tokenizer, such as hf(folder)"
            )
        return tokens


@kernel
def _fill(
    flat: Bases, offsets: Numbers, codes: Numbers, k: int, stride: int, canonical: bool, ids: Ids, mask: Ids
) -> int:
    """Fill the rows; returns the first read with a foreign byte, or -1. Bases in no token are not checked."""
    width = ids.shape[1]
    every = np.empty(width * stride, ids.dtype)
    room = width + 2 * (k + _LANES)  # in arrays of their own: rows of one might overlap, which takes five times as long
    known, fours, tail = np.zeros(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint8)
    for read in range(offsets.size - 1):
        start = offsets[read]
        count = max(0, min((offsets[read + 1] - start - k) // stride + 1, width))
        bases = flat[start : start + (k + (count - 1) * stride if count > 0 else 0)]
        row = ids[read]
        whole = flat[start : min(start + -(-bases.size // _LANES) * _LANES, flat.size)]  # with bases of the next read
        if stride == 1 and not canonical and _encode(whole, known):
            seen = 0
            _combine(known, fours, tail, k, row[:count])
        elif stride == 1:
            seen = _roll(bases, codes, k, canonical, row)
        else:
            seen = _roll(bases, codes, k, canonical, every)
            for column in range(count):
                row[column] = every[column * stride]
        if seen & FOREIGN:
            return read
        row[count:] = 0
        mask[read, :count] = 1
        mask[read, count:] = 0
    return -1


@kernel
def _encode(bases: Bases, out: Bases) -> bool:
    """The code of every base; False if one is not A C G T U, either case. Bytes alone, `_LANES` at a time."""
    wrong = _U8(0)
    for i in range(bases.size):
        letter = _U8(bases[i] & _U8(0xDF))
        code = _U8(_U8(letter >> _U8(1)) & _U8(3))  # A 0, C 1, T and U 2, G 3
        out[i] = code ^ _U8(code >> _U8(1))
        is_t = _U8(_U8(code >> _U8(1)) & _U8(~code)) & _U8(1)
        again = _U8(_U8(65) + _U8(code << _U8(1))) + _U8(is_t * _U8(15))
        wrong |= _U8(_U8(again) ^ letter) & _U8(~is_t)  # T and U differ in the last bit
    return wrong == 0


@kernel
def _combine(codes: Bases, fours: Bases, tail: Bases, k: int, out: Ids) -> None:
    """The id of every k-mer of a read with these codes: of four bases each, k // 4 times, and of the rest."""
    num_fours, rest = k // 4, k % 4
    size = -(-(out.size + k) // _LANES) * _LANES  # the rest would take as long one by one
    for i in range(size if num_fours > 0 else 0):
        fours[i] = _U8(codes[i] << _U8(6)) | _U8(codes[i + 1] << _U8(4)) | _U8(codes[i + 2] << _U8(2)) | codes[i + 3]
    tail, after = tail[:size], codes[4 * num_fours :]
    if rest == 0:
        tail[:] = 0
    elif rest == 1:
        for i in range(tail.size):
            tail[i] = after[i]
    elif rest == 2:
        for i in range(tail.size):
            tail[i] = _U8(after[i] << _U8(2)) | after[i + 1]
    else:
        for i in range(tail.size):
            tail[i] = _U8(after[i] << _U8(4)) | _U8(after[i + 1] << _U8(2)) | after[i + 2]
    if num_fours == 0:
        for i in range(out.size):
            out[i] = tail[i] + 1
        return
    part, shift = fours[: out.size], 2 * rest
    if num_fours == 1:
        for i in range(out.size):
            out[i] = (np.int32(part[i]) << shift | np.int32(tail[i])) + 1
        return
    for i in range(out.size):
        out[i] = part[i]
    for number in range(1, num_fours):
        part = fours[4 * number : 4 * number + out.size]
        for i in range(out.size):
            out[i] = out[i] << 8 | part[i]
    for i in range(out.size):
        out[i] = (out[i] << shift | tail[i]) + 1


@kernel
def _roll(bases: Bases, codes: Numbers, k: int, canonical: bool, out: Ids) -> int:
    """The id of every k-mer of one read; returns the bits of all codes seen.

    No branch depends on the bases, and the loops index slices from 0: 5.4 M reads/s of 125 bases, against 2.7 for the
    obvious loop (count the known bases, write at i - k + 1), and 10 for `_combine`, which knows no other bases.
    """
    top = 2 * (k - 1)
    stay = (1 << top) - 1  # the k - 1 bases that stay when the window moves
    recent = (1 << (k - 1)) - 1  # the same for the flags of unknown bases
    unknown = (1 << (2 * k)) + 1
    forward = backward = flags = seen = 0
    first = bases[: k - 1]
    for i in range(first.size):
        code = codes[first[i]]
        seen |= code
        forward = ((forward & stay) << 2) | (code & 3)
        backward = (backward >> 2) | ((3 - (code & 3)) << top)
        flags = ((flags & recent) << 1) | (code >> 2)
    ahead = bases[k - 1 :]
    if canonical:
        for i in range(ahead.size):
            code = codes[ahead[i]]
            seen |= code
            forward = ((forward & stay) << 2) | (code & 3)
            backward = (backward >> 2) | ((3 - (code & 3)) << top)
            flags = ((flags & recent) << 1) | (code >> 2)
            out[i] = unknown if flags else min(forward, backward) + 1
    else:
        for i in range(ahead.size):
            code = codes[ahead[i]]
            seen |= code
            forward = ((forward & stay) << 2) | (code & 3)
            flags = ((flags & recent) << 1) | (code >> 2)
            out[i] = unknown if flags else forward + 1
    return int(seen)
