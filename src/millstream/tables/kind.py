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


def is_named(path: Path) -> bool:
    """Whether a path, or a pattern, has the name of a table, perhaps compressed."""
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(NAMES)


def is_at(path: Path) -> bool:
    """Whether a path is that of a table, by its name; a folder of that name has tables in it, as Spark writes them."""
    from millstream.core.bucket import is_url

    if not is_named(path) or is_url(path):
        return is_named(path)
    return not path.is_dir() or bool(_tables_in(path))


def open(
    path: str | Path | Sequence[str | Path],
    *,
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    **_others: object,
) -> Rows:
    """`ms.open` for tables; options of other kinds are ignored."""
    from millstream.core.remote import to_path
    from millstream.tables.rows import open_rows

    given = [path] if isinstance(path, str | Path) else path
    return open_rows([file for place in given for file in _expand(to_path(place))], memory=memory, index_dir=index_dir)


def files_at(path: Path) -> dict[str, Path]:
    """What `millstream copy` copies of a file: itself and its index, by name."""
    from millstream.tables.rows import SUFFIX

    index = path.with_name(path.name + SUFFIX)
    return {path.name: path} | ({index.name: index} if index.is_file() else {})


def _expand(path: Path) -> list[Path]:
    """A file, the tables in a folder, or the files that match a pattern."""
    from millstream.core.remote import RemotePath

    is_pattern = any(mark in str(path) for mark in "*?[")
    if isinstance(path, RemotePath):
        if not is_pattern:
            _check_name(path)
            return [path] if path.is_file() else _tables_in(path) or [path]
        found: list[Path] = sorted(path.parent.glob(path.name))
    elif path.exists() or not is_pattern:
        if path.exists():
            _check_name(path)
        return (_tables_in(path) if path.is_dir() else []) or [path]
    else:
        found = [Path(file) for file in sorted(glob.glob(str(path)))]
    if not found:
        raise BadSource(f"{path}: no files match")
    return found


def _check_name(path: Path) -> None:
    if not is_named(path):
        raise BadSource(f"{path}: not the name of a table; must end in one of {', '.join(NAMES)}")


def _tables_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_named(file) and not file.name.startswith((".", "_")))
