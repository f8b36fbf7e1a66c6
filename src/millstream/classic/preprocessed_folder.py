"""A folder of old preprocessed files -> a labelled collection. Files are converted once, into a store beside them."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import numpy as np

from millstream.classic.preprocessed import Kind, is_preprocessed
from millstream.core.collection import Collection, Subset, subset
from millstream.core.config import parse_json
from millstream.core.console import format_bytes, progress, say
from millstream.core.files import locked, publish_json
from millstream.core.split import Labelled, labelled
from millstream.errors import BadSetting, BadSource, StoreExists
from millstream.traces.convert import convert, finished_files
from millstream.traces.store.manifest import MANIFEST, list_shards
from millstream.traces.store.traces import Traces

SUBFOLDERS: Mapping[Kind, str] = {"lstm": "lstm_solo", "gnn": "gnn"}  # as the old preprocessing script wrote them
PATTERNS = ("preprocessed_*.pt", "batch_*.pt")
SOURCES = ".sources.json"  # in a converted store: name, size and mtime of its files, and whether all are converted


class Scratch:
    """A temporary folder, removed with the last dataset that refers to it, by the process that created it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="millstream-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def open_preprocessed(
    place: str | Path | Collection, kind: Kind, files: Sequence[str | Path] | None
) -> tuple[Collection, Scratch | None]:
    """The labelled traces of a folder (or of some of its files), and the temporary folder they need, if any."""
    if isinstance(place, Collection):
        if files is not None:
            raise ValueError("batch_files_to_load needs a folder; for a collection, take a subset first")
        return _labelled(place), None
    if files is not None and not _are_paths(files):
        raise BadSetting(
            f"batch_files_to_load={files!r}: must be a list of file names. A size of the cache is max_cache_batches"
        )
    folder = find_folder(Path(place), kind)
    store, scratch = store_in(folder, kind)
    traces = Traces(store)
    if files is None:
        return _labelled(traces), scratch
    if store != folder:
        _check_folder(files, folder)
    return _labelled(_from_files(traces, files)), scratch


def _are_paths(files: object) -> bool:
    if isinstance(files, str | Path) or not isinstance(files, Iterable):
        return False
    return all(isinstance(file, str | Path) for file in cast("Iterable[object]", files))


def find_folder(path: Path, kind: Kind) -> Path:
    """The folder with the traces: this one, or its subfolder for this kind."""
    for folder in (path, path / SUBFOLDERS[kind]):
        if is_store(folder) or _old_files(folder):
            return folder
    found = "contains no training data" if path.exists() else "no such folder"
    raise BadSource(
        f"{path}: {found}; expected {' or '.join(PATTERNS)}, a subfolder {SUBFOLDERS[kind]} with them, or a trace store"
    )


def holds(path: Path, kind: Kind) -> bool:
    """Whether this folder, or its subfolder for this kind, has data of this kind."""
    for folder in (path, path / SUBFOLDERS[kind]):
        if files := _old_files(folder):
            return is_preprocessed(files[0]) == kind
    return is_store(path / SUBFOLDERS[kind])


def store_in(folder: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    """The store of a folder: itself, or the one made of its old files, in a temporary folder if this is read-only."""
    return (folder, None) if is_store(folder) else _converted(folder, kind)


def is_store(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).exists() or any(list_shards(folder)))


def _old_files(folder: Path) -> list[Path]:
    """Sorted by name."""
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


# -- converting


def _converted(folder: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    """The store of a folder's old files, created or updated if necessary."""
    files = _old_files(folder)
    name = f"millstream-{kind}"
    store = folder / name
    with locked(folder):  # the ranks of a job open their datasets concurrently
        stats = [file.stat() for file in files]
        wanted = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
        before = _sources(store)
        if before == {"files": wanted, "complete": True}:
            return store, None
        _check_kind(files[0], kind)
        scratch = None if os.access(store if store.exists() else folder, os.W_OK) else Scratch()
        if scratch:
            store = scratch.path / name
        elif before.get("files") != wanted:  # otherwise resume the interrupted conversion
            _clear(store)
        total = sum(stat.st_size for stat in stats)
        changed = ", which have changed since," if "files" in before and before["files"] != wanted else ""
        kept = "removed with the dataset (the folder is read-only)" if scratch else "reused from now on"
        say(f"{folder}: converting {len(files)} old files ({format_bytes(total)}){changed} into {store}, {kept}")
        store.mkdir(parents=True, exist_ok=True)
        _write_sources(store, wanted, complete=False)
        with progress(f"convert {folder.name}", total, unit="bytes") as update:
            convert(files, store, notify=say, progress=update)
        _write_sources(store, wanted, complete=True)
        return store, scratch


def _write_sources(store: Path, files: list[list[str | int]], *, complete: bool) -> None:
    publish_json(store / SOURCES, {"files": files, "complete": complete})


def _sources(store: Path) -> dict[str, object]:
    try:
        return cast("dict[str, object]", parse_json((store / SOURCES).read_text()))
    except (OSError, ValueError):
        return {}


def _check_kind(file: Path, kind: Kind) -> None:
    found = is_preprocessed(file)
    if found != kind:
        names: dict[str | None, str] = {
            "lstm": "sequences (for the LSTM dataset)",
            "gnn": "graphs (for the GNN dataset)",
        }
        raise BadSource(f"{file}: contains {names.get(found, 'no preprocessed traces')}, expected {names[kind]}")


def _clear(store: Path) -> None:
    """Remove a store that was converted from files that have changed; refuse to remove anything else."""
    if store.is_dir() and ((store / SOURCES).exists() or not any(store.iterdir())):
        shutil.rmtree(store)
    elif store.exists():
        raise StoreExists(f"{store}: exists, but was not made from these files; move it, or open it by its own path")


def _remove(folder: Path, owner: int) -> None:
    """Only the process that created the folder removes it, not a forked worker."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# -- which records


def _check_folder(files: Sequence[str | Path], folder: Path) -> None:
    """A file of the same name in another folder is a different file."""
    for file in map(Path, files):
        if file.name != str(file) and file.resolve() != (folder / file.name).resolve():
            raise BadSource(f"{file}: is not in {folder}; batch_files_to_load selects files of that folder")


def _from_files(traces: Traces, files: Sequence[str | Path]) -> Subset:
    """The records that came from these files, in the order of the files."""
    try:
        counts = finished_files(traces.path)
    except FileNotFoundError:
        raise BadSource(
            f"{traces.path}: does not record which file its records came from; omit batch_files_to_load"
        ) from None
    names = [str(entry["name"]) for entry in cast("list[dict[str, object]]", traces.config.get("converted", []))]
    if sum(counts.values()) != len(traces) or any(f"{name} (2)" in counts for name in names):
        raise BadSource(f"{traces.path}: its records cannot be assigned to files; omit batch_files_to_load")
    ranges = dict(zip(counts, pairwise(accumulate(counts.values(), initial=0)), strict=True))
    numbers = [np.empty(0, np.int64)]
    for name in (Path(file).name for file in files):
        if name not in names:
            raise BadSource(f"{traces.path}: no records from {name!r}; must be one of: {', '.join(names)}")
        numbers.append(np.arange(*ranges.get(name, (0, 0)), dtype=np.int64))  # a file without records has no entry
    return subset(traces, np.concatenate(numbers))


def _labelled(collection: Collection) -> Collection:
    """The collection with a field `label`: its own, or the one `ms.labelled` finds."""
    inner = collection
    while isinstance(inner, Subset):
        inner = inner.collection
    return collection if isinstance(inner, Labelled) else labelled(collection)
