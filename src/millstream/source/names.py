"""Hashes of record names: the first word of each header, as samtools has it."""

import numpy as np

from millstream.kernels import kernel
from millstream.records import Bytes
from millstream.source.scan import Numbers


def name_of(header: bytes) -> bytes:
    """The first word of a header line."""
    words = header.split(None, 1)
    return words[0] if words and not header[:1].isspace() else b""


def hash_name(name: bytes) -> int:
    """The hash of one name."""
    text = np.frombuffer(bytearray(name), np.uint8)  # writable, as buffers are: one compilation
    return int(hash_names(text, np.zeros(1, np.int64), np.array([len(text)], np.int64))[0])


def hash_names(text: Bytes, starts: Numbers, ends: Numbers) -> Numbers:
    """63-bit hashes of the first words of text[starts[i]:ends[i]]."""
    out = np.empty(len(starts), np.int64)
    _hash_names(text, starts, ends, out)
    return out


@kernel
def _hash_names(text: Bytes, starts: Numbers, ends: Numbers, out: Numbers) -> None:
    # Two 32-bit FNV hashes; all products stay below 2^63, so that plain Python gives the same.
    for index in range(len(starts)):
        a = 2166136261
        b = 84696351
        for position in range(starts[index], ends[index]):
            byte = np.int64(text[position])
            if byte <= 32:
                break
            a = ((a ^ byte) * 16777619) & 0xFFFFFFFF
            b = ((b ^ byte) * 709607) & 0xFFFFFFFF
        a = ((a ^ (a >> 16)) * 73244475) & 0xFFFFFFFF
        b = ((b ^ (b >> 15)) * 73244475) & 0xFFFFFFFF
        out[index] = ((a ^ (a >> 16)) << 31) | (b >> 1)
