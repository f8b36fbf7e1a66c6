"""What `inspect` and `verify` print for reads."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.batches import chunked, decoded
from millstream.core.console import Progress, format_bytes, printable, silent
from millstream.errors import BadSetting
from millstream.reads.pack import PackFile
from millstream.reads.reads import Part, Reads

_MOST = 5
_SHOWN_BASES = 60
_CHUNK_READS = 1 << 20


@dataclass(frozen=True)
class ReadSummary:
    """A collection of reads in numbers."""

    paths: list[str]
    formats: list[str]
    fidelity: list[str]  # what `unpack` restores of each pack
    damages: list[str]  # of files of which a part is used
    records: int
    bases: int
    bytes: int
    index_bytes: int
    lengths: dict[str, float]
    columns: dict[str, dict[str, object]]
    examples: list[dict[str, object]]


def summarise_reads(reads: Reads, *, examples: int = 3) -> ReadSummary:
    """Counts, lengths, columns with their most common values, and the first records. Reads the index, not the data."""
    columns: dict[str, dict[str, object]] = {}
    lengths: dict[str, float] = {"shortest": 0.0, "median": 0.0, "longest": 0.0}
    if len(reads):
        lengths = _quantiles(
            _counts(len(reads), lambda start, end: chunked([pa.array(reads.lengths(range(start, end)))]))
        )
        for name in reads.indexed_columns:
            columns[name] = _about(_counts(len(reads), partial(reads.column, name)))
    shown = [_example(reads, number) for number in range(min(examples, len(reads)))]
    for name in reads.column_names:
        columns.setdefault(name, {"kept": "in the headers"})
    return ReadSummary(
        paths=[str(path) for path in reads.paths],
        formats=reads.formats,
        fidelity=[part.fidelity for part in reads.parts if isinstance(part, PackFile)],
        damages=[damage for part in reads.parts for damage in _damages(part)],
        records=len(reads),
        bases=reads.num_bases,
        bytes=reads.num_bytes,
        index_bytes=reads.index_bytes,
        lengths={
            **lengths,
            "mean": reads.num_bases / max(len(reads), 1),
        },
        columns=columns,
        examples=shown,
    )


def _damages(part: Part) -> list[str]:
    found = part.sections.meta["damage"]
    return [f"{part.path}: {found}"] if isinstance(found, str) else cast("list[str]", found or [])


def show_reads(summary: ReadSummary) -> str:
    """A collection of reads on one screen."""
    files = (
        summary.paths[0] if len(summary.paths) == 1 else f"{summary.paths[0]} and {len(summary.paths) - 1} more files"
    )
    per_read = summary.index_bytes / max(summary.records, 1)
    lengths = summary.lengths
    lines = [
        files,
        f"  {', '.join(summary.formats)}: {summary.records} reads, {summary.bases} bases, "
        f"{format_bytes(summary.bytes)}",
        *(f"  only a part is used: {text}" for text in summary.damages),
        *(f"  unpack: {text}" for text in dict.fromkeys(summary.fidelity)),
        f"  lengths {lengths['shortest']:.0f} to {lengths['longest']:.0f}, median {lengths['median']:.0f}, "
        f"mean {lengths['mean']:.1f}",
        f"  index {format_bytes(summary.index_bytes)}, {per_read:.2f} bytes per read",
    ]
    width = max(map(len, summary.columns), default=0)
    lines += ["  columns"] if summary.columns else []
    for name, column in summary.columns.items():
        about = ", ".join(f"{key} {value}" for key, value in column.items())
        lines.append(f"    {name:<{width}}  {about}")
    for example in summary.examples:
        lines.append(f"  read {example['number']}  {example['name']}")
        lines.append(f"    {example['sequence']}")
    return "\n".join(map(printable, lines))


def verify_reads(reads: Reads, *, progress: Progress = silent) -> Iterator[str]:
    """Verify the checksums of indexes and data files; yields every damage."""
    done = 0
    for part in reads.parts:
        yield from part.verify()
        done += part.path.stat().st_size
        progress(done)


def _example(reads: Reads, number: int) -> dict[str, object]:
    """The start of a read: all of it may be larger than memory."""
    length = int(reads.lengths([number])[0])
    try:
        bases = reads.region(number, 0, min(length, _SHOWN_BASES))
    except BadSetting:  # too large for the memory budget, in lines of different lengths
        bases = ""
    shown = bases if length <= _SHOWN_BASES else f"{bases}... ({length} bases)"
    columns = reads.fetch([number], ["name", *reads.column_names]).columns
    values = {name: (column if isinstance(column, list) else column.tolist())[0] for name, column in columns.items()}
    return {"number": number, "name": values.pop("name"), "sequence": shown, **values}


def _counts(num_reads: int, values: Callable[[int, int], pa.ChunkedArray]) -> Counter[Any]:
    """How often each value occurs. Counted in chunks, from `start` to `end`: all values may not fit in memory."""
    counts: Counter[Any] = Counter()
    for start in range(0, num_reads, _CHUNK_READS):
        some = values(start, min(start + _CHUNK_READS, num_reads))
        for index in range(some.num_chunks):
            rows: list[dict[str, Any]] = pc.value_counts(decoded(some.chunk(index))).to_pylist()
            for row in rows:
                counts[row["values"]] += row["counts"]
    return counts


def _quantiles(lengths: Counter[int]) -> dict[str, float]:
    """Shortest, median and longest."""
    values = np.array(sorted(lengths), np.int64)
    ends = np.cumsum([lengths[value] for value in values.tolist()])
    middle = np.array([(ends[-1] - 1) // 2, ends[-1] // 2])
    median = values[np.searchsorted(ends, middle, side="right")].mean()
    return {"shortest": float(values[0]), "median": float(median), "longest": float(values[-1])}


def _about(counts: Counter[Any]) -> dict[str, object]:
    """The number of distinct values of a column, of missing ones, and the most common."""
    about: dict[str, object] = {"distinct": len(counts)}
    if counts[None]:
        about["without value"] = counts[None]
    return {**about, "most": ", ".join(f"{value} ({count})" for value, count in counts.most_common(_MOST))}
