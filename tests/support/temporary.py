"""Where tests have their temporary files: in memory, if there is room, or on the disk that they had without this.

On ext4 a tenth of a run goes into looking for inodes that were not freed in the last five seconds, of which tests have
many. Files in memory have no page cache that could lack them, so what reads from a cold disk in another way is
tested on one: such tests are marked `on_disk`.
"""

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

ROOM = 4 << 30  # free in memory and in the folder; a run takes less than a fourth of it
_SHARED = Path("/dev/shm")
_NAME = "millstream-tests-"
_DISK = "MILLSTREAM_TESTS_DISK"  # for the other processes of this run


def use_memory() -> None:
    """Let this process and those it starts have temporary files in memory, which go when it ends.

    A TMPDIR that is set stays.
    """
    if {"TMPDIR", _DISK} & os.environ.keys() or not _has_room():
        return
    _remove_left()
    folder = _SHARED / f"{_NAME}{os.getpid()}"
    folder.mkdir(mode=0o700)
    os.environ[_DISK], os.environ["TMPDIR"] = tempfile.gettempdir(), str(folder)
    tempfile.tempdir = None
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-1000)  # after the folders of multiprocessing


def disk() -> Path:
    return Path(os.environ.get(_DISK) or tempfile.gettempdir())


def _has_room() -> bool:
    try:
        there = os.statvfs(_SHARED)
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return False
    return os.access(_SHARED, os.W_OK) and min(there.f_bavail * there.f_frsize, available - ROOM) >= ROOM


def _remove_left() -> None:
    """What killed runs have left."""
    for folder in _SHARED.glob(f"{_NAME}*"):
        if not Path("/proc", folder.name.removeprefix(_NAME)).exists():
            shutil.rmtree(folder, ignore_errors=True)
