"""Pieces of a buffer, copied one after the other, or each to its place."""

import numpy as np

from millstream.kernels import HAVE_NUMBA, kernel
from millstream.records import Bytes
from millstream.store.packed import Numbers


def join(buffer: Bytes, pieces: Numbers, *, before: Bytes) -> Bytes:
    """`before`, then buffer[start:end] of every piece."""
    if not HAVE_NUMBA:
        return np.concatenate([before, *(buffer[start:end] for start, end in pieces.tolist())])
    out = np.empty(len(before) + int((pieces[:, 1] - pieces[:, 0]).sum()), np.uint8)
    out[: len(before)] = before
    _join(buffer, pieces, out, len(before), 0)
    return out


def join_lines(buffer: Bytes, pieces: Numbers) -> Bytes:
    """buffer[start:end] of every piece, each with a newline after it."""
    if not HAVE_NUMBA:
        lines = b"".join(buffer[start:end].tobytes() + b"\n" for start, end in pieces.tolist())
        return np.frombuffer(bytearray(lines), np.uint8)
    out = np.empty(int((pieces[:, 1] - pieces[:, 0] + 1).sum()), np.uint8)
    _join(buffer, pieces, out, 0, 1)
    return out


@kernel
def _join(buffer: Bytes, pieces: Numbers, out: Bytes, at: int, newline: int) -> None:
    for index in range(len(pieces)):
        start = pieces[index, 0]
        count = pieces[index, 1] - start
        source, target = buffer[start : start + count], out[at : at + count]
        for place in range(count):  # twice as fast as assigning one slice to the other
            target[place] = source[place]
        at += count
        if newline:
            out[at] = 10
            at += 1


@kernel
def spread(buffer: Bytes, starts: Numbers, targets: Numbers, counts: Numbers, out: Bytes) -> None:
    """Copy `counts[i]` bytes from `starts[i]` to out[targets[i]:], for every i."""
    for index in range(len(starts)):
        count = counts[index]
        out[targets[index] : targets[index] + count] = buffer[starts[index] : starts[index] + count]
