"""What serves remote objects: one client per bucket and process, retries, and failures in one line.

Clients are made on first use in each process, because their threads do not survive a fork. A forked child even loads
obstore again: the threads of the library itself are gone, and any request would wait for ever.
"""

import ctypes
import hashlib
import io
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec, spec_from_loader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from millstream.core.credentials import import_extra, object_store
from millstream.errors import (
    AccessDenied,
    BadSetting,
    MillstreamError,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
)

Result = TypeVar("Result")

URL = re.compile(r"(s3|gs|az|hf|https?):/{1,2}(?=[^/])")
CONNECTIONS = 32  # requests at once
PART_BYTES = 2 << 20  # of one request: 32 of them reach 7 Gbit/s at 30 ms and 50 MB/s per connection
PARTS_HELD = 16  # at most, beside the memory of the callers: 32 MB
_CHUNK_BYTES = 256 << 10  # of a body, copied while it is in the cache of the CPU
MULTIPART_BYTES = 8 << 20  # of one part of an upload; four at once hold 32 MB
_MOST_PARTS = 10_000  # of an upload to S3
_MOST_KNOWN = 1 << 17
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_JITTER = random.Random()  # of its own: what a user's seed gives does not depend on the network
_DENIED = re.compile(
    r"(?i)expired ?token|invalid ?token|invalidaccesskeyid|signaturedoesnotmatch|accessdenied|forbidden"
)
_STATUS = re.compile(r"\bstatus: (\d{3})|\b(4\d\d|5\d\d) [A-Z]")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_METADATA = ("/latest/api/token", "/computeMetadata/", "/metadata/identity")  # asked when nothing else is known
_PASSING = ("408", "425", "429")  # of the statuses below 500


def is_url(path: object) -> bool:
    """Whether a path is a URL of an object store."""
    return URL.match(str(path)) is not None


def refuse_secrets(text: str) -> None:
    """BadSetting if a URL has credentials or a query; they are not repeated."""
    host = re.split(r":/+", text, maxsplit=1)[-1].partition("/")[0]
    if "@" in host or "?" in text:
        raise BadSetting(
            f"{re.sub(r'[?].*|:/+[^/]*@', '...', text)}: URLs are printed and saved, so they must not have credentials "
            "or a query. Set the credentials in the environment"
        )


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size and version of an object."""

    num_bytes: int
    etag: str | None
    modified_ns: int

    @property
    def version(self) -> tuple[int, str | int]:
        """What tells this version of the object from another; a server without etags may tell the time."""
        return self.num_bytes, self.etag or self.modified_ns

    @property
    def st_size(self) -> int:
        return self.num_bytes

    @property
    def st_mtime_ns(self) -> int:
        return self.modified_ns


class Bucket(Protocol):
    """What serves the objects of one root, such as `s3://bucket`, by key."""

    def known(self, key: str) -> ObjectInfo | None:
        """What the last listing or request told of an object."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and version of an object, asked now; raises ObjectMissing."""
        ...

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """A whole object."""
        ...

    def fill(self, key: str, start: int, out: memoryview, etag: str | None = None) -> ObjectInfo:
        """Fill `out` with the bytes of an object from `start` on; ObjectChanged if it has another etag."""
        ...

    def list(self, prefix: str, *, deep: bool = False, most: int | None = None) -> list[tuple[str, ObjectInfo]]:
        """The objects below a prefix, by the rest of their key; unless `deep`, folders as names that end in a slash."""
        ...

    def put(self, key: str, data: bytes | Path, *, is_new: bool = False) -> ObjectInfo:
        """Upload an object whole or not at all, and verify it. With `is_new`, FileExistsError if there is one."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        ...


FOLDER = ObjectInfo(0, None, 0)


class ObjectBucket:
    """A bucket of S3, Google Cloud Storage or Azure, or a web server, by obstore."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._is_web = root.startswith("http")
        self._obstore, stores = _load_obstore(root)
        self._store = object_store(root, stores)
        self._known: dict[str, ObjectInfo] = {}

    def known(self, key: str) -> ObjectInfo | None:
        return self._known.get(key)

    def head(self, key: str) -> ObjectInfo:
        return self._learn(retried(self._url(key), lambda: self._obstore.head(self._store, key)))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        def once() -> tuple[bytes, ObjectInfo]:
            result = self._obstore.get(self._store, key)
            info = self._learn(result.meta)
            data = bytes(result.bytes())  # not obstore's own type, which has no methods of bytes
            _check_length(len(data), info.num_bytes)
            return data, info

        return retried(self._url(key), once)

    def fill(self, key: str, start: int, out: memoryview, etag: str | None = None) -> ObjectInfo:
        # Not `get_ranges`, which takes no etag: a batch could mix two versions of an object.
        options: dict[str, Any] = {"range": (start, start + out.nbytes)} | ({} if etag is None else {"if_match": etag})

        def once() -> ObjectInfo:
            result = self._obstore.get(self._store, key, options=options)
            info = self._learn(result.meta)
            at = 0
            for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                size = len(chunk)
                if at + size <= out.nbytes:
                    out[at : at + size] = memoryview(chunk)
                at += size
            _check_length(at, min(out.nbytes, info.num_bytes - start))
            return info

        return retried(self._url(key), once)

    def list(self, prefix: str, *, deep: bool = False, most: int | None = None) -> list[tuple[str, ObjectInfo]]:
        if self._is_web:  # a web server lists nothing
            return []
        start = len(prefix)

        def once() -> list[tuple[str, ObjectInfo]]:
            if deep or most is not None:
                pages = self._obstore.list(
                    self._store, prefix or None, **({} if most is None else {"chunk_size": most})
                )
                pages = islice(pages, None if most is None else 1)
                return [(meta["path"][start:], self._learn(meta)) for page in pages for meta in page]
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
            folders = [(name[start:].rstrip("/") + "/", FOLDER) for name in found["common_prefixes"]]
            return [*folders, *((meta["path"][start:], self._learn(meta)) for meta in found["objects"])]

        return retried(self._url(prefix), once)

    def put(self, key: str, data: bytes | Path, *, is_new: bool = False) -> ObjectInfo:
        if self._is_web:
            raise RemoteError(f"{self._url(key)}: a web server is read only. Write to s3://, gs:// or az://")
        is_multipart = isinstance(data, Path) and data.stat().st_size > MULTIPART_BYTES
        part = upload_part_bytes(data.stat().st_size) if isinstance(data, Path) else MULTIPART_BYTES
        at_once = max(4 * MULTIPART_BYTES // part, 1)
        options = {"use_multipart": is_multipart, "chunk_size": part, "max_concurrency": at_once}
        mode = "create" if is_new else "overwrite"
        try:
            sent = retried(self._url(key), lambda: self._obstore.put(self._store, key, data, mode=mode, **options))
        except FileExistsError:
            # Perhaps by an attempt of ours whose answer was lost; what is gone by now is not ours.
            with suppress(ObjectMissing, ObjectChanged):
                if self._is_same(key, data):
                    return self.head(key)
            raise
        is_known = str(sent["e_tag"]).strip('"') == _expected_etag(data, part if is_multipart else 0)
        if not is_known and not self._is_as_sent(key, data, _quoted(sent["e_tag"])):
            raise RemoteError(f"{self._url(key)}: differs from what was uploaded. Run the same command again")
        return self.head(key)

    def copy(self, key: str, target: str) -> None:
        """Copy an object within the bucket, without its bytes passing here; the caller verifies it."""
        retried(self._url(key), lambda: self._obstore.copy(self._store, key, target))
        self._known.pop(target, None)

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing):
            retried(self._url(key), lambda: self._obstore.delete(self._store, key))
        self._known.pop(key, None)

    def _url(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _learn(self, meta: Mapping[str, Any]) -> ObjectInfo:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        modified_ns = int(meta["last_modified"].timestamp() * 1e9)
        info = self._known[meta["path"]] = ObjectInfo(meta["size"], _quoted(meta["e_tag"]), modified_ns)
        return info

    def _is_as_sent(self, key: str, data: bytes | Path, etag: str | None) -> bool:
        """Whether the object has these bytes, or another version by now, as a manifest that several writers update."""
        try:
            return self._is_same(key, data) or self.head(key).etag != etag
        except (ObjectMissing, ObjectChanged):
            return True

    def _is_same(self, key: str, data: bytes | Path) -> bool:
        """Whether the object has these bytes; reads it."""
        info = self.head(key)
        with _opened(data) as ours:
            for start in range(0, info.num_bytes, PART_BYTES):
                theirs = bytearray(min(PART_BYTES, info.num_bytes - start))
                self.fill(key, start, memoryview(theirs), info.etag)
                if bytes(theirs) != ours.read(PART_BYTES):
                    return False
            return not ours.read(1)


def retried(url: str, once: Callable[[], Result]) -> Result:
    """Call until it succeeds, fails for good, or has failed for MILLSTREAM_PATIENCE seconds; errors are ours."""
    patience_s = float(os.environ.get("MILLSTREAM_PATIENCE", "60"))
    deadline = 0.0
    wait = _FIRST_WAIT_S
    while True:
        try:
            return once()
        except Exception as error:
            if (final := _final_error(url, error)) is not None:
                raise final from None
            deadline = deadline or time.monotonic() + patience_s  # an answer may take longer than that
            is_over = not threading.main_thread().is_alive()  # Ctrl-C: the process waits for this thread
            if is_over or time.monotonic() + wait > deadline:
                raise RemoteError(
                    f"{url}: no complete answer in {patience_s:g} s ({_reason(str(error))}). Check the network and "
                    "the endpoint, and run the same command again"
                ) from None
        time.sleep(wait * _JITTER.uniform(0.5, 1.5))
        wait = min(2 * wait, _LONGEST_WAIT_S)


class IncompleteBody(Exception):
    """The body of an answer has another length than announced."""


def _check_length(arrived: int, size: int) -> None:
    if arrived != size:
        raise IncompleteBody(f"{arrived} of {size} bytes arrived")


def _final_error(url: str, error: Exception) -> Exception | None:
    """What to raise for a failure that trying again would not mend."""
    if isinstance(error, MillstreamError):
        return error
    name, text = type(error).__name__, str(error)
    if "NoSuchUpload" in text:  # complete since an attempt whose answer was lost, or aborted: upload again
        return None
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        what = "no such bucket" if "NoSuchBucket" in text else "no such object"
        return ObjectMissing(f"{url}: {what}")
    if name == "AlreadyExistsError" or isinstance(error, FileExistsError):
        return FileExistsError(f"{url}: already exists")
    if name == "PreconditionError":
        return ObjectChanged(f"{url}: was replaced")
    if any(place in text for place in _METADATA):
        return AccessDenied(f"{url}: no credentials found. Set them in the environment, as docs/how-to/remote.md shows")
    denied = _DENIED.search(text)
    if denied or name in ("PermissionDeniedError", "UnauthenticatedError") or isinstance(error, PermissionError):
        code = _CODE.search(text)
        reason = code[1] if code else denied[0] if denied else "access denied"
        return AccessDenied(
            f"{url}: refused by the server ({reason}). Check or renew the credentials in the environment"
        )
    status = next((a or b for a, b in _STATUS.findall(text)), "")
    is_passing = name in ("GenericError", "JoinError", "IncompleteBody") or isinstance(error, OSError)
    if not is_passing or (status.startswith("4") and status not in _PASSING):
        return RemoteError(f"{url}: refused by the server ({_reason(text)})")
    return None


def _reason(text: str) -> str:
    """What the server, or else obstore, tells of a failure; nothing of the request, which can hold credentials."""
    if code := _CODE.search(text):
        return code[1]
    causes = {
        "dns error": "the name of the server cannot be resolved",
        "timed out": "timed out",
        "TimedOut": "timed out",
    }
    cause = next((words for mark, words in causes.items() if mark in text), None)
    told = cause or next(iter(re.findall(r'message: "([^"]+)"', text)), None) or text.partition("\n")[0]
    told = told.rpartition(" - ")[2].strip(" :")
    return re.sub(r"//[^/@\s]*@", "//", re.sub(r"\?[^\s)\"']*", "", told))[:120] or "unknown"


def _load_obstore(root: str) -> tuple[Any, Any]:
    """The modules `obstore` and `obstore.store` of this process."""
    module = import_extra("obstore", root)
    here = _here()
    if here.is_forked and here.obstore is None:
        # dlopen returns a library that is loaded already, unless it is another file: 15 MB, in memory only.
        library = Path(module._obstore.__file__).read_bytes()
        file = os.memfd_create("obstore")
        with open(file, "wb", closefd=False) as copy:
            copy.write(library)
        loader = ExtensionFileLoader("obstore._obstore", f"/dev/fd/{file}")
        before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "obstore"}
        try:
            native = module_from_spec(cast(ModuleSpec, spec_from_loader("obstore._obstore", loader)))
            loader.exec_module(native)
            sys.modules["obstore._obstore"] = native
            here.obstore = import_module("obstore"), import_module("obstore.store")
        finally:
            os.close(file)
            sys.modules.update(before)
    return here.obstore or (module, import_module("obstore.store"))


def _quoted(etag: str | None) -> str | None:
    """An etag as conditions take it: listings of Azure have none of its quotes."""
    return f'"{etag}"' if etag and '"' not in etag else etag


def upload_part_bytes(num_bytes: int) -> int:
    """The size of the parts in which a file is uploaded: servers take a limited number of parts."""
    part = MULTIPART_BYTES
    while part * _MOST_PARTS < num_bytes:
        part *= 2
    return part


def _expected_etag(data: bytes | Path, part_bytes: int) -> str:
    """What S3 answers for these bytes: their MD5, or the MD5 of the MD5s of their parts."""
    parts: list[bytes] = []
    whole = hashlib.md5(usedforsecurity=False)
    with _opened(data) as file:
        while part := file.read(part_bytes or MULTIPART_BYTES):
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    if not part_bytes:
        return whole.hexdigest()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _opened(data: bytes | Path) -> BinaryIO:
    return data.open("rb") if isinstance(data, Path) else io.BytesIO(data)


class _Process:
    """The clients and request threads of one process."""

    def __init__(self, *, is_forked: bool = False) -> None:
        self.pid = os.getpid()
        self.is_forked = is_forked  # from a process that has made requests
        self.obstore: tuple[Any, Any] | None = None
        self.lock = threading.Lock()
        self.buckets: dict[str, Bucket] = {}
        self.pool: ThreadPoolExecutor | None = None
        self.held = threading.BoundedSemaphore(PARTS_HELD)


_process = _Process()


def _here() -> _Process:
    """Those of this process: after a fork, clients, threads and locks belong to the parent."""
    global _process
    if _process.pid != os.getpid():
        # Never freed: closing its connections here would take them from the event queue that the parent still uses.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_process))
        _process = _Process(is_forked=_process.is_forked or bool(_process.buckets))
    return _process


def bucket_at(root: str, make: Callable[[str], Bucket] = ObjectBucket) -> Bucket:
    """The client of a root, in this process."""
    here = _here()
    with here.lock:
        if root not in here.buckets:
            here.buckets[root] = make(root)
        return here.buckets[root]


def request_threads() -> ThreadPoolExecutor:
    """The threads that wait for answers, in this process."""
    here = _here()
    with here.lock:
        if here.pool is None:
            here.pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="millstream-remote")
        return here.pool


def holding_a_part() -> threading.BoundedSemaphore:
    """Hold a part of PART_BYTES within the block; in this process, at most PARTS_HELD do."""
    return _here().held
