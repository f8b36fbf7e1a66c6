"""A folder that is made once and kept in the user's cache: whole or not there, and made by one process at a time."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_SIZES = "millstream.json"  # size of every file, written last


def make_once(folder: Path, make: Callable[[Path], None], *, notify: Callable[[str], None]) -> Path:
    """The folder, filled by `make` unless it is there and whole; who comes second waits, and finds it there."""
    if not is_complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, notify):
            if not is_complete(folder):
                publish(folder, make)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file that was published is still there in its full length."""
    try:
        sizes: dict[str, int] = json.loads((folder / _SIZES).read_text())["num_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder under a name nobody looks for, sizes last, then rename: what was killed is never believed."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        make(partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / _SIZES).write_text(json.dumps({"num_bytes": sizes}, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # there, but incomplete
        os.rename(partial, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone(folder: Path, notify: Callable[[str], None]) -> Generator[None]:
    """One process at a time; the system drops the lock when the process dies, however it dies."""
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"waiting for another process that makes {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
