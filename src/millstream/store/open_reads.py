"""Files -> a collection of reads: packed ones as they are, others with their index, which is built if it is missing."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from millstream.config import available_bytes, parse_bytes
from millstream.console import Progress, say, silent
from millstream.errors import BadSource
from millstream.source.mapping import MappingSource, load_mapping
from millstream.store.index import IndexSettings, build_index, find_index, load_index, settings_of
from millstream.store.pack_file import is_pack, open_pack
from millstream.store.read_file import ReadFile
from millstream.store.reads import Part, Reads, Unknown
from millstream.store.sections import Sections


@contextmanager
def no_progress(path: Path) -> Generator[Progress]:
    """Nobody watches."""
    yield silent


def open_reads(
    paths: Sequence[str | Path],
    *,
    settings: IndexSettings | None = None,
    mapping: MappingSource | None = None,
    unknown: Unknown = "error",
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    rebuild: bool = False,
    watch: Callable[[Path], AbstractContextManager[Progress]] = no_progress,
    notify: Callable[[str], None] = say,
) -> Reads:
    """Open files as one collection, building the indexes that are missing (`rebuild`: all of them)."""
    if not paths:
        raise BadSource("no files given")
    wanted = settings or IndexSettings()
    budget = (parse_bytes(memory) if memory is not None else available_bytes() // 2) // len(paths)
    folder = Path(index_dir).absolute() if index_dir is not None else None
    parts: list[Part] = []
    for path in (Path(path).absolute() for path in paths):
        _check_readable(path)
        if is_pack(path):
            parts.append(open_pack(path, memory=budget))
            continue
        sections = None if rebuild else _load(path, wanted, folder, explicit=settings is not None, notify=notify)
        if sections is None:
            with watch(path) as progress:
                place = build_index(path, wanted, index_dir=folder, progress=progress, notify=notify)
            sections = load_index(path, place)
        parts.append(ReadFile(path, sections, memory=budget))
    arguments = {"settings": settings, "mapping": mapping, "unknown": unknown, "memory": memory, "index_dir": folder}
    labels = load_mapping(mapping) if mapping is not None else None
    return Reads(parts, reopen=Reopen([str(part.path) for part in parts], arguments), mapping=labels, unknown=unknown)


def _check_readable(path: Path) -> None:
    if not path.is_file():
        raise BadSource(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}")
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise BadSource(f"{path}: cannot be read ({error.strerror})") from None


def _load(
    path: Path, wanted: IndexSettings, folder: Path | None, *, explicit: bool, notify: Callable[[str], None]
) -> Sections | None:
    """The index of a file, if there is one that serves."""
    index = find_index(path, folder)
    if index is None:
        return None
    sections = load_index(path, index)
    made = settings_of(sections)
    if explicit and not made.serves(wanted):
        notify(f"{path}: its index was made with other settings; building it again")
        return None
    return sections


class Reopen:
    """Opens a collection again, in another process. Refuses a file that has changed."""

    def __init__(self, paths: Sequence[str], arguments: Mapping[str, object]) -> None:
        self._paths = tuple(paths)
        self._arguments = dict(arguments)

    def __call__(self) -> Reads:
        return open_reads(self._paths, **self._arguments)  # pyright: ignore

    def within(self, memory: int) -> Reads:
        """With another `memory`."""
        return Reopen(self._paths, {**self._arguments, "memory": memory})()
