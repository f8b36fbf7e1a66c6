"""A small Hugging Face hub on loopback: what huggingface_hub calls to list, read and commit datasets, without Xet.

    def test_a_store_on_the_hub(hub: Hub) -> None:
        hub.commit("me/traces", {"manifest.json": b"{}"})
        ms.open("hf://datasets/me/traces")

Large files (`LARGE`) lie at another address, which the answer redirects to, signed, as at the real hub.
"""

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest

from millstream.core import bucket
from support.http_server import Handler, Server, serving

TOKEN = "hf_token_of_the_tests"
LARGE = (".arrow", ".parquet")
Files = dict[str, bytes]


@dataclass
class Request:
    method: str
    path: str
    has_token: bool


@dataclass
class Hub:
    """Its datasets: for each the files of every commit, the last one being `main`."""

    commits: dict[str, list[Files]] = field(default_factory=lambda: defaultdict[str, list[Files]](lambda: [{}]))
    large: Files = field(default_factory=Files)  # by SHA-256
    seen: list[Request] = field(default_factory=list[Request])
    broken: list[int] = field(default_factory=list[int])  # statuses of the next answers to GET
    broken_after: int | None = None  # so many commits, those that follow are refused
    address: str = ""
    large_at: str = ""  # another address of this server, for large files

    def commit(self, name: str, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            if path.endswith(LARGE):
                self.large[hashlib.sha256(data).hexdigest()] = data
        self.commits[name].append({**self.commits[name][-1], **files})

    def files(self, name: str) -> Files:
        return self.commits[name][-1]

    def save(self, name: str, folder: Path) -> Path:
        """A clone."""
        for path, data in self.files(name).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return folder

    def num_requests(self, method: str, match: str = "") -> int:
        return sum(seen.method == method and match in seen.path for seen in self.seen)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    import huggingface_hub.utils

    huggingface_hub.utils.close_session()
    with serving(_Handler, Hub()) as server:
        server.state.address = server.address
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server.state
        huggingface_hub.utils.close_session()
    bucket._here().buckets.clear()  # their address is that of this server


def _sha(number: int) -> str:
    return f"{number:040x}"


def _entry(path: str, data: bytes) -> dict[str, object]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, object] = {"type": "file", "oid": oid, "size": len(data), "path": path}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


class _Handler(Handler):
    server: Server[Hub]  # pyright: ignore

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        hub = self.server.state
        self.body = self.received()
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        hub.seen.append(Request(self.command, self.path, has_token))
        path, _, query = self.path.partition("?")
        path = unquote(path)
        if self.command == "GET" and hub.broken:
            self.answer(hub.broken.pop(0), b"broken")
        elif match := re.fullmatch(r"/cdn/(\w+)", path):
            self.answer_range(hub.large[match[1]]) if query == "Signature=secret" else self.answer(403, b"expired")
        elif match := re.fullmatch(r"/lfs/(\w+)", path):
            hub.large[match[1]] = self.body
            self.answer(200, b"")
        elif not has_token:
            self._json({"error": "Invalid username or password."}, 401, {"X-Error-Code": "RepoNotFound"})
        elif path == "/api/repos/create":
            asked = json.loads(self.body)
            name = f"{asked['organization']}/{asked['name']}"
            assert asked["visibility"] == "private"
            self._json({"url": f"{hub.address}/datasets/{name}"}, 409 if name in hub.commits else 200)
            _ = hub.commits[name]
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.match(r"(?:/api)?/datasets/([^/]+/[^/.]+)(?:\.git)?(?:/(.*))?$", path):
            if match[1] not in hub.commits:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            else:
                self._dataset(match[1], match[2] or "", parse_qs(query))
        else:
            self.answer(404, b"no such endpoint")

    def _dataset(self, name: str, rest: str, query: dict[str, list[str]]) -> None:
        hub = self.server.state
        verb, _, rest = rest.partition("/")
        revision, _, path = rest.partition("/")
        last = len(hub.commits[name]) - 1
        number = last if revision in ("", "main") or verb == "info" else int(revision, 16)
        files = hub.commits[name][number]
        if verb in ("", "revision"):
            self._json({"id": name, "sha": _sha(number), "siblings": [], "tags": [], "private": True})
        elif verb == "tree":
            self._tree(files, f"{path}/" if path else "", query.get("recursive") in (["true"], ["True"]))
        elif verb == "paths-info":
            wanted = parse_qs(self.body.decode())["paths"]
            self._json([_entry(one, files[one]) for one in wanted if one in files])
        elif verb == "resolve" and path not in files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        elif verb == "resolve" and path.endswith(LARGE):
            place = f"/cdn/{hashlib.sha256(files[path]).hexdigest()}?Signature=secret"
            host = hub.large_at or hub.address.replace("127.0.0.1", "localhost")
            size = str(len(files[path]))
            linked = {"X-Linked-Size": size, "X-Linked-ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"'}
            self.answer(302, b"", {"Location": host + place, "X-Repo-Commit": _sha(number), **linked})
        elif verb == "resolve":
            own = {"X-Repo-Commit": _sha(number), "ETag": f'"{_entry(path, files[path])["oid"]}"'}
            self.answer_range(files[path], own)
        elif verb == "preupload":
            asked = json.loads(self.body)["files"]
            found = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular"}
                for one in asked
            ]
            self._json({"files": [{**one, "shouldIgnore": False, "oid": None} for one in found]})
        elif verb == "info":  # /info/lfs/objects/batch
            asked = json.loads(self.body)["objects"]
            upload = {one["oid"]: {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}} for one in asked}
            self._json(
                {
                    "objects": [
                        one if one["oid"] in hub.large else one | {"actions": upload[one["oid"]]} for one in asked
                    ]
                }
            )
        elif verb == "commit":
            self._commit(name, files)
        else:
            self.answer(404, b"no such endpoint")

    def _tree(self, files: Files, prefix: str, is_deep: bool) -> None:
        entries: list[dict[str, object]] = []
        folders: set[str] = set()
        for path, data in sorted(files.items()):
            rest = path.removeprefix(prefix)
            if not path.startswith(prefix):
                continue
            if "/" in rest:
                folders.add(prefix + rest.partition("/")[0])
            if is_deep or "/" not in rest:
                entries.append(_entry(path, data))
        if prefix and not entries and not folders:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self._json(
            [*({"type": "directory", "oid": _sha(1), "size": 0, "path": one} for one in sorted(folders)), *entries]
        )

    def _commit(self, name: str, files: Files) -> None:
        hub = self.server.state
        if hub.broken_after is not None and len(hub.commits[name]) > hub.broken_after:
            self.answer(403, b"no more commits")
            return
        added: Files = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                added[value["path"]] = hub.large[value["oid"]]
        hub.commits[name].append({**files, **added})
        sha = _sha(len(hub.commits[name]) - 1)
        self._json({"commitUrl": f"{hub.address}/{name}/commit/{sha}", "commitOid": sha, "success": True})

    def _json(self, value: object, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})
