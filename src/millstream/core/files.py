"""Files that appear complete or not at all, written by one process at a time; long outputs that survive kill -9.

Publishing is: a hidden temporary name, fsync, rename. The final name always holds the old bytes or all of the new ones,
even after kill -9 or a power cut. A lock is the kernel's flock, which ends with the process that holds it.
"""

import errno
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, cast

from millstream.core.bucket import is_url
from millstream.core.config import parse_json
from millstream.errors import StoreExists, StoreFull

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
    if is_url(file):
        file.write_bytes(data)
        return
    with publishing(file, advice) as f:
        f.write(data)


@contextmanager
def publishing(file: Path, advice: str = _OLD_KEPT) -> Generator[BinaryIO]:
    """The same for a file written in pieces: it gets its name when the block ends. An object is uploaded then."""
    if is_url(file):
        with no_space(spool_root(), advice), tempfile.NamedTemporaryFile(dir=spool_root()) as f:
            yield cast(BinaryIO, f)
            f.flush()
            cast(Any, file).put(Path(f.name))
        return
    check_replaceable(file)
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


def is_device(path: Path) -> bool:
    """Whether this is a device or a pipe, such as /dev/null or /dev/stdin, even one that leads to a file."""
    if is_url(path):
        return False
    parts = Path(os.path.abspath(path)).parts
    if parts[1:2] in (("dev",), ("proc",)) and parts[2:3] != ("shm",):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def check_replaceable(out: Path) -> None:
    """Refuse to replace a device by a file: all programs use /dev/null."""
    if is_device(out):
        raise already_exists(out)


def already_exists(out: Path) -> StoreExists:
    if is_device(out):
        return StoreExists(f"{out}: a device or a pipe. Choose a file, or - if the command can write to stdout")
    return StoreExists(f"{out}: already exists. Choose another name, or remove it")


def remove_unpublished(file: Path) -> None:
    """Remove what a killed process left while publishing this file. No other process may be publishing it now."""
    if is_url(file):
        return
    for temporary in file.parent.glob(f".{escape(file.name)}.{'[0-9a-f]' * 12}.tmp"):
        temporary.unlink()


def spool_root() -> Path:
    """Where objects are made before they are uploaded: `$MILLSTREAM_SPOOL_DIR`, or a folder of the cache folder."""
    folder = Path(os.environ.get("MILLSTREAM_SPOOL_DIR") or cache_folder() / "spool").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that a rename survives a power cut."""
    if is_url(path):
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
    fd = locked_folder(partial)
    try:
        for path in partial.iterdir():  # left by a killed process
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield partial
        for path in partial.iterdir():
            sync_folder(path)  # fsync works the same for files
        rename_folder(partial, folder)
    finally:
        if is_same_file(fd, partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(fd)


def rename_folder(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, which is new or that of an empty folder."""
    sync_folder(partial)
    try:
        os.rename(partial, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise already_exists(folder) from None
    sync_folder(folder.parent)


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


def locked_folder(path: Path) -> int:
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


def move_into_place(part: Path, out: Path) -> None:
    """Give a file that is complete, and on disk, its final name."""
    os.rename(part, out)
    sync_folder(out.parent)
