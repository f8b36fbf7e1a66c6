"""Files that appear complete or not at all, written by one process at a time; long outputs that survive kill -9.

Publishing is: a hidden temporary name, fsync, rename. The final name always holds the old bytes or all of the new ones,
even after kill -9 or a power cut. A lock is the kernel's flock, which ends with the process that holds it.
"""

import base64
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np

from millstream.core.bucket import is_url
from millstream.core.config import config_diff, parse_json
from millstream.core.console import quoted, say
from millstream.errors import BadSetting, ConfigMismatch, StoreExists, StoreFull

Write = Callable[[bytes | memoryview], object]
NOTHING_LEFT = "Nothing was left behind; free some space, or choose another path"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OLD_KEPT = "The previous file is kept; free some space and run the same command again"
_SIZES = "millstream.json"  # in a folder made by `make_once`: the size of every file, written last


def cache_folder() -> Path:
    """The cache folder: `$XDG_CACHE_HOME/millstream`, or `~/.cache/millstream`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"


# -- publishing a file


def publish(file: Path, data: bytes, advice: str = _OLD_KEPT) -> None:
    """Write a file so that its name always holds either the old bytes or all of the new ones, even after a crash."""
    if is_object(file):
        file.write_bytes(data)
        return
    with publishing(file, advice) as f:
        f.write(data)


@contextmanager
def publishing(file: Path, advice: str = _OLD_KEPT) -> Generator[BinaryIO]:
    """The same for a file written in pieces: it gets its name when the block ends. An object is uploaded then."""
    if is_object(file):
        with no_space(spool_root(), advice), tempfile.NamedTemporaryFile(dir=spool_root()) as f:
            yield cast(BinaryIO, f)
            f.flush()
            cast(Any, file).put(Path(f.name))
        return
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with no_space(file, advice), open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, file)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(file)  # the name that the user knows
        raise


def publish_json(file: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    publish(file, text.encode(errors="backslashreplace"))  # of a path that is not UTF-8: JSON has the same escapes


@contextmanager
def publishing_text(out: Path) -> Generator[Write]:
    """Write a new text file in pieces, gzipped if its name ends in .gz."""
    check_new(out, resumable=False)
    with publishing(out, NOTHING_LEFT) as file:
        if out.name.endswith(".gz"):
            deflate = gzip_member()
            yield lambda text: file.write(deflate.compress(text))
            file.write(deflate.flush())
        else:
            yield file.write
    sync_folder(out.parent)


def gzip_member() -> Any:
    """A compressor that writes one gzip member: by isal, which is six times as fast, or without it by zlib."""
    return import_module("isal.isal_zlib" if find_spec("isal") else "zlib").compressobj(2, 8, 31)


def already_exists(out: Path) -> StoreExists:
    return StoreExists(f"{out}: already exists. Choose another name, or remove it")


def remove_unpublished(file: Path) -> None:
    """Remove what a killed process left while publishing this file. No other process may be publishing it now."""
    if is_object(file):
        return
    for temporary in file.parent.glob(f".{escape(file.name)}.{'[0-9a-f]' * 12}.tmp"):
        temporary.unlink()


def is_object(path: Path) -> bool:
    """Whether a path is a URL: written whole, when it is complete."""
    return is_url(path)


def spool_root() -> Path:
    """Where objects are made before they are uploaded: `$MILLSTREAM_SPOOL_DIR`, or a folder of the cache folder."""
    folder = Path(os.environ.get("MILLSTREAM_SPOOL_DIR") or cache_folder() / "spool").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that a rename survives a power cut."""
    if is_object(path):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_path(folder: Path) -> None:
    """Sync a folder and all above it: a new folder survives a power cut only if every one above it lists it."""
    for place in (folder.absolute(), *folder.absolute().parents):
        with suppress(PermissionError):  # nothing that this user could have created in
            sync_folder(place)


@contextmanager
def no_space(file: Path, advice: str) -> Generator[None]:
    """Raise a full disk as StoreFull, with advice."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StoreFull(f"{file}: {os.strerror(error.errno or 0).lower()}. {advice}") from None


# -- publishing a folder


@contextmanager
def publishing_folder(folder: Path) -> Generator[Path]:
    """A hidden folder to fill, locked; it is renamed to `folder`, which is new or empty, when the block ends."""
    partial = folder.with_name(f".{folder.name}.partial")
    fd = _locked_folder(partial)
    try:
        for path in partial.iterdir():  # left by a killed process
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield partial
        for path in (*partial.iterdir(), partial):
            sync_folder(path)  # fsync works the same for files
        try:
            os.rename(partial, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise already_exists(folder) from None
        sync_folder(folder.parent)
    finally:
        if is_same_file(fd, partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(fd)


def make_once(folder: Path, make: Callable[[Path], None], *, notify: Callable[[str], None]) -> Path:
    """The folder, filled by `make` unless it is already complete; a second process waits for the first."""
    if not is_complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock_file = folder.with_name(f"{folder.name}.lock")
        with locked(lock_file, on_wait=lambda: notify(f"waiting for another process to create {folder}")):
            if not is_complete(folder):
                publish_folder(folder, make)
    return folder


def publish_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder with `make` and record the sizes of its files for `is_complete`. Replaces an existing folder."""
    with publishing_folder(folder) as partial:
        make(partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / _SIZES).write_text(json.dumps({"num_bytes": sizes}, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # exists, but is incomplete


def is_complete(folder: Path) -> bool:
    """Whether every file recorded by `publish_folder` still has its full size."""
    try:
        sizes: dict[str, int] = parse_json((folder / _SIZES).read_text())["num_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


# -- one process at a time


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], object] = lambda: None) -> Generator[None]:
    """Only one process at a time runs the block. `path` is a folder, or a file that is created if necessary."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        if not lock(fd, without_locks=True):
            on_wait()
            lock(fd, wait=True, without_locks=True)
        yield
    finally:
        os.close(fd)


def lock(fd: int, *, wait: bool = False, shared: bool = False, without_locks: bool) -> bool:
    """Lock an open file or folder until it is closed; False when another process holds it.

    Shared locks exclude only exclusive ones. The kernel releases a lock when the process dies. `without_locks` is
    returned on a file system without locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def unlock(fd: int) -> None:
    """Release a lock before it is closed, since forked processes share it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_same_file(fd: int, path: Path) -> bool:
    """Whether a path is still the opened file: it may have been removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


# -- long-running output that survives kill -9
#
# Parts grow in `OUT.partial/`, next to a journal of what is committed.
#
#     OUT.partial/journal.json   version, terms (inputs and settings), parts (name -> committed bytes), state
#     OUT.partial/NAME ...       the parts; bytes after the committed ones are written again
#
# The journal is replaced as a whole, after its parts are on disk, so it is valid at any time. The same command resumes
# from it, produces the same bytes, and removes the folder.

RESUME = "Progress saved; free some space and run the same command again to resume"
_JOURNAL = "journal.json"
_TEXT = "text"  # the only part of a TextOutput
_VERSION = 2


def partial_folder(out: Path) -> Path:
    """Where an output grows: beside it, or in the spool folder if it is an object."""
    if is_object(out):
        return spool_root() / f"{out.name}-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}.partial"
    return out.with_name(f"{out.name}.partial")


class PartialOutput:
    """The folder of one unfinished output, locked. To resume, `terms` (inputs and settings) must match.

    `rebuild` discards existing progress; `start_over` is the advice in the error when the terms differ.

    >>> with PartialOutput(Path("reads.pack"), {"source": "f00d"}) as output:
    ...     state = output.load()  # None: start from the beginning
    ...     output.commit({"record": 7}, {"bases": 1024})
    ...     output.remove()
    """

    def __init__(
        self, out: Path, terms: Mapping[str, object], *, rebuild: bool = False, start_over: str | None = None
    ) -> None:
        self.out, self.path = out, partial_folder(out)
        self._terms = cast(dict[str, object], json.loads(json.dumps(terms)))
        self._lock = _locked_folder(self.path)
        try:
            remove_unpublished(out)
            if rebuild:
                self._clear(kept=set())
            content = self._read()
            if content is not None and content["terms"] != self._terms:
                raise ConfigMismatch(
                    f"{self.path}: holds the progress of a run with other inputs or settings "
                    f"({config_diff(content['terms'], self._terms)}). Run that command again to resume it, or "
                    f"{start_over or f'remove {self.path} to start over'}"
                )
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.path / _JOURNAL).exists():
            self.remove()  # nothing to resume from
        os.close(self._lock)

    def load(self) -> dict[str, Any] | None:
        """The last committed state, if any. Files that are not in the journal are removed."""
        content = self._read()
        if content is not None and not self.out.exists():  # else a part has been renamed to it
            for name, size in content["parts"].items():
                part = self.path / name
                if (found := part.stat().st_size if part.exists() else 0) < size:
                    say(f"{part}: {found} bytes, expected at least {size}. Starting over")
                    content = None
                    break
        self._clear(kept={_JOURNAL, *content["parts"]} if content else set())
        return content and content["state"]

    def commit(self, state: Mapping[str, object], parts: Mapping[str, int]) -> None:
        """A killed run now resumes from here. `parts` maps each part to its bytes on disk."""
        content = {"version": _VERSION, "terms": self._terms, "parts": parts, "state": state}
        publish(self.path / _JOURNAL, json.dumps(content, default=_array_to_json).encode(), RESUME)
        sync_folder(self.path)

    def publish(self, part: str) -> None:
        """Rename a part, complete and on disk, to the output."""
        if is_object(self.out):
            cast(Any, self.out).put(self.path / part)
        else:
            os.rename(self.path / part, self.out)
            sync_folder(self.out.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder: nothing is left to resume from."""
        if is_same_file(self._lock, self.path):
            shutil.rmtree(self.path)

    def _read(self) -> dict[str, Any] | None:
        try:
            content = parse_json((self.path / _JOURNAL).read_bytes(), object_hook=_array_from_json)
            if content["version"] == _VERSION:
                return content
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):
            pass
        say(f"{self.path}: the journal is damaged or from another version of millstream. Starting over")
        self._clear(kept=set())
        return None

    def _clear(self, *, kept: set[str]) -> None:
        for file in self.path.iterdir():
            if file.name not in kept:
                file.unlink()


class TextOutput:
    """A text file written in pieces, as gzip members if its name ends in .gz; after a resume it has the same bytes.

    `saved` is the last saved position of the writer; `is_finished`: all text is written, even if `out` does not exist.

    >>> with TextOutput(Path("out.tsv"), {"reads": "f00d"}) as file:
    ...     file.write(b"a row\\n"); file.save({"row": 1}); file.finish({"row": 1}); file.publish()
    """

    def __init__(self, out: Path, terms: Mapping[str, object], *, chunk_bytes: int = 1 << 20) -> None:
        self.out, self.terms = out, dict(terms)
        self.saved: Mapping[str, Any] | None = None
        self.is_finished = False
        self._chunk_bytes = chunk_bytes  # text per write; in a .gz file, per member
        self._pending = bytearray()
        self._fd = -1

    def __enter__(self) -> Self:
        check_new(self.out)
        self._output = PartialOutput(self.out, self.terms)
        try:
            self._resume(self._output.load() or {"bytes": 0, "pending": "", "saved": None, "finished": False})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._output.__exit__()

    def write(self, text: bytes) -> None:
        self._pending += text
        while len(self._pending) >= self._chunk_bytes:  # members do not depend on the sizes of the pieces
            self._put(bytes(self._pending[: self._chunk_bytes]))
            del self._pending[: self._chunk_bytes]

    def save(self, saved: Mapping[str, object], *, finished: bool = False) -> None:
        """Commit the text written so far, with the position of the writer as JSON."""
        with no_space(self.out, RESUME):
            os.fsync(self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_CUR)
        pending = self._pending.decode("latin-1")
        self._output.commit({"bytes": size, "pending": pending, "saved": saved, "finished": finished}, {_TEXT: size})

    def finish(self, saved: Mapping[str, object]) -> None:
        """Commit the end of the text."""
        if self._pending:
            self._put(bytes(self._pending))
            self._pending.clear()
        self.save(saved, finished=True)
        self.saved, self.is_finished = saved, True

    def publish(self) -> None:
        """Give the file its final name."""
        if self._fd >= 0:
            self._output.publish(_TEXT)
        else:
            self._output.remove()

    def _put(self, text: bytes) -> None:
        if self.out.name.endswith(".gz"):
            member = gzip_member()
            text = member.compress(text) + member.flush()
        left = memoryview(text)
        with no_space(self.out, RESUME):
            while left:
                left = left[os.write(self._fd, left) :]

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.saved, self.is_finished = state["saved"], state["finished"]
        file = self._output.path / _TEXT
        if self.out.exists():
            if self.is_finished and not file.exists():
                return  # renamed, and killed before the folder was removed
            is_ours = is_object(self.out) and file.exists() and file.stat().st_size == self.out.stat().st_size
            if not (self.is_finished and is_ours):  # uploaded, and killed before the folder was removed
                raise already_exists(self.out)  # another process has just finished it
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.truncate(self._fd, state["bytes"])  # what was written after the last save is written again
        os.lseek(self._fd, 0, os.SEEK_END)
        self._pending += state["pending"].encode("latin-1")


def check_new(out: Path, *, resumable: bool = True) -> None:
    """Refuse, before anything is read, an output that already exists or whose folder does not."""
    if not is_object(out) and not out.absolute().parent.is_dir():
        raise BadSetting(f"{out}: its folder does not exist. Make it: mkdir -p {quoted(out.parent)}")
    folder = partial_folder(out)
    # Killed just before the end. An object is uploaded from its part, which is still there.
    was_published = (folder / _JOURNAL).exists() and (is_object(out) or not (folder / _TEXT).exists())
    if out.exists() and not (resumable and was_published):
        raise already_exists(out)


def _locked_folder(path: Path) -> int:
    """A descriptor of the folder, locked by this process."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not lock(fd, without_locks=True):
            os.close(fd)
            raise StoreExists(f"{path}: another process is writing to it. Wait for it, or choose another output")
        if is_same_file(fd, path):
            return fd
        os.close(fd)  # the process that had it has just finished and removed it


def _array_to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}
    return int(cast(np.integer, value))


def _array_from_json(value: dict[str, Any]) -> object:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(bytearray(base64.b64decode(value["base64"])), value["dtype"])
    return value
