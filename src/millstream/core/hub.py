"""Datasets of the Hugging Face hub as objects: read one commit by ranges, write by commits. By huggingface_hub.

A process reads the commit that `hf://datasets/OWNER/NAME` is at when it first looks, or that of `NAME@REVISION`: a
dataset that changes while it is read never mixes two versions.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from millstream.core.bucket import FOLDER, IncompleteBody, ObjectInfo, Result, retried
from millstream.core.credentials import import_extra
from millstream.errors import AccessDenied, BadSetting, ObjectChanged, ObjectMissing, RemoteError

_REDIRECT_S = 300.0  # the hub signs the address of a large file for an hour; asking it each time would double requests
_MOST_REDIRECTS = 5


class HubBucket:
    """The files of one dataset, at one commit."""

    def __init__(self, root: str) -> None:
        self._root = root
        _, kind, owner, name = root.replace("//", "/").split("/")
        if kind != "datasets":
            raise BadSetting(f"{root}: must be a dataset, hf://datasets/OWNER/NAME")
        name, _, revision = name.partition("@")
        self._id, self._revision = f"{owner}/{name}", unquote(revision) or None
        self._hub = import_extra("huggingface_hub", root)
        self._errors = import_extra("huggingface_hub.errors", root)
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self._api = self._hub.HfApi(endpoint=endpoint, library_name="millstream")
        self._lock = threading.Lock()
        self._forget()

    def known(self, key: str) -> ObjectInfo | None:
        return self._known.get(key)

    def head(self, key: str) -> ObjectInfo:
        if key not in self._known:
            self._learn(
                self._call(
                    key, lambda: self._api.get_paths_info(self._id, [key], revision=self._commit, repo_type="dataset")
                )
            )
        if key not in self._known:
            raise ObjectMissing(f"{self._root}/{key}: no such file in the dataset")
        return self._known[key]

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        info = self.head(key)
        out = bytearray(info.num_bytes)
        self.fill(key, 0, memoryview(out))
        return bytes(out), info

    def fill(self, key: str, start: int, out: memoryview, etag: str | None = None) -> ObjectInfo:
        info = self.head(key)
        if etag is not None and etag != info.etag:
            raise ObjectChanged(f"{self._root}/{key}: was replaced")
        if out.nbytes:
            out[:] = self._call(key, lambda: self._fetch(key, start, out.nbytes))
        return info

    def list(self, prefix: str, *, deep: bool = False, most: int | None = None) -> list[tuple[str, ObjectInfo]]:
        folder = prefix.rstrip("/")
        listing = (folder, deep)
        if listing not in self._listings:
            try:
                found = self._call(prefix, lambda: self._tree(folder, deep))
            except ObjectMissing:
                self._require()  # the dataset is there; the folder is not
                found = []
            self._learn(found)
            start = len(prefix)
            self._listings[listing] = [
                (entry.path[start:], self._known[entry.path])
                if isinstance(entry, self._hub.hf_api.RepoFile)
                else (f"{entry.path[start:]}/", FOLDER)
                for entry in found
                if not deep or isinstance(entry, self._hub.hf_api.RepoFile)
            ]
        return self._listings[listing][:most]

    def put(self, key: str, data: bytes | Path, *, is_new: bool = False) -> ObjectInfo:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def create(self) -> None:
        """Make the dataset, private, unless it exists."""
        if self._revision is None:
            self._call("", lambda: self._api.create_repo(self._id, repo_type="dataset", private=True, exist_ok=True))
            self._forget()

    def commit(self, files: Mapping[str, Path | bytes], message: str) -> None:
        """Add files, or replace them, in one commit: all of them or none."""
        add = self._hub.CommitOperationAdd

        def once() -> None:
            # New ones for each attempt: a commit whose answer was lost is not made twice.
            added = [add(key, data if isinstance(data, bytes) else str(data)) for key, data in files.items()]
            self._api.create_commit(
                self._id, added, commit_message=message, repo_type="dataset", revision=self._revision
            )

        self._call("", once)
        self._forget()

    def _forget(self) -> None:
        """Look again which commit is the last."""
        self._sha: str | None = None
        self._known: dict[str, ObjectInfo] = {}
        self._listings: dict[tuple[str, bool], list[tuple[str, ObjectInfo]]] = {}
        self._places: dict[str, tuple[str, float]] = {}

    def _refuse(self) -> NoReturn:
        raise RemoteError(
            f"{self._root}: a dataset on the hub is written whole. Write to a local path or an object store, then run: "
            f"millstream copy PATH {self._root}"
        )

    def _require(self) -> None:
        """Raise ObjectMissing unless there is such a dataset and revision."""
        self._call("", lambda: self._commit)

    @property
    def _commit(self) -> str:
        with self._lock:
            if self._sha is None:
                info = self._api.repo_info(self._id, repo_type="dataset", revision=self._revision)
                self._sha = str(info.sha)
            return self._sha

    def _tree(self, folder: str, deep: bool) -> "list[Any]":
        found = self._api.list_repo_tree(
            self._id, folder or None, recursive=deep, revision=self._commit, repo_type="dataset"
        )
        return list(found)

    def _learn(self, entries: "list[Any]") -> None:
        for entry in entries:
            if isinstance(entry, self._hub.hf_api.RepoFile):
                etag = entry.lfs.sha256 if entry.lfs else entry.blob_id
                self._known[entry.path] = ObjectInfo(entry.size, etag, 0)

    def _fetch(self, key: str, start: int, size: int) -> bytes:
        """One range; redirects are followed here, so that the token stays with the hub and an address is used again."""
        at_hub = f"{self._api.endpoint}/datasets/{self._id}/resolve/{self._commit}/{quote(key)}"
        own_host = urlsplit(str(self._api.endpoint)).netloc
        place, until = self._places.get(key, (at_hub, time.monotonic() + 1))
        url = place if time.monotonic() < until else at_hub
        ranged = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        session = import_extra("huggingface_hub.utils", self._root).get_session()
        for _ in range(_MOST_REDIRECTS):
            is_hub = urlsplit(url).netloc == own_host
            headers = ranged | self._hub.utils.build_hf_headers(library_name="millstream") if is_hub else ranged
            answer = session.get(url, headers=headers, follow_redirects=False, timeout=30)
            if 300 <= answer.status_code < 400 and "location" in answer.headers:
                url = urljoin(url, answer.headers["location"])
                continue
            if not is_hub and 400 <= answer.status_code < 500 and self._places.pop(key, None):
                raise IncompleteBody("the address of the file has expired")
            if answer.status_code >= 400:
                raise _Refused(answer.status_code)
            data: bytes = answer.content if answer.status_code == 206 else answer.content[start : start + size]
            if len(data) != size:
                raise IncompleteBody(f"{len(data)} of {size} bytes arrived")
            if url != at_hub:
                self._places[key] = url, time.monotonic() + _REDIRECT_S
            return data
        raise IncompleteBody("too many redirects")

    def _call(self, key: str, once: Callable[[], Result]) -> Result:
        """Call with retries; errors are ours."""
        url = f"{self._root}/{key}" if key else self._root

        def translated() -> Result:
            try:
                return once()
            except Exception as error:
                raise self._translated(error, url) from None

        return retried(url, translated)

    def _translated(self, error: Exception, url: str) -> Exception:
        errors = self._errors
        if type(error) is RuntimeError and isinstance(error.__cause__, Exception):  # of an upload in a thread
            error = error.__cause__
        if isinstance(error, errors.OfflineModeIsEnabled):
            return RemoteError(f"{url}: HF_HUB_OFFLINE=1 forbids requests to the hub. Unset it")
        if isinstance(error, errors.EntryNotFoundError):
            return ObjectMissing(f"{url}: no such file in the dataset")
        if isinstance(error, errors.RevisionNotFoundError):
            return ObjectMissing(f"{self._root}: no such revision")
        status = (
            error.status if isinstance(error, _Refused) else getattr(getattr(error, "response", None), "status_code", 0)
        )
        if isinstance(error, errors.GatedRepoError):
            return AccessDenied(f"{self._root}: access must be requested on its page at the hub, then: hf auth login")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ObjectMissing(
                f"{self._root}: no such dataset, or it is private. Check the name, or run: hf auth login"
            )
        if status in (401, 403):
            return AccessDenied(f"{url}: refused by the hub ({status}). Log in with a token that may: hf auth login")
        if status == 404:
            return ObjectMissing(f"{url}: no such file in the dataset")
        if 400 <= status < 500 and status not in (408, 425, 429):
            told = getattr(error, "server_message", None) or "bad request"
            return RemoteError(f"{url}: refused by the hub ({status}: {' '.join(str(told).split())[:200]})")
        if status:
            return IncompleteBody(f"the hub answers {status}")
        if type(error).__module__.startswith(("httpx", "httpcore")) or isinstance(error, OSError):
            return IncompleteBody(type(error).__name__)
        return error


class _Refused(Exception):
    """An answer without data, by its status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status: {status}")
        self.status = status
