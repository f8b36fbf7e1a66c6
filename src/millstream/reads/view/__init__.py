"""The explorer view of reads: lengths, composition and classes, and single reads with their tokens."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.console import say
from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.reads.batch import ColumnValues
from millstream.reads.features import COMPLEMENT
from millstream.reads.mapping import Classes, load_classes, load_mapping
from millstream.reads.open import expand, open_reads, watch_index
from millstream.reads.reads import Reads
from millstream.reads.tokenizers import HfTokenizer, Tokenizer, tokenizer
from millstream.reads.tokenizers.kmers import Kmers
from millstream.reads.view.sample import output_view_of as output_view_of
from millstream.reads.view.statistics import Lengths, Sample, ValueCounts
from millstream.view import PATIENCE_S, Later, Query, View

_LONGEST_NAME = 100  # of a tokenizer: Python's parser runs out of memory on thousands of minus signs
GIVEN = "given"  # the name of the command line's tokenizer in a page
_FILES = 200  # listed
_MOST = 200  # rows per response
MOST_BASES = 20_000  # per response
_WITH_QUALITY = 4_000_000  # bases; qualities of longer reads are not shown, because they are only read as a whole
_HEAD = 60
_NAMES = 100
WHOLE = 50_000  # bases; in longer reads, a tokenizer that depends on all earlier bases starts at the window
Numbers = NDArray[np.int64]


class Records:
    """Single reads of a collection; fetches only the bases that are shown."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._columns = reads.indexed_columns
        self._naming = Later(lambda: reads.find(""))  # builds a missing name table

    def page(self, first: int, count: int) -> list[dict[str, object]]:
        """Number, name, length, columns and first bases of consecutive reads."""
        numbers = np.arange(min(first, len(self._reads)), min(first + count, len(self._reads)), dtype=np.int64)
        if not len(numbers):
            return []
        lengths = self._reads.lengths(numbers)
        heads = self._reads.regions(numbers, 0, np.minimum(lengths, _HEAD)).sequences()
        columns = self._reads.fetch(
            numbers, self._columns
        ).columns  # without the field `sequence`, no bases are fetched
        names = self._names(numbers)
        return [
            {
                "number": int(number),
                "name": names[row],
                "length": int(lengths[row]),
                "columns": {name: column[row] for name, column in columns.items()},
                "bases": heads[row],
            }
            for row, number in enumerate(numbers)
        ]

    def one(
        self, number: int, *, start: int, count: int, reverse: bool = False, tokenizer: Callable[[], Tokenizer | None]
    ) -> dict[str, object]:
        """A read, its bases [start, start + count), their qualities, and the tokens among them.

        With `reverse`, positions are on the reverse complement.
        """
        if number >= len(self._reads):
            raise BadSetting(f"record {number}: must be from 0 to {len(self._reads) - 1}")
        place, row = self._place(number)
        length = int(self._reads.lengths([number])[0])
        start = min(start, length)
        end = min(length, start + min(count, MOST_BASES))

        def bases(low: int, high: int) -> str:
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
            "bases": bases(start, end),
            "quality": self._quality(place, number, length, start, end, reverse=reverse),
        }
        return {**found, **_tokens(tokenizer, bases, length, start, end)}

    def find(self, name: str, *, seconds: float = PATIENCE_S) -> dict[str, object]:
        """The records with this name; or `is_making` while a name table is being built, which reads the whole file."""
        if not all(part.has_names for part in self._reads.parts) and self._naming.soon(seconds) is None:
            return {"is_making": True, "numbers": []}
        numbers = self._reads.find(name)
        return {"is_making": False, "numbers": numbers[:_NAMES], "found": len(numbers)}

    def _fields(self, number: int) -> Mapping[str, ColumnValues]:
        """All columns, including those only in the headers: cheap for one read."""
        return self._reads.fetch([number], self._reads.column_names).columns

    def _quality(self, place: int, number: int, length: int, start: int, end: int, *, reverse: bool) -> str | None:
        if not self._reads.parts[place].has_quality or length > _WITH_QUALITY:
            return None
        quality = self._reads.fetch([number], ["quality"]).quality
        if quality is None:
            return None
        values = quality[::-1] if reverse else quality
        return values[start:end].tobytes().decode("latin-1")

    def _names(self, numbers: Numbers) -> list[str]:
        names: list[str] = []
        at = 0
        for part in self._reads.parts:
            rows = numbers[(numbers >= at) & (numbers < at + part.records)] - at
            names += part.names_of(rows) if len(rows) else []
            at += part.records
        return names

    def _place(self, number: int) -> tuple[int, int]:
        """The number of its file, and of the record in the file."""
        for place, part in enumerate(self._reads.parts):
            if number < part.records:
                return place, number
            number -= part.records
        raise AssertionError


@dataclass(frozen=True)
class Spans:
    """Tokens that start in, or reach into, a window: their ids, and their bases [start, end) in the read."""

    ids: list[int]
    starts: list[int]
    ends: list[int]
    texts: list[str]
    before: list[str]  # special tokens before and after all others
    after: list[str]
    cut: bool = False  # the read is too long: tokenized from the start of the window


def given_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of the command line, which may be a path."""
    if Path(spec).exists():
        spec = f"hf({spec})"
    return _named(spec)


def typed_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer typed into a page; never a file, which a page must not open."""
    if not spec.strip().startswith(("base", "kmer(")) or len(spec) > _LONGEST_NAME:
        raise BadSetting(
            f"tokenizer {spec[:_LONGEST_NAME]!r}: must be base, kmer(6) or kmer(12, stride=2, canonical=True) here. "
            "To use one from a file: millstream view READS --tokenizer FOLDER"
        )
    return _named(spec)


def spans_of(chosen: Tokenizer, bases: Callable[[int, int], str], *, length: int, start: int, end: int) -> Spans | None:
    """The tokens of a window of a read; `bases(start, end)` fetches bases. None: unknown kind of tokenizer."""
    if isinstance(chosen, Kmers):
        return _kmers(chosen, bases, length, start, end)
    if isinstance(chosen, HfTokenizer):
        return _encoded(chosen, bases, length, start, end)
    return None


def _tokens(
    tokenizer: Callable[[], Tokenizer | None], bases: Callable[[int, int], str], length: int, start: int, end: int
) -> dict[str, object]:
    """The tokens, or why there are none; the bases are shown anyway."""
    try:
        chosen = tokenizer()
        spans = None if chosen is None else spans_of(chosen, bases, length=length, start=start, end=end)
    except MillstreamError as error:
        return {"tokens": None, "tokens_error": " ".join(str(error).split())}
    if spans is None or chosen is None:
        return {"tokens": None, "tokens_error": None}
    tokens = {**vars(spans), "name": chosen.name, "vocab_size": chosen.vocab_size}
    return {"tokens": tokens, "tokens_error": None}


def _complement(text: str) -> str:
    codes = np.frombuffer(text.encode("latin-1"), np.uint8)
    turned = COMPLEMENT[codes][::-1]
    if not turned.all():
        foreign = " ".join(sorted({chr(code) for code in codes[COMPLEMENT[codes] == 0].tolist()}))
        raise BadSource(f"no complement of {foreign}: not a nucleotide")
    return turned.tobytes().decode("latin-1")


def _kmers(chosen: Kmers, bases: Callable[[int, int], str], length: int, start: int, end: int) -> Spans:
    """The k-mers that start in the window."""
    k, stride = chosen.k, chosen.stride
    first = -(-start // stride) * stride
    last = min(length, (end - 1) // stride * stride + k) if end > start else first
    text = bases(first, last).upper() if last > first else ""
    flat = np.frombuffer(text.encode("latin-1"), np.uint8)
    found = chosen.tokenize(flat, np.array([0, len(flat)]), dtype=np.int64).input_ids[0].tolist()
    starts = [first + stride * place for place in range(len(found))]
    texts = [text[at - first : at - first + k] for at in starts]
    return Spans(found, starts, [at + k for at in starts], texts, [], [])


def _encoded(chosen: HfTokenizer, bases: Callable[[int, int], str], length: int, start: int, end: int) -> Spans:
    """The tokens that overlap the window; they depend on all earlier bases."""
    cut = length > WHOLE
    low, high = (start, end) if cut else (0, length)
    encoding: Any = chosen.encoder().encode(bases(low, high).upper())
    rows = list(zip(encoding.ids, encoding.offsets, encoding.tokens, encoding.special_tokens_mask, strict=True))
    plain = [place for place, row in enumerate(rows) if not row[3]]
    first, last = (plain[0], plain[-1]) if plain else (len(rows), len(rows))
    shown = [(one, low + a, low + b, text) for one, (a, b), text, _ in rows[first : last + 1]]
    shown = [row for row in shown if row[2] > start and row[1] < end]
    around = [f"{row[2]} ({row[0]})" for row in rows]
    return Spans(
        [row[0] for row in shown],
        [row[1] for row in shown],
        [row[2] for row in shown],
        [row[3] for row in shown],
        around[:first],
        around[last + 1 :],
        cut,
    )


def _named(spec: str) -> Tokenizer:
    try:
        return tokenizer(spec)
    except BadSetting:
        raise
    except ValueError as error:
        raise BadSetting(str(error)) from None


def view_of(path: Path, *, run: Path | None = None, tokenizer: str | None = None, mapping: Path | None = None) -> View:
    """The page of the reads at a path: a file, a folder or a pattern. Missing indexes are built first.

    Classes are shown with their names in the `mapping`.

    >>> view_of(Path("reads.fa.gz"), tokenizer="kmer(6)").answers["record"](Query({"number": "17"}))
    """
    if run is not None:
        raise BadSetting(f"--run {run}: {path} contains reads, which are shown without scores")
    given = None if tokenizer is None else given_tokenizer(tokenizer)
    classes = None if mapping is None else load_classes(load_mapping(mapping))
    reads = open_reads(expand(path), mapping=mapping, unknown="null", watch=watch_index, notify=say)
    shown = _Reads(reads, given, classes)
    return View(
        "reads",
        "Reads",
        answers={
            "overview": shown.overview,
            "lengths": shown.lengths,
            "composition": shown.composition,
            "classes": shown.classes,
            "list": shown.page,
            "record": shown.record,
            "find": shown.find,
        },
        static=Path(__file__).parent / "static",
    )


def records_of(run: Path) -> None:
    """The page of reads shows no scores, so it is not shown with a run."""


class _Reads:
    def __init__(self, reads: Reads, given: Tokenizer | None, classes: Classes | None = None) -> None:
        self._reads, self._given, self._classes = reads, given, classes
        self._columns = [name for name in reads.column_names if all(name in part.columns for part in reads.parts)]
        self._records = Records(reads)
        self._counts: dict[str, ValueCounts] = {}
        self._lock = threading.Lock()  # concurrent requests share one count

    def overview(self, query: Query) -> object:
        """Files, sizes and columns, from the head of the index."""
        reads = self._reads
        files = [
            {
                "name": part.path.name,
                "folder": str(part.path.parent),
                "format": part.format,
                "reads": part.records,
                "bases": part.bases,
                "bytes": part.path.stat().st_size,
            }
            for part in reads.parts[:_FILES]
        ]
        columns = [{"name": name, "is_indexed": self._is_indexed(name)} for name in self._columns]
        return {
            "num_files": len(reads.parts),
            "files": files,
            "formats": reads.formats,
            "reads": len(reads),
            "bases": reads.num_bases,
            "bytes": reads.num_bytes,
            "index_bytes": reads.index_bytes,
            "columns": columns,
            "has_quality": any(part.has_quality for part in reads.parts),
            "tokenizer": None if self._given is None else self._given.name,
        }

    def lengths(self, query: Query) -> object:
        """The lengths of the reads. `counted` is less than `total` while counting: request it again."""
        with self._lock:
            counted = self._lengths
        return counted.summary()

    def composition(self, query: Query) -> object:
        """Composition of a sample of the reads; not `is_done` while it grows: request it again."""
        with self._lock:
            found = self._sample
        return found.summary()

    def classes(self, query: Query) -> object:
        """The most common values of a column that contain `search`, starting at rank `first`."""
        column = query.text("column")
        if column not in self._columns:
            raise BadSetting(f"column {column!r}: must be one of {', '.join(self._columns) or '(no columns)'}")
        if not self._is_indexed(column):
            raise BadSetting(f"column {column!r} is only in the headers, not in the index: it is not counted")
        with self._lock:
            if column not in self._counts:
                self._counts[column] = ValueCounts(self._reads, column, names=self._names(column))
        most = min(query.number("count", 20), _MOST)
        return self._counts[column].summary(search=query.text("search"), first=query.number("first"), most=most)

    def page(self, query: Query) -> object:
        """Consecutive reads starting at number `first`."""
        first = query.number("first")
        rows = self._records.page(first, min(query.number("count", 25), _MOST))
        return {"first": first, "of": len(self._reads), "rows": rows}

    def record(self, query: Query) -> object:
        """Read `number`: its bases starting at `start`, and their tokens."""
        return self._records.one(
            query.number("number"),
            start=query.number("start"),
            count=query.number("count", 1200),
            reverse=query.number("reverse") > 0,
            tokenizer=lambda: self._tokenizer(query.text("tokenizer")),
        )

    def find(self, query: Query) -> object:
        """The numbers of the reads with this `name`."""
        return self._records.find(query.text("name"))

    @cached_property
    def _lengths(self) -> Lengths:
        return Lengths(self._reads)

    @cached_property
    def _sample(self) -> Sample:
        return Sample(self._reads)

    def _tokenizer(self, wanted: str) -> Tokenizer | None:
        if wanted == GIVEN:
            return self._given
        return typed_tokenizer(wanted) if wanted else None

    def _names(self, column: str) -> dict[int | str, str]:
        """The names of the classes, by the values of this column, if it has their ids."""
        if self._classes is None or column != self._classes.mapping.key:
            return {}
        ids: list[int] = self._classes.mapping.ids.tolist()
        return {value: taxon.name for value, taxon in zip(ids, self._classes.taxa, strict=True)}

    def _is_indexed(self, name: str) -> bool:
        return all(part.columns.is_indexed(name) for part in self._reads.parts)
