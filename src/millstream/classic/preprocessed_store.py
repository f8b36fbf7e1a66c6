"""Where the traces of the old training datasets lie -> a labelled collection.

Old .pt files are converted once, into a store beside them, which is used again as long as they are the same.
"""

import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, cast

import numpy as np

import millstream as ms
from millstream.collection import Collection
from millstream.console import format_bytes, progress, say
from millstream.dataset.labels import Labelled
from millstream.dataset.subset import Subset
from millstream.errors import BadSource, StoreExists
from millstream.source.preprocessed import is_preprocessed
from millstream.store.convert import PROGRESS, convert
from millstream.store.layout import MANIFEST, list_shards, publish
from millstream.store.traces import Traces

Kind = Literal["lstm", "gnn"]
SUBFOLDERS = {"lstm": "lstm_solo", "gnn": "gnn"}  # as the old preprocessing script wrote them
PATTERNS = ("preprocessed_*.pt", "batch_*.pt")
SOURCES = ".sources.json"  # in a converted store: name, bytes and time of its files, and whether all are in it


class Scratch:
    """A temporary folder that goes when the last dataset that holds this does, in the process that made it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="millstream-"))
        weakref.finalize(self, _remove, self.path, os.getpid())


def open_preprocessed(
    place: str | Path | Collection, kind: Kind, files: Sequence[str | Path] | None
) -> tuple[Collection, Scratch | None]:
    """The labelled traces at a place, or only those that came from some files; and what has to live as long as they."""
    if isinstance(place, Collection):
        if files is not None:
            raise ValueError("batch_files_to_load is for a folder; of a collection, take a subset first")
        return _labelled(place), None
    folder = _find(Path(place), kind)
    if _is_store(folder):
        traces, scratch = Traces(folder), None
    else:
        store, scratch = _converted(folder, kind)
        traces = Traces(store)
        _check_places(files or (), folder)
    return _labelled(traces if files is None else _from_files(traces, files)), scratch


def store_name(kind: Kind) -> str:
    """What the store is called that old files of a folder are converted into."""
    return f"millstream-{kind}"


def old_files(folder: Path) -> list[Path]:
    """The old files of a folder, by name."""
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


def _find(path: Path, kind: Kind) -> Path:
    """The folder that has the traces: this one, or the one in it for this kind."""
    for folder in (path, path / SUBFOLDERS[kind]):
        if folder.is_dir() and (_is_store(folder) or old_files(folder)):
            return folder
    found = "nothing to train on there" if path.exists() else "no such folder"
    raise BadSource(
        f"{path}: {found}; expected {' or '.join(PATTERNS)}, a folder {SUBFOLDERS[kind]} with them, or a trace store"
    )


def _is_store(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or any(list_shards(folder))


# -- converting


def _converted(folder: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    """The store of a folder's old files, made or brought up to date if need be."""
    files = old_files(folder)
    store = folder / store_name(kind)
    with _alone(folder):  # the ranks of a job open their datasets at the same time
        stats = [file.stat() for file in files]
        wanted = [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
        before = _sources(store)
        if before == {"files": wanted, "complete": True}:
            return store, None
        _check_kind(files[0], kind)
        scratch = None if os.access(store if store.exists() else folder, os.W_OK) else Scratch()
        if scratch:
            store = scratch.path / store_name(kind)
        elif before.get("files") != wanted:  # else it goes on where it was interrupted
            _clear(store)
        total = sum(stat.st_size for stat in stats)
        changed = ", which have changed," if "files" in before and before["files"] != wanted else ""
        kept = "removed with the dataset (the folder is read-only)" if scratch else "used from now on"
        say(f"{folder}: converting {len(files)} old files ({format_bytes(total)}){changed} into {store}, {kept}")
        store.mkdir(parents=True, exist_ok=True)
        _write_sources(store, wanted, complete=False)
        with progress(f"convert {folder.name}", total, unit="bytes") as update:
            convert(files, store, notify=say, progress=update)
        _write_sources(store, wanted, complete=True)
        return store, scratch


def _write_sources(store: Path, files: list[list[str | int]], *, complete: bool) -> None:
    publish(store / SOURCES, json.dumps({"files": files, "complete": complete}).encode())


def _sources(store: Path) -> dict[str, object]:
    try:
        return cast("dict[str, object]", json.loads((store / SOURCES).read_text()))
    except (OSError, ValueError):
        return {}


def _check_kind(file: Path, kind: Kind) -> None:
    found = is_preprocessed(file)
    if found != kind:
        names: dict[str | None, str] = {"lstm": "sequences (for the LSTM dataset)", "gnn": "graphs (for the GNN one)"}
        raise BadSource(f"{file}: holds {names.get(found, 'no preprocessed traces')}, expected {names[kind]}")


def _clear(store: Path) -> None:
    """Remove a store that was converted from files as they are no more; anything else stays."""
    if store.is_dir() and ((store / SOURCES).exists() or not any(store.iterdir())):
        shutil.rmtree(store)
    elif store.exists():
        raise StoreExists(
            f"{store}: is in the way of the store that belongs there; move it, or open it by its own path"
        )


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One process at a time; the kernel ends it for one that dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path, owner: int) -> None:
    """A forked worker that ends leaves the folder to the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# -- which records


def _check_places(files: Sequence[str | Path], folder: Path) -> None:
    """A file of the same name in another folder is another file."""
    for file in map(Path, files):
        if file.name != str(file) and file.resolve() != (folder / file.name).resolve():
            raise BadSource(f"{file}: is not in {folder}, where batch_files_to_load chooses from")


def _from_files(traces: Traces, files: Sequence[str | Path]) -> Subset:
    """The records that came from these files, in the order of the files."""
    try:
        counts = cast("dict[str, int]", json.loads((traces.path / PROGRESS).read_text()))
    except FileNotFoundError:
        raise BadSource(
            f"{traces.path}: does not say which file its records came from; leave out batch_files_to_load"
        ) from None
    names = [str(entry["name"]) for entry in cast("list[dict[str, object]]", traces.config.get("converted", []))]
    if sum(counts.values()) != len(traces) or any(f"{name} (2)" in counts for name in names):
        raise BadSource(f"{traces.path}: its records cannot be told apart by file; leave out batch_files_to_load")
    places = dict(zip(counts, pairwise(accumulate(counts.values(), initial=0)), strict=True))
    numbers = [np.empty(0, np.int64)]
    for name in (Path(file).name for file in files):
        if name not in names:
            raise BadSource(f"{traces.path}: no records from a file {name!r}; there are {', '.join(names)}")
        numbers.append(np.arange(*places.get(name, (0, 0)), dtype=np.int64))  # a file without records was not counted
    return ms.subset(traces, np.concatenate(numbers))


def _labelled(collection: Collection) -> Collection:
    """With the field `label`: the one it has been given, or as `ms.labelled` finds it."""
    inner = collection
    while isinstance(inner, Subset):
        inner = inner.collection
    return collection if isinstance(inner, Labelled) else ms.labelled(collection)
