"""Reads as a page: their lengths, composition and classes, and each of them with its tokens."""

import threading
from functools import cached_property
from pathlib import Path

from millstream.core.console import say
from millstream.errors import BadSetting
from millstream.reads.open import expand, open_reads, watch_index
from millstream.reads.reads import Reads
from millstream.reads.view.records import Records, Tokenizer, given_tokenizer, typed_tokenizer
from millstream.reads.view.statistics import Lengths, Sample, ValueCounts
from millstream.view.view import Query, View

GIVEN = "given"  # what a page calls the tokenizer of the command line
_FILES = 200  # that are listed
_MOST = 200  # rows per response


def reads_view(path: Path, *, tokenizer: str | None = None) -> View:
    """The page of the reads at a path: a file, a folder or a pattern. Indexes that are missing are built first.

    >>> reads_view(Path("reads.fa.gz"), tokenizer="kmer(6)").answers["record"](Query({"number": "17"}))
    """
    given = None if tokenizer is None else given_tokenizer(tokenizer)
    shown = _Reads(open_reads(expand(path), watch=watch_index, notify=say), given)
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
    )


class _Reads:
    def __init__(self, reads: Reads, given: Tokenizer | None) -> None:
        self._reads, self._given = reads, given
        self._records = Records(reads)
        self._counts: dict[str, ValueCounts] = {}
        self._lock = threading.Lock()  # concurrent requests share one count

    def overview(self, query: Query) -> object:
        """What there is, from the head of the index."""
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
        columns = [{"name": name, "is_indexed": self._is_indexed(name)} for name in reads.column_names]
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
        """The most common values of a column, those that contain `search`, from the one at `first` on."""
        column = query.text("column")
        if column not in self._reads.column_names:
            raise BadSetting(
                f"column {column!r}: must be one of {', '.join(self._reads.column_names) or '(no columns)'}"
            )
        if not self._is_indexed(column):
            raise BadSetting(f"column {column!r} is only in the headers, not in the index: it is not counted")
        with self._lock:
            if column not in self._counts:
                self._counts[column] = ValueCounts(self._reads, column)
        most = min(query.number("count", 20), _MOST)
        return self._counts[column].summary(search=query.text("search"), first=query.number("first"), most=most)

    def page(self, query: Query) -> object:
        """Neighbouring reads from number `first` on."""
        first = query.number("first")
        rows = self._records.page(first, min(query.number("count", 25), _MOST))
        return {"first": first, "of": len(self._reads), "rows": rows}

    def record(self, query: Query) -> object:
        """Read `number`: its bases from `start` on, and their tokens."""
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

    def _is_indexed(self, name: str) -> bool:
        return all(part.is_indexed(name) for part in self._reads.parts)
