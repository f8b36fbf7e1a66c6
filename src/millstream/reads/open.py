"""Paths -> collections of reads: files indexed if needed, single or as read pairs."""

import glob
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from millstream.core.batches import Batch
from millstream.core.bucket import CONNECTIONS
from millstream.core.collection import Collection, Numbers, Subset
from millstream.core.config import parse_bytes
from millstream.core.console import Progress, progress, quoted, say, silent
from millstream.core.engine import Engine
from millstream.core.files import is_device
from millstream.core.kernels import require_numba
from millstream.core.memory import Allowance, available_bytes
from millstream.core.mixture import Concat
from millstream.core.remote import RemotePath, is_url, to_path
from millstream.errors import BadIndex, BadSource, EngineError, MillstreamError
from millstream.reads.files import ReadFile
from millstream.reads.files.columns import outdated_column
from millstream.reads.files.in_order import ENDINGS, STDIN
from millstream.reads.files.index import SUFFIX, IndexSettings, build_index, find_index, load_index, settings_of
from millstream.reads.files.names import NameText
from millstream.reads.files.sections import Sections
from millstream.reads.files.source import looks_like_reads
from millstream.reads.labels import put_classes, put_table
from millstream.reads.mapping import KEY, MappingSource, load_mapping
from millstream.reads.pack import PackFile, is_named_pack, is_pack
from millstream.reads.pairs import Alternating, by_part, header_names
from millstream.reads.reads import Part, Reads, Unknown

# Files named like reads must be reads; other files in a folder are used if they look like reads.
_SUFFIXES = (".fa", ".fasta", ".fna", ".fq", ".fastq")
READ_NAMES = tuple(suffix + wrap for suffix in _SUFFIXES for wrap in ("", ".gz", ".bgz", ".zst"))
NAME, NAME_OFFSETS = "name", "name_offsets"
Found = TypeVar("Found")
Paths = str | Path | Sequence[str | Path]


def watch_index(path: Path, memory: int | str | None = None) -> AbstractContextManager[Progress]:
    """Progress of indexing a file within this memory budget."""
    held = None if memory is None else Allowance(memory).usage
    return progress(f"index {path.name}", path.stat().st_size, unit="bytes", memory=held)


def expand(path: str | Path, *, in_order: bool = False) -> list[Path]:
    """The read files at a path: a file, or the read files in a folder or matching a pattern. Recognised by content.

    Packs count if there are no other reads. `in_order`: also what can only be read once, into a pack.
    """
    place = to_path(path)
    if str(path) == STDIN:
        if in_order:
            return [place]
        raise BadSource("-: reads are fetched in any order, which stdin cannot do. Save them first: cat > reads.fa")
    if isinstance(place, RemotePath):
        files = _objects_at(place)
        if files is None:
            return [place]
    elif place.is_dir():
        files = sorted(file for file in place.iterdir() if file.is_file())
    elif not place.exists() and any(mark in str(path) for mark in "*?["):
        files = [Path(file) for file in sorted(glob.glob(str(path)))]
    else:
        return [place]
    names = (*READ_NAMES, *ENDINGS) if in_order else READ_NAMES
    found = [file for file in files if file.name.lower().endswith(names) or looks_like_reads(file)]
    found = found or [file for file in files if is_named_pack(file)]  # packs are usually of the files beside them
    if not found:
        raise BadSource(f"{path}: no FASTA or FASTQ files there")
    return found


def read_files(paths: Paths) -> list[Path]:
    """The read files at these paths."""
    given = [paths] if isinstance(paths, str | Path) else paths
    return [file for path in given for file in expand(path)]


def _objects_at(place: RemotePath) -> list[Path] | None:
    """The objects in a folder or matching a pattern, by name; None if the path is that of an object."""
    if any(mark in place.name for mark in "*?["):
        return sorted(place.parent.glob(place.name))
    if place.name.lower().endswith(READ_NAMES) or place.is_file():
        return None
    found = [place / name for name in place.entries()]
    return sorted(file for file in found if file.suffix != SUFFIX and not file.name.startswith(".")) or None


@contextmanager
def no_progress(path: Path) -> Generator[Progress]:
    """Shows no progress."""
    yield silent


def open_reads(
    paths: Sequence[str | Path],
    *,
    settings: IndexSettings | None = None,
    mapping: MappingSource | None = None,
    labels: str | Path | None = None,
    unknown: Unknown = "error",
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    rebuild: bool = False,
    engine: Engine = Engine(),  # noqa: B008  (frozen)
    watch: Callable[[Path], AbstractContextManager[Progress]] = no_progress,
    notify: Callable[[str], None] = say,
) -> Reads:
    """Open files as one collection, and build the indexes that are missing.

    `labels` is a table of reads and their class ids or tax ids, joined once and stored beside the indexes.
    `rebuild` builds all of them, with `settings` over those of the existing indexes. On Ray, a worker builds each.
    """
    require_numba()
    if not paths:
        raise BadSource("no files given")
    if engine.name != "local":
        index_files(paths, settings=settings, index_dir=index_dir, rebuild=rebuild, engine=engine, notify=notify)
        rebuild = False
    budget = (parse_bytes(memory) if memory is not None else available_bytes() // 2) // len(paths)
    folder = to_path(index_dir).absolute() if index_dir is not None else None
    places = [to_path(path).absolute() for path in paths]

    def find(path: Path) -> PackFile | Sections | IndexSettings:
        check_readable(path)
        if is_pack(path):
            return _load_pack(path, budget)
        return _find_or_plan(path, settings, folder, rebuild=rebuild, notify=notify)

    parts: list[Part] = []
    for path, found in zip(places, _map_objects(find, places), strict=True):
        if isinstance(found, IndexSettings):
            with watch(path) as progress:
                place = build_index(path, found, index_dir=folder, progress=progress, notify=notify)
            found = load_index(path, place)
        parts.append(found if isinstance(found, PackFile) else ReadFile(path, found, memory=budget))
    arguments = {
        "settings": settings, "mapping": mapping, "labels": labels, "unknown": unknown, "memory": memory,
        "index_dir": folder,
    }  # fmt: skip
    classes = load_mapping(mapping) if mapping is not None else None
    key = classes.key if classes is not None else KEY
    are_known = None if labels is None else put_table(parts, to_path(labels), key=key, index_dir=folder)
    if classes is not None:
        put_classes(parts, classes, are_known=are_known, must_be_known=unknown == "error")
    return Reads(
        parts, reopen=Reopen(tuple(str(part.path) for part in parts), arguments), mapping=classes, unknown=unknown
    )


def index_files(
    paths: Sequence[str | Path],
    *,
    settings: IndexSettings | None = None,
    index_dir: str | Path | None = None,
    rebuild: bool = False,
    engine: Engine,
    notify: Callable[[str], None] = say,
) -> None:
    """Build the indexes that are missing, each by a worker of the engine."""
    folder = to_path(index_dir).absolute() if index_dir is not None else None
    jobs: list[IndexJob] = []
    for path in dict.fromkeys(to_path(path).absolute() for path in paths):
        check_readable(path)
        if is_pack(path):
            continue
        found = _find_or_plan(path, settings, folder, rebuild=rebuild, notify=notify)
        if isinstance(found, IndexSettings):
            jobs.append(IndexJob(path, found, folder, path.stat().st_size))
    if not jobs:
        return
    done = 0
    with progress("index", sum(job.num_bytes for job in jobs), unit="bytes") as update:
        for job, place, messages in engine.run(IndexWorker, jobs):
            for message in messages:
                notify(message)
            if not place.exists():
                raise EngineError(f"{place}: written by a worker, but not here. All machines must share this folder")
            update(done := done + job.num_bytes)


@dataclass(frozen=True)
class IndexJob:
    """A file to index with these settings."""

    path: Path
    settings: IndexSettings
    index_dir: Path | None
    num_bytes: int


class IndexWorker:
    """Indexes files where it is; returns each index and the messages."""

    def do(self, job: IndexJob) -> tuple[IndexJob, Path, list[str]]:
        messages: list[str] = []
        place = build_index(job.path, job.settings, index_dir=job.index_dir, notify=messages.append)
        return job, place, messages

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Reopen:
    """Reopens a collection, also in another process, and perhaps with another memory budget."""

    paths: tuple[str, ...]
    arguments: Mapping[str, object]

    def __call__(self, memory: int | None = None) -> Reads:
        budget = {} if memory is None else {"memory": memory}
        return open_reads(self.paths, **{**self.arguments, **budget})  # pyright: ignore


def open_files(
    reads: Paths, mates: Paths | None = None, *, memory: int, index_dir: str | Path | None = None
) -> tuple[Collection, Sequence[Part]]:
    """All reads, each followed by its mate if there are `mates`; and the files."""

    def opened(paths: Paths) -> list[Reads]:
        """One collection per file: their indexes need not have the same columns."""
        files = read_files(paths)
        share = memory // max(len(files), 1)
        return [open_reads([f], memory=share, index_dir=index_dir, watch=watch_index, notify=say) for f in files]

    files, others = opened(reads), [] if mates is None else opened(mates)
    parts = [part for file in (*files, *others) for part in file.parts]
    if mates is None:
        return files[0] if len(files) == 1 else Concat(files), parts
    first, second = (sum(map(len, some)) for some in (files, others))
    if first != second:
        raise BadSource(f"{first_of(reads)} has {first} reads, but {first_of(mates)} has {second}: not read pairs")
    if same := {part.path for part in parts[: len(files)]} & {part.path for part in parts[len(files) :]}:
        raise BadSource(f"{same.pop()}: given as its own mates. If its neighbouring reads are mates, use --paired")
    return Subset(Concat([*files, *others]), Alternating(((first, True),))), parts


def first_of(paths: Paths) -> str:
    """How messages refer to these paths."""
    return str(paths) if isinstance(paths, str | Path) else str(paths[0])


@dataclass(frozen=True)
class HeaderNames:
    """`name` and `name_offsets`: the first words of the headers, as `NameText`."""

    parts: Sequence[Part]
    fields: tuple[str, ...] = ()

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        some = [(part, rows) for part, rows, _ in by_part(self.parts, batch.numbers)]
        if len(some) == 1:
            found = some[0][0].name_text(some[0][1])
        else:
            found = NameText.of(header_names(self.parts, batch.numbers))
        return {NAME: found.text, NAME_OFFSETS: found.offsets}


def read_lengths(parts: Sequence[Part], numbers: Numbers) -> Numbers:
    """The length of each read, in bases."""
    lengths = np.empty(len(numbers), np.int64)
    for part, rows, here in by_part(parts, numbers):
        lengths[here] = part.lengths(rows)
    return lengths


def _map_objects(find: Callable[[Path], Found], paths: Sequence[Path]) -> Iterator[Found]:
    """Like map; objects many at once, since each takes some requests."""
    if len(paths) == 1 or not any(map(is_url, paths)):
        yield from map(find, paths)
        return
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        yield from threads.map(find, paths)


def _load_pack(path: Path, memory: int) -> PackFile:
    pack = PackFile(path, memory=memory)
    if (column := outdated_column(pack.sections)) is not None:
        raise BadIndex(
            f"{path}: an older millstream packed its column {column!r}. Pack it again: millstream unpack "
            f"{quoted(path)} reads.fa, then millstream pack reads.fa {quoted(path)} --rebuild"
        )
    return pack


def check_readable(path: Path) -> None:
    """BadSource unless this is a file, or an object, that can be opened."""
    if isinstance(path, RemotePath):
        if not path.is_file():
            raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such object'}")
        return
    if is_device(path) or not path.is_file():
        pipe = "is not a file on disk; reads are fetched in any order. Save them first: cat > reads.fa"
        what = "is a folder" if path.is_dir() else pipe if path.exists() else "no such file"
        raise BadSource(f"{path}: {what}")
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise BadSource(f"{path}: cannot be read ({error.strerror})") from None


def _find_or_plan(
    path: Path,
    settings: IndexSettings | None,
    folder: Path | None,
    *,
    rebuild: bool,
    notify: Callable[[str], None],
) -> Sections | IndexSettings:
    """The index of a file, if it can be used; otherwise the settings to build one with."""
    if rebuild:
        return _former_settings(path, settings or IndexSettings(), folder, notify=notify)
    return _load(path, settings or IndexSettings(), folder, explicit=settings is not None, notify=notify)


def _load(
    path: Path, wanted: IndexSettings, folder: Path | None, *, explicit: bool, notify: Callable[[str], None]
) -> Sections | IndexSettings:
    """The index of a file, if it has what is wanted; otherwise the settings to build one with."""
    index = find_index(path, folder)
    if index is None:
        return wanted
    sections = load_index(path, index)
    made = settings_of(sections)
    wanted = wanted.over(made)
    if explicit and not made.serves(wanted):
        notify(f"{path}: its index has other settings; rebuilding it")
        return wanted
    if outdated_column(sections) is not None:
        notify(f"{path}: its index was built by an older millstream; rebuilding it")
        return made
    return sections


def _former_settings(
    path: Path, wanted: IndexSettings, folder: Path | None, *, notify: Callable[[str], None]
) -> IndexSettings:
    """What is wanted, over the settings of the existing index, which may be stale or damaged."""
    index = find_index(path, folder)
    if index is None:
        return wanted
    try:
        made = settings_of(Sections(index, remedy=""))
    except (MillstreamError, LookupError, TypeError, ValueError):
        notify(
            f"{path}: its index is damaged; rebuilding it {'with' if wanted.header_regex else 'without'} a header regex"
        )
        return wanted
    kept = [f"header_regex={made.header_regex}"] if made.header_regex and not wanted.header_regex else []
    kept += [name for name in ("names", "salvage", "unverified") if getattr(made, name)]
    if kept:
        notify(f"{path}: rebuilding its index with the settings it had ({', '.join(kept)})")
    return wanted.over(made)
