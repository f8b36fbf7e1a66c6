"""`ms.open`: one way to open whatever lies at a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.console import say
from millstream.store.read_paths import READ_NAMES, expand, watch_index

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
    if isinstance(path, str | Path) and _is_store(Path(path)):
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


def are_reads(path: Path) -> bool:
    """Whether a path holds reads: FASTA or FASTQ, packed or not."""
    if path.is_dir() or not path.exists():
        return not _is_store(path)
    from millstream.store.index import looks_like_reads
    from millstream.store.pack_file import is_pack

    return path.name.lower().endswith(READ_NAMES) or is_pack(path) or looks_like_reads(path)


def open_as_reads(path: str | Path) -> Reads:
    """Reads at a path, with the indexes they have."""
    from millstream.store.open_reads import open_reads

    return open_reads(expand(path), watch=watch_index, notify=say)


def _is_store(path: Path) -> bool:
    """Whether this is for `Traces`, which also says best what is wrong with what is nothing."""
    if not path.is_dir():
        if path.exists():
            return path.name.endswith((".pkl", ".pkl.gz", ".pt"))
        return not path.name.lower().endswith(READ_NAMES) and not any(mark in str(path) for mark in "*?[")
    if (path / "manifest.json").exists() or any(path.glob("shard-*.arrow*")):
        return True
    from millstream.store.index import looks_like_reads

    return not any(file.is_file() and looks_like_reads(file) for file in path.iterdir())
