"""What `inspect` and `verify` print for reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.batches import decoded
from millstream.core.console import Progress, format_bytes, printable, silent
from millstream.reads.batch import Read
from millstream.reads.pack import PackFile
from millstream.reads.reads import Reads

_MOST = 5
_SHOWN_BASES = 60


@dataclass(frozen=True)
class ReadSummary:
    """A collection of reads in numbers."""

    paths: list[str]
    formats: list[str]
    fidelity: list[str]  # what `unpack` restores of each pack
    records: int
    bases: int
    bytes: int
    index_bytes: int
    lengths: dict[str, float]
    columns: dict[str, dict[str, object]]
    examples: list[dict[str, object]]


def summarise_reads(reads: Reads, *, examples: int = 3) -> ReadSummary:
    """Counts, lengths, columns with their most common values, and the first records. Reads the index, not the data."""
    lengths = reads.lengths(range(len(reads)))
    quantiles = np.quantile(lengths, [0, 0.5, 1]) if len(lengths) else np.zeros(3)
    shown = [_example(number, read) for number, read in enumerate(reads[:examples])]
    table = reads.table
    columns = {name: _column(table.column(name)) for name in table.column_names if name != "length"}
    for name in reads.column_names:
        columns.setdefault(name, {"kept": "in the headers"})
    return ReadSummary(
        paths=[str(path) for path in reads.paths],
        formats=reads.formats,
        fidelity=[part.fidelity for part in reads.parts if isinstance(part, PackFile)],
        records=len(reads),
        bases=reads.num_bases,
        bytes=reads.num_bytes,
        index_bytes=reads.index_bytes,
        lengths={
            **dict(zip(("shortest", "median", "longest"), quantiles.tolist(), strict=True)),
            "mean": reads.num_bases / max(len(reads), 1),
        },
        columns=columns,
        examples=shown,
    )


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


def _example(number: int, read: Read) -> dict[str, object]:
    bases = read.sequence
    shown = bases if len(bases) <= _SHOWN_BASES else f"{bases[:_SHOWN_BASES]}... ({len(bases)} bases)"
    return {"number": number, "name": read.name, "sequence": shown, **read.columns}


def _column(values: pa.ChunkedArray) -> dict[str, object]:
    chunks = pa.concat_arrays([decoded(values.chunk(index)) for index in range(values.num_chunks)])
    counts: list[dict[str, Any]] = pc.value_counts(chunks).to_pylist()
    most_common = sorted(counts, key=lambda row: -row["counts"])[:_MOST]
    about: dict[str, object] = {"distinct": len(counts)}
    if values.null_count:
        about["without value"] = values.null_count
    return {**about, "most": ", ".join(f"{row['values']} ({row['counts']})" for row in most_common)}
