"""Single reads: a page of them, one by its number with a window of its letters, and the numbers that bear a name."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.augment import COMPLEMENT
from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.store.read_batch import ColumnValues
from millstream.store.reads import Reads
from millstream.view.background import PATIENCE_S, Later
from millstream.view.reads_tokens import Tokenizer, spans_of

MOST_LETTERS = 20_000  # in one answer
_GRADED = 4_000_000  # letters of a record whose qualities are read: they come with the whole of it
_HEAD = 60
_NAMES = 100
Numbers = NDArray[np.int64]


class Records:
    """The reads of a collection as a page shows them. Reads only the letters that are shown."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._columns = [name for name in reads.column_names if all(p.is_indexed(name) for p in reads.parts)]
        self._naming = Later(lambda: reads.find(""))  # makes the table of names, where there is none

    def page(self, first: int, count: int) -> list[dict[str, object]]:
        """Number, name, length, columns and first letters of neighbouring reads."""
        numbers = np.arange(min(first, len(self._reads)), min(first + count, len(self._reads)), dtype=np.int64)
        if not len(numbers):
            return []
        lengths = self._reads.lengths(numbers)
        heads = self._reads.regions(numbers, 0, np.minimum(lengths, _HEAD)).sequences()
        columns = self._reads.fetch(numbers, self._columns).columns  # without a name of letters, none are read
        names = self._names(numbers)
        return [
            {
                "number": int(number),
                "name": names[row],
                "length": int(lengths[row]),
                "columns": {name: column[row] for name, column in columns.items()},
                "letters": heads[row],
            }
            for row, number in enumerate(numbers)
        ]

    def one(
        self, number: int, *, start: int, count: int, reverse: bool = False, tokenizer: Callable[[], Tokenizer | None]
    ) -> dict[str, object]:
        """A read, the letters [start, start + count) of it, their qualities, and the tokens among them.

        With `reverse` all positions are those of the reverse complement.
        """
        if number >= len(self._reads):
            raise BadSetting(f"record {number}: there are {len(self._reads)}, from 0 to {len(self._reads) - 1}")
        place, row = self._place(number)
        length = int(self._reads.lengths([number])[0])
        start = min(start, length)
        end = min(length, start + min(count, MOST_LETTERS))

        def letters(low: int, high: int) -> str:
            if not reverse:
                return self._reads.region(number, low, high)
            return _complement(self._reads.region(number, length - high, length - low))

        found: dict[str, object] = {
            "number": number,
            "of": len(self._reads),
            "file": Path(self._reads.parts[place].path).name,
            "row": row,
            "name": self._names(np.array([number], np.int64))[0],
            "columns": {name: column[0] for name, column in self._fields(number).items()},
            "length": length,
            "start": start,
            "end": end,
            "letters": letters(start, end),
            "quality": self._quality(place, number, length, start, end, reverse=reverse),
        }
        return {**found, **_tokens(tokenizer, letters, length, start, end)}

    def find(self, name: str, *, seconds: float = PATIENCE_S) -> dict[str, object]:
        """Numbers of the records of this name; or that a table of names is being made, which reads the whole file."""
        if not all(part.has_names for part in self._reads.parts) and self._naming.soon(seconds) is None:
            return {"is_making": True, "numbers": []}
        numbers = self._reads.find(name)
        return {"is_making": False, "numbers": numbers[:_NAMES], "found": len(numbers)}

    def _fields(self, number: int) -> Mapping[str, ColumnValues]:
        """Those in the headers too: of one read that is cheap."""
        return self._reads.fetch([number], self._reads.column_names).columns

    def _quality(self, place: int, number: int, length: int, start: int, end: int, *, reverse: bool) -> str | None:
        if not self._reads.parts[place].has_quality or length > _GRADED:
            return None
        quality = self._reads.fetch([number], ["quality"]).quality
        if quality is None:
            return None
        grades = quality[::-1] if reverse else quality
        return grades[start:end].tobytes().decode("latin-1")

    def _names(self, numbers: Numbers) -> list[str]:
        names: list[str] = []
        at = 0
        for part in self._reads.parts:
            rows = numbers[(numbers >= at) & (numbers < at + part.records)] - at
            names += part.names_of(rows) if len(rows) else []
            at += part.records
        return names

    def _place(self, number: int) -> tuple[int, int]:
        """Which file, and which record of it."""
        for place, part in enumerate(self._reads.parts):
            if number < part.records:
                return place, number
            number -= part.records
        raise AssertionError


def _tokens(
    tokenizer: Callable[[], Tokenizer | None], letters: Callable[[int, int], str], length: int, start: int, end: int
) -> dict[str, object]:
    """The tokens, or why there are none: the letters are shown all the same."""
    try:
        chosen = tokenizer()
        spans = None if chosen is None else spans_of(chosen, letters, length=length, start=start, end=end)
    except MillstreamError as error:
        return {"tokens": None, "tokens_error": " ".join(str(error).split())}
    if spans is None or chosen is None:
        return {"tokens": None, "tokens_error": None}
    told = {**vars(spans), "name": chosen.name, "vocab_size": chosen.vocab_size}
    return {"tokens": told, "tokens_error": None}


def _complement(text: str) -> str:
    letters = np.frombuffer(text.encode("latin-1"), np.uint8)
    turned = COMPLEMENT[letters][::-1]
    if not turned.all():
        foreign = " ".join(sorted({chr(letter) for letter in letters[COMPLEMENT[letters] == 0].tolist()}))
        raise BadSource(f"There is no complement of {foreign}: these are no nucleotides.")
    return turned.tobytes().decode("latin-1")
