"""Files and folders that appear complete or not at all, written by one process at a time. Knows no kind of record.

Publishing is: a hidden temporary name, fsync, rename. The final name always holds the old bytes or all of the new ones,
even after kill -9 or a power cut. A lock is the kernel's flock, which ends with the process that holds it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

try:
    from isal import isal_zlib as _zlib  # six times faster
except ImportError:
    import zlib as _zlib

from millstream.errors import StoreExists, StoreFull

if TYPE_CHECKING:
    import pyarrow as pa

Write = Callable[[bytes | memoryview], object]
NOTHING_LEFT = "Nothing was left behind; free some space, or choose another path"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OLD_KEPT = "The previous file is kept; free some space and run the same command again"
_GZIP_LEVEL = 2
_SIZES = "millstream.json"  # in a folder made by `make_once`: the size of every file, written last


def cache_folder() -> Path:
    """The cache folder: `$XDG_CACHE_HOME/millstream`, or `~/.cache/millstream`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"


# -- publishing a file


def publish(file: Path, data: bytes, advice: str = _OLD_KEPT) -> None:
    """Write a file so that its name always holds either the old bytes or all of the new ones, even after a crash."""
    with publishing(file, advice) as f:
        f.write(data)


@contextmanager
def publishing(file: Path, advice: str = _OLD_KEPT) -> Generator[BinaryIO]:
    """The same for a file written in pieces: it gets its name when the block ends.

    >>> with publishing(Path("labels.parquet")) as file:
    ...     pq.write_table(table, file)
    """
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with no_space(file, advice), open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish_json(file: Path, value: object) -> None:
    publish(file, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def publish_table(file: Path, table: "pa.Table", advice: str = _OLD_KEPT) -> None:
    """A Parquet file."""
    import pyarrow.parquet as pq

    with publishing(file, advice) as f:
        pq.write_table(table, f, compression="zstd")


@contextmanager
def publishing_text(out: Path) -> Generator[Write]:
    """Write a new text file in pieces, gzipped if its name ends in .gz."""
    if out.exists():
        raise already_there(out)
    with publishing(out, NOTHING_LEFT) as file:
        if out.name.endswith(".gz"):
            deflate = gzip_member()
            yield lambda text: file.write(deflate.compress(text))
            file.write(deflate.flush())
        else:
            yield file.write
    sync_folder(out.parent)


def gzip_member() -> Any:
    """A compressor that writes one gzip member."""
    return cast(Any, _zlib).compressobj(_GZIP_LEVEL, 8, 31)


def already_there(out: Path) -> StoreExists:
    return StoreExists(f"{out}: already there. Choose another name, or remove it")


def remove_unpublished(file: Path) -> None:
    """Remove what a killed process left while publishing this file. No other process may be publishing it now."""
    pattern = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{12}}\.tmp")
    for name in os.listdir(file.parent):
        if pattern.fullmatch(name):
            (file.parent / name).unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that a rename survives a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
    """A hidden folder to fill; it is renamed to `folder`, which is new or empty, when the block ends."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            sync_folder(path)  # fsync works the same for files
        os.rename(partial, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        sizes: dict[str, int] = json.loads((folder / _SIZES).read_text())["num_bytes"]
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


def lock(fd: int, *, wait: bool = False, without_locks: bool) -> bool:
    """Lock an open file or folder until it is closed; False when another process holds it.

    The kernel releases the lock when the process dies. `without_locks` is returned on a file system without locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def is_same_file(fd: int, path: Path) -> bool:
    """Whether a path is still the opened file: it may have been removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
