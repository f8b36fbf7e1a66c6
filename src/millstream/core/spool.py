"""What is on its way to an object store: a folder on this machine for each URL that is written to.

Everything is written there first and uploaded in the background, so that kill -9 loses no more than on a local disk;
the same command finishes the uploads.
"""

import hashlib
from pathlib import Path

from millstream.core.files import spool_root
from millstream.core.remote import RemotePath, to_path


def spool_folder(path: Path) -> Path:
    """Where what belongs to a path is written: a local path itself; for a URL, its folder in the spool.

    The spool is `core/files.py:spool_root`.
    """
    path = to_path(path)
    if not isinstance(path, RemotePath):
        return path
    return spool_root() / f"{path.name[:40]}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
