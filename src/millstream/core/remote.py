"""Paths that are URLs, and exact byte ranges of many objects at once. Knows no kind of record.

    path = to_path("s3://bucket/traces/")          # a Path: path / name, path.iterdir(), path.read_bytes()
    file = RemoteFile(path / "shard-00000.arrow")  # one version of one object
    read_all([(file, 4096, out)])                  # many ranges of many objects, through the block cache

A `RemotePath` is not a file on this machine: whatever tries to open it as one raises an error that says what to do.
"""

import hashlib
import io
import os
import shutil
import tempfile
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PosixPath
from typing import Any, Self

from millstream.core.block_cache import block_cache
from millstream.core.bucket import (
    CONNECTIONS,
    PART_BYTES,
    Bucket,
    ObjectBucket,
    ObjectInfo,
    bucket_at,
    holding_a_part,
    is_url,
    refuse_secrets,
    request_threads,
)
from millstream.core.files import spool_root
from millstream.core.hub import HubBucket
from millstream.core.memory import Map, limit_arenas
from millstream.core.record import Bytes
from millstream.errors import BadSetting, ObjectChanged, ObjectMissing, RemoteError

Wanted = tuple["RemoteFile", int, memoryview]  # an object, where to start, what to fill

_PARTS_AHEAD = 6  # of a stream: 12 MB
_FIRST_BYTES = 64 << 10
_WASTE = 0.15  # neighbouring ranges are one request while it fetches at most this share of unwanted bytes


def to_path(path: str | Path) -> Path:
    """A local path, or a `RemotePath` for a URL."""
    if isinstance(path, RemotePath) or not is_url(path):
        return Path(path) if isinstance(path, str) else path
    text = str(path)
    refuse_secrets(text)
    return RemotePath(text)


class RemotePath(PosixPath):
    """A URL with the interface of a Path, as far as objects have one: a folder is a common prefix of names."""

    def __str__(self) -> str:
        scheme, *names = self.parts
        return f"{scheme}//{'/'.join(names)}"

    def __fspath__(self) -> str:
        raise RemoteError(f"{self}: only a local path works here. Copy it first: millstream copy {self} TARGET")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str, ...]]:
        return type(self), self.parts

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def bucket_url(self) -> str:
        """What one client serves: the bucket, or the host."""
        depth = 4 if self.scheme == "hf" else 2  # hf://datasets/OWNER/NAME
        if len(self.parts) < depth:
            raise BadSetting(
                f"{self}: incomplete. Expected hf://datasets/OWNER/NAME" if depth == 4 else f"{self}: no bucket"
            )
        return f"{self.parts[0]}//{'/'.join(self.parts[1:depth])}"

    @property
    def key(self) -> str:
        """The name of the object in its bucket."""
        return "/".join(self.parts[4 if self.scheme == "hf" else 2 :])

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    @property
    def bucket(self) -> "Bucket":
        limit_arenas()  # before there are threads
        return bucket_at(self.bucket_url, HubBucket if self.scheme == "hf" else ObjectBucket)

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:
        return self

    def expanduser(self) -> Self:
        return self

    def is_absolute(self) -> bool:
        return True

    def info(self) -> "ObjectInfo":
        """Size and version of the object, asked now; raises ObjectMissing."""
        return self.bucket.head(self.key)

    def stat(self, *, follow_symlinks: bool = True) -> "ObjectInfo":  # type: ignore[override]
        return self.info()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return bool(self.key and self.info())
        except ObjectMissing:
            return False

    def is_dir(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return bool(self.bucket.list(self._prefix, most=1))

    def entries(self) -> "dict[str, ObjectInfo]":
        """The objects directly in this folder, by name."""
        return {name: info for name, info in self.bucket.list(self._prefix) if "/" not in name}

    def walk_files(self) -> "dict[str, ObjectInfo]":
        """All objects below this folder, by their name relative to it."""
        return dict(self.bucket.list(self._prefix, deep=True))

    def iterdir(self) -> Generator[Self]:
        for name in sorted(name.rstrip("/") for name, _ in self.bucket.list(self._prefix)):
            yield self / name

    def glob(self, pattern: str, **_: object) -> Generator[Self]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The entries of this folder whose name matches."""
        if "/" in pattern:
            raise RemoteError(f"{self}: patterns are for names in one folder, not {pattern!r}")
        yield from (entry for entry in self.iterdir() if entry.match(pattern))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders need not be made."""

    def read_bytes(self) -> bytes:
        return self.bucket.get(self.key)[0]

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The object as a file to read."""
        if mode not in ("r", "rt", "rb"):
            raise RemoteError(f"{self}: cannot be opened for writing (mode {mode!r})")
        raw = io.BufferedReader(RawObject(RemoteFile(self)), PART_BYTES)
        if mode == "rb":
            return raw
        return io.TextIOWrapper(raw, options.get("encoding") or "utf-8", newline=options.get("newline"))

    def write_bytes(self, data: Any) -> int:
        self.put(bytes(data))
        return len(data)

    def write_text(self, data: str, *args: Any, **options: Any) -> int:
        return self.write_bytes(data.encode())

    def put(self, data: bytes | Path, *, is_new: bool = False) -> "ObjectInfo":
        """Upload an object whole or not at all, and verify it. With `is_new`, FileExistsError if there is one."""
        return self.bucket.put(self.key, data, is_new=is_new)

    def unlink(self, missing_ok: bool = False) -> None:
        self.bucket.delete(self.key)


def spool_folder(path: Path) -> Path:
    """Where what belongs to a path is written: a local path itself; for a URL, a folder to upload from."""
    path = to_path(path)
    if not isinstance(path, RemotePath):
        return path
    return spool_root() / f"{path.name[:40]}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


# -- reading ranges


class RemoteFile:
    """One version of one object, open for reading ranges. Opening it asks nothing that is known from a listing."""

    def __init__(self, path: RemotePath, *, align: int = 1, known: ObjectInfo | None = None) -> None:
        """Ranges are fetched, and cached, in multiples of `align` bytes. `known`: read this version, or none."""
        self.path = path
        self.align = align
        self._info = known
        self._is_confirmed = known is not None  # has the server given bytes of this version?
        self._cache_id: str | None = None

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            self._info = self.path.bucket.known(self.path.key) or self.path.info()
        return self._info

    @property
    def num_bytes(self) -> int:
        return self.info.num_bytes

    @property
    def cache_id(self) -> str:
        """Names this version of the object in the block cache; empty if the server tells no version."""
        if self._cache_id is None:
            text = f"{self.path}\0{self.info.etag}\0{self.num_bytes}"
            self._cache_id = hashlib.sha256(text.encode()).hexdigest()[:40] if self.info.etag else ""
        return self._cache_id

    def read(self, start: int, count: int) -> bytes:
        """The bytes of one range, up to the end of the object."""
        out = bytearray(max(min(count, self.num_bytes - start), 0))
        if out:
            read_all([(self, start, memoryview(out))])
        return bytes(out)

    def fill(self, start: int, out: memoryview) -> None:
        """One request, retried; ObjectChanged if the object is another one by now."""
        for attempt in (1, 2):
            try:
                info = self.path.bucket.fill(self.path.key, start, out, self.info.etag)
                if info.version != self.info.version:
                    raise ObjectChanged(str(self.path))
                self._is_confirmed = True
                return
            except ObjectChanged:
                if self._is_confirmed or attempt == 2:
                    raise ObjectChanged(
                        f"{self.path}: was replaced while it was being read. Open it again, or start over"
                    ) from None
                self._info, self._cache_id = self.path.info(), None  # what a listing told is out of date
                if self.num_bytes < start + out.nbytes:
                    raise ObjectChanged(f"{self.path}: was replaced by a shorter object. Open it again") from None

    def part(self, start: int, end: int) -> memoryview:
        """One request, into memory of its own."""
        out = memoryview(bytearray(end - start))
        self.fill(start, out)
        return out


def read_all(wanted: Sequence[Wanted], *, is_checked: bool = False, fresh: bool = False) -> None:
    """Fill all ranges, from the block cache or with concurrent requests.

    `is_checked`: the caller verifies checksums of its own, so those of the cache are not verified, and on a mismatch
    reads again with `fresh`, which ignores and replaces what is cached.
    """
    cache = block_cache()
    missing: dict[RemoteFile, list[tuple[int, int]]] = defaultdict(list)
    places_of: dict[RemoteFile, list[tuple[int, memoryview]]] = defaultdict(list)
    for file, start, out in wanted:
        gaps = [(start, start + out.nbytes)]
        if cache is not None and file.cache_id:
            if fresh:
                cache.forget(file.cache_id, start, start + out.nbytes)
            else:
                gaps = cache.read(file.cache_id, start, out, verify=not is_checked)
        if gaps:
            places_of[file].append((start, out))
            missing[file] += gaps
    if not missing:
        return

    targets = {file: _Targets(places) for file, places in places_of.items()}

    def fetch(file: RemoteFile, start: int, end: int) -> None:
        """In a thread, straight to where all of it is wanted, or else through memory of its own."""
        places = targets[file].within(start, end)
        whole = next((out[start - at : end - at] for at, out in places if at <= start and end <= at + out.nbytes), None)
        if whole is not None and len(places) == 1:
            file.fill(start, whole)
            keep(file, start, whole)
        else:
            with holding_a_part():
                data = file.part(start, end)
                for at, out in places:
                    low, high = max(at, start), min(at + out.nbytes, end)
                    out[low - at : high - at] = data[low - start : high - start]
                keep(file, start, data)

    def keep(file: RemoteFile, start: int, data: memoryview) -> None:
        if cache is not None and file.cache_id:
            cache.write(file.cache_id, start, data)

    pool = request_threads()
    parts = [(file, *part) for file, gaps in missing.items() for part in _requests(gaps, file.align, file.num_bytes)]
    jobs = deque[Future[None]]()
    try:
        for part in parts:
            if len(jobs) == _at_once.get():
                jobs.popleft().result()
            jobs.append(pool.submit(fetch, *part))
        while jobs:
            jobs.popleft().result()
    except BaseException as error:
        for job in jobs:
            job.cancel()
        if isinstance(error, Exception):  # Ctrl-C does not wait for the network
            wait(jobs)  # they write to memory that the caller may use again
        raise


_at_once: ContextVar[int] = ContextVar("requests at once", default=CONNECTIONS)


@contextmanager
def requests_at_once(limit: int) -> Generator[None]:
    """Send at most so many requests at once in this thread: what arrives takes memory beside where it goes."""
    token = _at_once.set(limit)
    try:
        yield
    finally:
        _at_once.reset(token)


def read_object(path: Path, *, is_intact: Callable[[bytes], bool] = lambda data: True) -> bytes:
    """A whole file; a remote one from the block cache, or fetched again if what is cached is not intact."""
    if not isinstance(path, RemotePath):
        return path.read_bytes()
    file = RemoteFile(path)
    out = bytearray(file.num_bytes)
    for fresh in (False, True):
        if out:
            read_all([(file, 0, memoryview(out))], fresh=fresh)
        data = bytes(out)
        if is_intact(data):
            break
    return data


def _requests(gaps: Iterable[tuple[int, int]], align: int, num_bytes: int) -> list[tuple[int, int]]:
    """Ranges to request: aligned, neighbours joined, long ones cut."""
    runs: list[list[int]] = []  # start, end, wanted bytes
    for start, end in sorted(gaps):
        start, end = start // align * align, min(-(-end // align) * align, num_bytes)
        if runs and start <= runs[-1][1]:
            runs[-1][2] += max(end - runs[-1][1], 0)
            runs[-1][1] = max(runs[-1][1], end)
        elif runs and end - runs[-1][0] <= (runs[-1][2] + end - start) * (1 + _WASTE):
            runs[-1][2] += end - start
            runs[-1][1] = end
        else:
            runs.append([start, end, end - start])
    return [(at, min(at + PART_BYTES, end)) for start, end, _ in runs for at in range(start, end, PART_BYTES)]


class _Targets:
    """The memory to fill with ranges of one object."""

    def __init__(self, targets: Iterable[tuple[int, memoryview]]) -> None:
        self._targets = sorted(targets, key=_start_of)
        self._longest = max(out.nbytes for _, out in self._targets)

    def within(self, start: int, end: int) -> list[tuple[int, memoryview]]:
        """Those that want some of a range."""
        low, high = (bisect_left(self._targets, at, key=_start_of) for at in (start - self._longest, end))
        return [(at, out) for at, out in self._targets[low:high] if at + out.nbytes > start]


def _start_of(target: tuple[int, memoryview]) -> int:
    return target[0]


class RemoteStream(io.RawIOBase):
    """An object from its start to its end, the next parts on their way. It is not cached: it may be of any size."""

    def __init__(self, path: RemotePath, *, known: ObjectInfo | None = None) -> None:
        self._file = RemoteFile(path, known=known or path.info())
        self._asked = 0  # bytes that were requested so far
        self._coming: deque[Future[memoryview]] = deque()
        self._left = memoryview(b"")

    @property
    def info(self) -> ObjectInfo:
        return self._file.info

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left.nbytes:
            is_first = not self._asked  # to recognise a file takes less than a part
            for _ in range(1 if is_first else _PARTS_AHEAD - len(self._coming)):
                start, end = self._asked, min(self._asked + (_FIRST_BYTES if is_first else PART_BYTES), self.num_bytes)
                if start < end:
                    self._coming.append(request_threads().submit(self._file.part, start, end))
                    self._asked = end
            if not self._coming:
                return 0
            self._left = self._coming.popleft().result()
        out = memoryview(buffer).cast("B")
        count = min(out.nbytes, self._left.nbytes)
        out[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def close(self) -> None:
        while self._coming:
            self._coming.popleft().cancel()
        super().close()


def open_raw(path: Path) -> io.RawIOBase:
    """A file or an object, for reading it once from its start."""
    return RemoteStream(path) if isinstance(path, RemotePath) else io.FileIO(path)


def read_range(path: Path, start: int, count: int) -> bytes:
    """One range of a file or an object, up to its end."""
    if isinstance(path, RemotePath):
        return RemoteFile(path).read(start, count)
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), count, start)


def mapped(path: Path) -> Bytes:
    """The bytes of a file, to go through once; of an object, in a copy on disk that is gone with them."""
    if not isinstance(path, RemotePath):
        return Map(path, sequential=True).view
    with tempfile.NamedTemporaryFile(dir=spool_root()) as copy, open_raw(path) as source:
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        return Map(Path(copy.name), sequential=True).view


class RawObject(io.RawIOBase):
    """An object as a raw file; io.BufferedReader makes large requests of small reads."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.num_bytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self._bytes(self._at, out.nbytes)
        out[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _bytes(self, start: int, count: int) -> bytes | memoryview:
        return self._file.read(start, count)
