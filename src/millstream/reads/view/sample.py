"""The explorer view of a classified sample: its taxa, how sure the classifier was, and the tree of its report.

Rows are counted in a thread while pages request them, a few megabytes at a time, so a file may have any number of rows.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv  # pyright: ignore[reportMissingTypeStubs]

from millstream.errors import BadSource
from millstream.reads.kind import ROW_COLUMNS
from millstream.view import PATIENCE_S, Background, Query, View

NUM_BARS = 50  # of the histogram of probabilities
BLOCK_BYTES = 1 << 20  # up to 32 are read ahead
_MOST = 200  # rows per response
_TREE = 300  # taxa of the tree, those with the most reads
_HEAD_BYTES = 512
_REPORT = re.compile(rb"^ *\d+\.\d+\t\d+\t\d+\t[A-Z]\d*\t\d+\t")
_ABUNDANCE = b"class\ttax_id\ttaxon\trank\tgenome_length\t"
Taxon = tuple[str, str, str, str]  # class, tax id, name, rank; an empty rank for unclassified reads


class SampleCounts:
    """The number of rows of each taxon, and of each range of probabilities."""

    def __init__(self, path: Path, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._path, self._bytes = path, path.stat().st_size
        self._block_bytes, self._read_bytes = block_bytes, 0
        self._taxa: Counter[Taxon] = Counter()
        self._bars = np.zeros(NUM_BARS, np.int64)  # of classified reads
        self._work = Background(self._count())
        self._work.start()

    def _count(self) -> Iterator[None]:
        try:
            yield from self._blocks()
        except (OSError, pa.ArrowInvalid) as error:
            raise BadSource(f"{self._path}: cannot be read to its end ({error}). Classify the reads again") from None

    def _blocks(self) -> Iterator[None]:
        columns = list(ROW_COLUMNS[1:])
        types: Any = {name: pa.string() for name in columns[:-1]} | {columns[-1]: pa.float32()}
        arrow, csv = cast(Any, pa), cast(Any, pa_csv)
        with self._path.open("rb") as file:
            stream = arrow.PythonFile(file, mode="r")
            if self._path.suffix == ".gz":
                stream = arrow.CompressedInputStream(stream, "gzip")
            reader = csv.open_csv(
                stream,
                read_options=csv.ReadOptions(use_threads=False, block_size=self._block_bytes),
                # the last row may be incomplete
                parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, invalid_row_handler=_skip),
                convert_options=csv.ConvertOptions(
                    include_columns=columns, column_types=types, strings_can_be_null=False
                ),
            )
            for batch in reader:
                self._add(arrow.Table.from_batches([batch]))
                self._read_bytes = file.tell()
                yield

    def _add(self, rows: Any) -> None:
        names = list(ROW_COLUMNS[1:-1])
        found = rows.group_by(names).aggregate([([], "count_all")])
        counted = zip(*(found.column(name).to_pylist() for name in (*names, "count_all")), strict=True)
        sure = rows.filter(cast(Any, pc).field("rank") != "").column("probability").drop_null().to_numpy()
        bars = np.histogram(sure, NUM_BARS, (0.0, 1.0))[0]
        with self._work.lock:
            for *taxon, count in counted:
                self._taxa[cast(Taxon, tuple(taxon))] += count
            self._bars += bars

    def summary(self, seconds: float | None = PATIENCE_S) -> dict[str, object]:
        """How many rows are counted, and how many of those are classified."""
        self._work.wait(seconds)
        with self._work.lock:
            reads = self._taxa.total()
            unclassified = sum(count for taxon, count in self._taxa.items() if not taxon[-1])
            ranks = Counter({rank: 0 for *_, rank in self._taxa if rank})
            for taxon, count in self._taxa.items():
                ranks[taxon[-1]] += count if taxon[-1] else 0
        return {
            "is_done": self._work.is_done,
            "share": 1.0 if self._work.is_done else self._read_bytes / max(self._bytes, 1),
            "reads": reads,
            "unclassified": unclassified,
            "taxa": sum(1 for taxon in self._taxa if taxon[-1]),
            "ranks": [(rank, count) for rank, count in ranks.most_common() if rank],
        }

    def bars(self) -> dict[str, object]:
        """Classified reads by probability, in ranges of equal width."""
        edges = np.linspace(0, 1, NUM_BARS + 1).round(6)
        with self._work.lock:
            return {"from": edges[:-1], "to": edges[1:], "count": self._bars.copy()}

    def taxa(self) -> list[tuple[Taxon, int]]:
        """All taxa, the most frequent first, without that of unclassified reads."""
        with self._work.lock:
            ranked = self._taxa.most_common()
        return [(taxon, count) for taxon, count in ranked if taxon[-1]]


def output_view_of(path: Path) -> View:
    """The page of a file that `classify` wrote, with the report and the abundances beside it.

    >>> output_view_of(Path("sample.tsv")).answers["taxa"](Query({"search": "coli"}))
    """
    shown = _Sample(path)
    return View(
        "sample",
        "Sample",
        answers={"overview": shown.overview, "confidence": shown.confidence, "taxa": shown.taxa, "tree": shown.tree},
        static=Path(__file__).parent / "static",
    )


class _Sample:
    def __init__(self, path: Path) -> None:
        self._path = path
        stem = path.name.removesuffix(".gz").removesuffix(".tsv")
        beside = sorted(file for file in path.parent.glob(f"{escape(stem)}.*") if file.is_file() and file != path)
        heads = {file: _head(file) for file in beside}
        self._report = next((file for file, head in heads.items() if _REPORT.match(head)), None)
        self._abundance = next((file for file, head in heads.items() if head.startswith(_ABUNDANCE)), None)

    @cached_property
    def _counts(self) -> SampleCounts:
        return SampleCounts(self._path)

    @cached_property
    def _abundances(self) -> dict[str, dict[str, float]]:
        """Of each class: its abundance, and the interval."""
        if self._abundance is None:
            return {}
        with self._abundance.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        names = ("abundance", "low", "high")
        return {row["class"]: {name: float(row[name]) for name in names} for row in rows if row["class"]}

    def overview(self, query: Query) -> object:
        """The file, and how much of it is counted: request it again until `is_done`."""
        return {
            "name": self._path.name,
            "bytes": self._path.stat().st_size,
            "report": self._report and self._report.name,
            "abundance": self._abundance and self._abundance.name,
            **self._counts.summary(),
        }

    def confidence(self, query: Query) -> object:
        """Classified reads by probability."""
        return self._counts.bars()

    def taxa(self, query: Query) -> object:
        """The most frequent taxa of a `rank` (or of all) whose name or id contains `search`, from rank `first` on."""
        search, rank = query.text("search").casefold(), query.text("rank")
        first, most = query.number("first"), min(query.number("count", 20), _MOST)
        ranked = [(taxon, count) for taxon, count in self._counts.taxa() if not rank or taxon[-1] == rank]
        found = [(taxon, count) for taxon, count in ranked if search in f"{taxon[2]}\t{taxon[1]}".casefold()]
        rows = [
            {"tax_id": taxon[1], "taxon": taxon[2], "rank": taxon[3], "reads": count}
            | self._abundances.get(taxon[0] or "-", {})
            for taxon, count in found[first : first + most]
        ]
        return {"found": len(found), "first": first, "most_reads": ranked[0][1] if ranked else 0, "rows": rows}

    def tree(self, query: Query) -> object:
        """The taxa of the report with the most reads, from the root down, with their depth; None without a report."""
        if self._report is None:
            return None
        rows = [line.split("\t") for line in self._report.read_text(encoding="utf-8").split("\n")]
        rows = [row for row in rows if len(row) == 6 and row[3] != "U"]
        kept = set(sorted(range(len(rows)), key=lambda place: (-int(rows[place][1]), place))[:_TREE])
        found = [
            {
                "depth": (len(name) - len(name.lstrip(" "))) // 2,
                "name": name.strip(),
                "code": code,
                "tax_id": tax_id,
                "reads": int(clade),
                "own": int(own),
            }
            for place, (_, clade, own, code, tax_id, name) in enumerate(rows)
            if place in kept
        ]
        return {"rows": found, "of": len(rows)}


def _skip(row: object) -> str:
    return "skip"


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.readline(_HEAD_BYTES)
    except OSError:
        return b""
