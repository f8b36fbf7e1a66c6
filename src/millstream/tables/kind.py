"""Tables as a kind of record: how they are found and opened. Imports nothing heavy."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.errors import BadSource

if TYPE_CHECKING:
    from millstream.tables.rows import Rows

NAMES = (".parquet", ".pq", ".jsonl", ".ndjson", ".csv", ".tsv")
_COMPRESSED = (".gz", ".bgz", ".zst", ".bz2", ".xz")


def is_at(path: Path) -> bool:
    """Whether a path, or a pattern, has the name of a table, perhaps compressed."""
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(NAMES) and not path.is_dir()


def open(
    path: str | Path | Sequence[str | Path],
    *,
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    **_others: object,
) -> Rows:
    """`ms.open` for tables; options of other kinds are ignored."""
    from millstream.tables.rows import open_rows

    given = [path] if isinstance(path, str | Path) else path
    return open_rows([file for place in given for file in _expand(Path(place))], memory=memory, index_dir=index_dir)


def files_at(path: Path) -> dict[str, Path]:
    """What `millstream copy` copies of a file: itself and its index, by name."""
    from millstream.tables.rows import SUFFIX

    index = path.with_name(path.name + SUFFIX)
    return {path.name: path} | ({index.name: index} if index.is_file() else {})


def _expand(path: Path) -> list[Path]:
    """A file, or the files that match a pattern."""
    if path.exists() or not any(mark in str(path) for mark in "*?["):
        if path.exists() and not is_at(path):
            raise BadSource(f"{path}: not the name of a table; must end in one of {', '.join(NAMES)}")
        return [path]
    found = [Path(file) for file in sorted(glob.glob(str(path)))]
    if not found:
        raise BadSource(f"{path}: no files match")
    return found
