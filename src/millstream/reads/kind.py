"""Reads as a kind of record: how they are recognised and opened, which models are trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.core.console import say
from millstream.reads.open import READ_NAMES, expand, watch_index

if TYPE_CHECKING:
    from millstream.reads.mapping import MappingSource
    from millstream.reads.reads import Reads

MODELS = "classifiers"  # what a run on reads compares
MODEL_GROUPS = ()


def is_at(path: Path) -> bool:
    """Whether a path is for reads: any file, a folder with FASTA or FASTQ in it, a pattern.

    Any file, because opening it as reads gives the best error message for one that is neither FASTA nor FASTQ.
    """
    if path.is_dir():
        from millstream.reads.files.scanning import looks_like_reads

        return any(file.is_file() and looks_like_reads(file) for file in path.iterdir())
    return path.exists() or path.name.lower().endswith(READ_NAMES) or any(mark in str(path) for mark in "*?[")


def open(
    path: str | Path | Sequence[str | Path],
    *,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: Literal["error", "skip", "null"] = "error",
    mapping: MappingSource | None = None,
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    salvage: bool = False,
    **_others: object,
) -> Reads:
    """`ms.open` for reads; options of other kinds are ignored."""
    from millstream.reads.files.index import IndexSettings
    from millstream.reads.open import open_reads

    given = [path] if isinstance(path, str | Path) else path
    paths = [file for place in given for file in expand(place)]
    settings = None
    if header_regex is not None or columns is not None or salvage:
        chosen = tuple(columns) if columns is not None else None
        settings = IndexSettings(header_regex=header_regex, columns=chosen, on_mismatch=on_mismatch, salvage=salvage)
    return open_reads(
        paths, settings=settings, mapping=mapping, memory=memory, index_dir=index_dir, watch=watch_index, notify=say
    )


def expand_models(names: Sequence[str]) -> list[str]:
    """Each name once; there are no groups of classifiers."""
    return list(dict.fromkeys(names))
