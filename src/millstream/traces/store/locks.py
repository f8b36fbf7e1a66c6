"""Who may change a store: any number of writers and copiers, or one process that rewrites it; one job at a time.

A lock is the kernel's flock, which ends with the process. Readers take none.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.core.console import quoted
from millstream.core.files import is_same_file, lock, unlock
from millstream.core.remote import is_url, spool_folder
from millstream.errors import StoreError, StoreExists

JOB = ".lock"
WAIT_S = 60.0  # the workers of a killed run may take some seconds to exit


class StoreLock:
    """Locks the folder of a store until released: shared by writers and whoever copies it, or exclusive, to rewrite it.

    Read the state of the store after taking the lock. Raises StoreError if others keep it locked for `wait_s` seconds.
    Shards in an object store are never rewritten: a URL needs no shared lock, and gets no exclusive one.
    """

    def __init__(self, path: Path, *, exclusive: bool, wait_s: float = WAIT_S) -> None:
        self._fd = -1
        if is_url(path):
            if exclusive:
                raise StoreError(
                    f"{path}: shards in an object store are never rewritten. Copy it, change the copy, and copy that "
                    f"to a new URL: millstream copy {quoted(path)} FOLDER"
                )
            return
        what = "a writer or another command is using it" if exclusive else "it is being repaired or rewritten"
        self._pid = os.getpid()
        self._fd = _locked(path, f"{path}: {what}", exclusive=exclusive, wait_s=wait_s)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if os.getpid() == self._pid:
                unlock(fd)
            os.close(fd)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.release()


@contextmanager
def only_job(path: Path, *, wait_s: float = WAIT_S) -> Generator[None]:
    """No other job (extract, featurize, convert, repair) runs on the store: two would do the same work twice.

    The folder is created if necessary, and removed again if the job leaves it empty. The lock of a URL is in its spool:
    it excludes jobs on this machine.
    """
    name, path = path, spool_folder(path)
    is_new = not path.exists()
    fd = _locked(path / JOB, f"{name}: another process is working on it", exclusive=True, wait_s=wait_s)
    try:
        yield
    finally:
        (path / JOB).unlink(missing_ok=True)  # before it is unlocked
        os.close(fd)
        if is_new:
            with suppress(OSError):  # not empty
                path.rmdir()


def _locked(path: Path, busy: str, *, exclusive: bool, wait_s: float) -> int:
    """The descriptor of a store's folder, or of a file in it, locked; the folder is created if necessary."""
    until = time.monotonic() + wait_s
    while True:
        folder = path.parent if path.name == JOB else path
        if folder.exists() and not folder.is_dir():
            raise StoreExists(f"{folder}: a file, not a folder. Write to a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the process that had it has just removed the empty folder
            continue
        is_free = lock(fd, shared=not exclusive, without_locks=True)
        if is_free and is_same_file(fd, path):
            return fd
        os.close(fd)
        if is_free:
            continue
        if time.monotonic() >= until:
            raise StoreError(f"{busy}. Wait for it to finish, or stop it, and run this again")
        time.sleep(0.02)
