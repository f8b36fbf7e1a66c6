"""One file from one place to another, verified at the target; and whether two files, here or there, are the same."""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.core.bucket import ObjectInfo, upload_part_bytes
from millstream.core.files import publishing, remove_unpublished
from millstream.core.fingerprint import file_crc32c
from millstream.core.record import crc32c
from millstream.core.remote import RemotePath, RemoteStream, open_raw
from millstream.errors import RemoteError

Watch = Callable[[int], object]  # called with the bytes of the file that have arrived

_TRIES = 5
_READ_BYTES = 1 << 20
_RESUME = "What was copied is kept; free some space and run the same command again to resume"
_PARTS = (5 << 20, 16 << 20, 10 << 20, 32 << 20, 64 << 20, 100 << 20, 128 << 20)  # of common tools


class Checksum:
    """The checksum that an etag may be: MD5, also of parts, as object stores give it; SHA of the hub; else none."""

    def __init__(self, info: "ObjectInfo | os.stat_result") -> None:
        etag = ((info.etag if isinstance(info, ObjectInfo) else None) or "").strip('"').lower()
        self._etag, self._part_bytes, self._digests = etag, 0, list[bytes]()
        self.is_certain = False  # whether an etag that differs can only mean other bytes
        self._hash: Any = None
        if re.fullmatch(r"[0-9a-f]{32}", etag):  # but not with some kinds of encryption
            self._hash = hashlib.md5(usedforsecurity=False)
        elif parts := re.fullmatch(r"[0-9a-f]{32}-(\d+)", etag):
            sizes = (upload_part_bytes(info.st_size), *_PARTS)
            self._part_bytes = next((size for size in sizes if -(-info.st_size // size) == int(parts[1])), 0)
            self._hash = hashlib.md5(usedforsecurity=False) if self._part_bytes else None
        elif re.fullmatch(r"[0-9a-f]{64}", etag):
            self._hash, self.is_certain = hashlib.sha256(), True
        elif re.fullmatch(r"[0-9a-f]{40}", etag):  # as git names a file
            self._hash, self.is_certain = hashlib.sha1(b"blob %d\0" % info.st_size, usedforsecurity=False), True
        self._left = self._part_bytes

    @property
    def is_known(self) -> bool:
        return self._hash is not None

    def update(self, data: bytes) -> None:
        while self._part_bytes and len(data) >= self._left:
            self._hash.update(data[: self._left])
            self._digests.append(self._hash.digest())
            data, self._left = data[self._left :], self._part_bytes
            self._hash = hashlib.md5(usedforsecurity=False)
        if self._hash is not None and data:
            self._hash.update(data)
            self._left -= len(data)

    def matches(self) -> bool:
        if self._hash is None or not self._part_bytes:
            return self._hash is not None and self._hash.hexdigest() == self._etag
        digests = [*self._digests, *([self._hash.digest()] if self._left < self._part_bytes else [])]
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False)
        return self._etag == f"{whole.hexdigest()}-{len(digests)}"


def fetch(source: Path, file: Path, *, watch: Watch = lambda done: None) -> None:
    """Copy a file or an object to local disk, with its time, and read it back.

    What comes from a server is compared with its etag; if that is no checksum, the object is fetched until two copies
    are the same.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_unpublished(file)
    before: int | None = None
    for _ in range(_TRIES):
        with suppress(_Differs), publishing(file, _RESUME) as out:
            with open_raw(source) as stream:
                info = stream.info if isinstance(stream, RemoteStream) else os.fstat(stream.fileno())
                checksum, crc, done = Checksum(info), 0, 0
                while data := stream.read(_READ_BYTES):
                    checksum.update(data)
                    crc = crc32c(data, crc)
                    out.write(data)
                    done += len(data)
                    watch(done)
            is_doubtful = isinstance(source, RemotePath) and not checksum.matches()
            if is_doubtful and (checksum.is_certain or crc != before):
                before = crc
                raise _Differs
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not the page cache
            if file_crc32c(Path(out.name)) != crc:
                raise _Differs
            if info.st_mtime_ns:
                os.utime(out.name, ns=(info.st_mtime_ns, info.st_mtime_ns))
            return
    raise RemoteError(f"{source}: arrives different each time. Check the network and the disk, and run it again")


def is_same(a: Path, b: Path) -> bool:
    """Whether two files, local or remote, have the same bytes; reads no more than their etags make necessary."""
    infos: dict[Path, ObjectInfo | os.stat_result] = {path: path.stat() for path in (a, b)}
    if infos[a].st_size != infos[b].st_size:
        return False
    etags = [info.etag if isinstance(info, ObjectInfo) else None for info in infos.values()]
    if etags[0] == etags[1] and Checksum(infos[a]).is_known:
        return True
    for path, other in ((a, b), (b, a)):
        checksum = Checksum(infos[other])
        if checksum.is_known and (not isinstance(path, RemotePath) or isinstance(other, RemotePath)):
            with open_raw(path) as file:
                while data := file.read(_READ_BYTES):
                    checksum.update(data)
            if checksum.matches() or checksum.is_certain:
                return checksum.matches()
    return file_crc32c(a) == file_crc32c(b)


class _Differs(Exception):
    """The copy is not the file."""
