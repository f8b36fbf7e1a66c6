"""`ms.open`: one way to open whatever lies at a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.console import say
from millstream.store.kinds import is_store
from millstream.store.read_paths import expand, watch_index

if TYPE_CHECKING:
    from millstream.source.mapping import MappingSource
    from millstream.store.reads import Reads
    from millstream.store.traces import Traces


def open(
    path: str | Path | Sequence[str | Path],
    *,
    verify: Literal["always", "never"] = "always",
    open_shards: int = 256,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: Literal["error", "skip", "null"] = "error",
    mapping: MappingSource | None = None,
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    salvage: bool = False,
) -> Traces | Reads:
    """Open a trace store, or reads: FASTA or FASTQ files (plain, gzip, BGZF, zstd), or packed ones.

    Traces: `verify="never"` skips the checksums; `open_shards` is how many shards stay mapped at once.

    Reads: a file, a folder, a pattern or a list is one collection; indexes that are missing are built. The named
    groups of `header_regex` become columns (`columns` keeps only some); `mapping` joins labels to them. `memory` is
    what decoded blocks and mapped files may take, by default half of what is available. `salvage` reads a damaged
    file up to the damage.

    >>> traces = ms.open("traces/")
    >>> reads = ms.open("reads.fa.gz", header_regex=r"lbl\\|(?P<class_id>\\d+)", mapping="species.tsv")
    """
    if isinstance(path, str | Path) and is_store(Path(path)):
        from millstream.store.traces import Traces

        return Traces(path, verify=verify, open_shards=open_shards)
    from millstream.store.index import IndexSettings
    from millstream.store.open_reads import open_reads

    given = [path] if isinstance(path, str | Path) else path
    paths = [file for place in given for file in expand(place)]
    settings = None
    if header_regex is not None or columns is not None or salvage:
        chosen = tuple(columns) if columns is not None else None
        settings = IndexSettings(header_regex=header_regex, columns=chosen, on_mismatch=on_mismatch, salvage=salvage)
    return open_reads(
        paths, settings=settings, mapping=mapping, memory=memory, index_dir=index_dir, watch=watch_index, notify=say
    )


def open_as_reads(path: str | Path) -> Reads:
    """Reads at a path, with the indexes they have."""
    from millstream.store.open_reads import open_reads

    return open_reads(expand(path), watch=watch_index, notify=say)
