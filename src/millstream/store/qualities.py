"""Quality letters as codes in a packed column: two bits a base for binned ones, six for the full range."""

from typing import Any

import numpy as np

from millstream.kernels import HAVE_NUMBA, kernel
from millstream.records import Bytes
from millstream.store.joined import join
from millstream.store.packed import CHUNK, Numbers, Words
from millstream.store.sections import Column, SectionsWriter

SECTION = "grades"
_NOTHING = np.empty(0, np.uint8)


class QualitiesWriter:
    """Codes letters in order of their first appearance."""

    def __init__(self, sections: SectionsWriter) -> None:
        self._column = sections.column(SECTION)
        self._codes = np.full(256, -1, np.int64)
        self.letters: list[int] = []

    def add(self, buffer: Bytes, segments: Numbers) -> None:
        letters = join(buffer, segments, before=_NOTHING)
        codes = self._codes[letters]
        if len(codes) and codes.min() < 0:
            new, first = np.unique(letters[codes < 0], return_index=True)
            for letter in new[np.argsort(first)].tolist():
                self._codes[letter] = len(self.letters)
                self.letters.append(letter)
            codes = self._codes[letters]
        self._column.append(codes)

    def state(self) -> dict[str, object]:
        return {"letters": list(self.letters)}

    def restore(self, state: dict[str, Any]) -> None:
        self.letters = list(state["letters"])
        self._codes[:] = -1
        self._codes[self.letters] = np.arange(len(self.letters))


class Qualities:
    """Quality letters by their place in the stream of bases."""

    def __init__(self, column: Column, letters: list[int]) -> None:
        self._column = column
        self._letters = np.array([*letters, 0], np.uint8)

    def letters(self, starts: Numbers, offsets: Numbers) -> Bytes:
        """`offsets[i+1] - offsets[i]` letters from place `starts[i]` on, for every i, one after the other."""
        out = np.empty(int(offsets[-1]), np.uint8)
        counts = np.diff(offsets)
        some = counts > 0
        starts, counts, targets = starts[some], counts[some], offsets[:-1][some]
        if not len(starts):
            return out
        edges = [starts, starts + counts - 1]
        for read in np.flatnonzero(counts > CHUNK).tolist():
            edges.append(np.arange(int(starts[read]), int(starts[read] + counts[read]), CHUNK, dtype=np.int64))
        packed = self._column.packed(np.concatenate(edges))
        if HAVE_NUMBA:
            _take_runs(packed.directory, packed.words, starts, counts, targets, self._letters, out)
        else:
            places = np.repeat(starts - targets, counts) + np.arange(len(out))
            out[:] = self._letters[packed.take(places)]
        return out


@kernel
def _take_runs(
    directory: Numbers, words: Words, starts: Numbers, counts: Numbers, targets: Numbers, letters: Bytes, out: Bytes
) -> None:
    """Codes of neighbouring rows; a chunk's place and width are looked up once."""
    for index in range(len(starts)):
        row = starts[index]
        end = row + counts[index]
        target = targets[index]
        while row < end:
            chunk = row >> 12
            stop = min(end, (chunk + 1) << 12)
            low = directory[chunk, 0]
            width = directory[chunk, 1] & 255
            bit = (row & 4095) * width
            word = (directory[chunk, 1] >> 8) + (bit >> 6)
            shift = bit & 63
            mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)  # at most 8 bits wide
            for _ in range(stop - row):
                value = words[word] >> np.uint64(shift)
                if shift + width > 64:
                    value |= words[word + 1] << np.uint64(64 - shift)
                out[target] = letters[low + np.int64(value & mask)]
                target += 1
                shift += width
                if shift >= 64:
                    shift -= 64
                    word += 1
            row = stop
