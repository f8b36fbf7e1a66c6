"""Copies of stores, runs, packs and files with their indexes, between local disk, object stores and the hub.

Files are copied by several threads and verified at the target. A journal in the spool has every file that is done, with
its version on both sides, so that the same command resumes after kill -9, from the start of each file that is not done.
Within a bucket, the server copies. A new local folder grows as TARGET.partial
and gets its name when it is complete; at a URL, what makes a folder a store or a run is uploaded last.
"""

import hashlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from millstream.core.bucket import ObjectBucket, ObjectInfo
from millstream.core.config import parse_json
from millstream.core.console import plural, progress, quoted, say
from millstream.core.files import locked, rename_folder, spool_root
from millstream.core.hub import HubBucket
from millstream.core.registry import KINDS, plug
from millstream.core.remote import RemotePath, to_path
from millstream.core.transfer import fetch, is_same
from millstream.errors import BadSetting, BadSource, ObjectMissing, RemoteError, StoreExists

Job = TypeVar("Job")
Version = list[int | str | None]  # of a file: its size, and etag or time

CARD = "README.md"  # of a dataset on the hub
_AT_ONCE = 6  # files: a download holds at most 13 MB, an upload 40 MB
_COMMIT_FILES, _COMMIT_BYTES = 100, 16 << 30  # of one commit to the hub
_LAST = ("config.yaml", "data.json", "manifest.json")  # copied last, of a run or a store
_MOST_THERE = 5 << 30  # bytes that S3 copies by itself
_HUB_OWN = (CARD, ".gitattributes")


@dataclass(frozen=True)
class Copied:
    """What a copy consists of, and how many of its files were not at the target before."""

    target: Path
    num_files: int
    num_bytes: int
    num_new: int


@dataclass(frozen=True)
class _Item:
    """One file to copy: its name below the target, and what it was when it was listed."""

    name: str
    source: Path
    version: Version

    @property
    def num_bytes(self) -> int:
        return int(self.version[0] or 0)


def copy(source: str | Path, target: str | Path) -> Copied:
    """Copy what is at a path, verified; what an interrupted copy has finished is not copied again.

    A folder is copied as TARGET; a file, with its index, as TARGET, or into it if it is a folder or ends in a slash.
    """
    start, end = to_path(source), to_path(target)
    if isinstance(end, RemotePath) and end.scheme.startswith("http"):
        raise BadSetting(f"{end}: a web server is read only. Copy to a folder, s3://, gs://, az:// or hf://")
    is_folder, items = _items_at(start)
    if not is_folder:
        if str(target).endswith("/") or (not isinstance(end, RemotePath) and end.is_dir()):
            end = end / start.name
        items = [_Item(end.name + item.name.removeprefix(start.name), item.source, item.version) for item in items]
    if end == start:
        raise BadSetting(f"{source}: source and target are the same. Choose another target")
    return _Copy(start, end, items, is_folder=is_folder).run()


class _Copy:
    """One copy, in progress."""

    def __init__(self, source: Path, target: Path, items: Sequence[_Item], *, is_folder: bool) -> None:
        self._source, self._target, self._items, self._is_folder = source, target, items, is_folder
        self._is_local = not isinstance(target, RemotePath)
        self._hub = target.bucket if isinstance(target, RemotePath) and target.scheme == "hf" else None
        # Where files are put, under their names.
        self._place = target if is_folder else target.parent
        if is_folder and self._is_local:
            self._place = target.with_name(f"{target.name}.partial")
        key = hashlib.sha256(f"{source.absolute()}\0{target.absolute()}".encode()).hexdigest()[:16]
        self._stage = spool_root() / f"copy-{key}"  # what goes from one URL to another
        self._journal_file = self._stage.with_suffix(".journal")
        self._lock = threading.Lock()
        self._moving: dict[str, int] = {}  # bytes so far of the files being copied
        self._done_bytes = 0

    def run(self) -> Copied:
        total = sum(item.num_bytes for item in self._items)
        with locked(
            self._stage.with_suffix(".lock"), on_wait=lambda: say("waiting for another process with this copy")
        ):
            self._check_target()
            with progress(f"copy {self._source.name}", total, unit="bytes") as update:
                self._update = lambda: update(self._done_bytes + sum(list(self._moving.values())))
                left = list(self._left())
                self._done_bytes = total - sum(item.num_bytes for item in left)
                self._update()
                if isinstance(self._hub, HubBucket):
                    self._commit_all(self._hub, left)
                else:
                    last = [item for item in left if item.name in _LAST]
                    run_all([item for item in left if item not in last], self._copy_one, at_once=_AT_ONCE)
                    run_all(last, self._copy_one, at_once=1)
            if self._place != self._target and self._is_folder:
                rename_folder(self._place, self._target)
            self._journal_file.unlink(missing_ok=True)
            shutil.rmtree(self._stage, ignore_errors=True)
        return Copied(self._target, len(self._items), total, len(left))

    def _check_target(self) -> None:
        """Refuse a target that has something else, before anything is copied."""
        if self._is_local:
            if not self._target.absolute().parent.is_dir():
                folder = quoted(self._target.absolute().parent)
                raise BadSetting(f"{self._target}: its folder does not exist. Make it: mkdir -p {folder}")
            if self._is_folder and self._target.exists() and not (self._target.is_dir() and _is_empty(self._target)):
                self._place = self._target  # complete, or something else
                if any(True for _ in self._left()):
                    raise self._exists("it has other files than the source")
        elif self._is_folder and isinstance(self._source, RemotePath) and self._source == self._target:
            raise BadSetting(f"{self._target}: is the source itself")

    def _left(self) -> Iterator[_Item]:
        """The files that are not at the target yet; StoreExists if others are there."""
        journal = self._read_journal()
        there = self._there()
        names = {item.name for item in self._items}
        for name in there.keys() - names - journal.keys():
            if self._is_folder and not (self._hub is not None and name.rpartition("/")[2] in _HUB_OWN):
                raise self._exists(f"the source has no {name}")
        for item in self._items:
            version = there.get(item.name)
            if version is None:
                yield item
            elif item.name in journal and journal[item.name][1] == version:
                if journal[item.name][0] != item.version:
                    yield item
            elif version[0] == item.version[0] and is_same(item.source, self._place / item.name):
                self._note(item)
            elif self._is_local and self._place != self._target and self._is_folder:
                yield item  # in TARGET.partial
            else:
                raise self._exists(f"its {item.name} differs from that of the source")

    def _exists(self, reason: str) -> StoreExists:
        return StoreExists(f"{self._target}: already exists, and {reason}. Choose another target, or remove it")

    def _there(self) -> dict[str, Version]:
        if self._is_folder:
            try:
                return {name: version for name, (_, version) in _walk(self._place).items()}
            except ObjectMissing:  # a dataset that is not made yet
                return {}
        found: dict[str, Version] = {}
        for item in self._items:
            try:
                found[item.name] = _version(self._place / item.name)
            except FileNotFoundError:  # also ObjectMissing
                continue
        return found

    def _copy_one(self, item: _Item) -> None:
        place = self._place / item.name

        def watch(done: int) -> None:
            self._moving[item.name] = done
            self._update()

        if not isinstance(place, RemotePath):
            fetch(item.source, place, watch=watch)
        elif not self._is_copied_there(item, place):
            file = self._staged(item, watch)
            place.put(file)
            self._unstage(file)
        self._finish(item)

    def _is_copied_there(self, item: _Item, place: RemotePath) -> bool:
        """Let the server copy an object within its bucket; whether it is there now, and verified."""
        if not isinstance(item.source, RemotePath) or item.source.bucket_url != place.bucket_url:
            return False
        bucket = place.bucket
        if not isinstance(bucket, ObjectBucket) or item.num_bytes > _MOST_THERE:
            return False
        bucket.copy(item.source.key, place.key)
        return is_same(item.source, place)

    def _finish(self, item: _Item) -> None:
        """Note a file as done, unless it changed on the way."""
        if _version(item.source) != item.version:
            raise BadSource(
                f"{item.source}: changed while it was copied. Run the same command again when it is complete"
            )
        self._note(item)
        with self._lock:
            self._moving.pop(item.name, None)
            self._done_bytes += item.num_bytes
        self._update()

    def _staged(self, item: _Item, watch: Callable[[int], object] = lambda done: None) -> Path:
        """A local file with the bytes of an item."""
        if not isinstance(item.source, RemotePath):
            return item.source
        file = self._stage / item.name
        fetch(item.source, file, watch=watch)
        return file

    def _unstage(self, file: Path) -> None:
        if file.is_relative_to(self._stage):
            file.unlink()

    def _commit_all(self, bucket: HubBucket, left: Sequence[_Item]) -> None:
        """In few commits: the hub is slow with many. The last one has the card and what makes it a store."""
        card = self._card()
        if not left and card is None:
            return
        bucket.create()
        for batch in _batches([item for item in left if item.name not in _LAST]):
            self._commit(bucket, batch, None)
        self._commit(bucket, [item for item in left if item.name in _LAST], card)

    def _commit(self, bucket: HubBucket, batch: Sequence[_Item], card: str | None) -> None:
        files: dict[str, Path] = {}

        def stage(item: _Item) -> None:
            files[item.name] = self._staged(item)

        def verify(item: _Item) -> None:
            place = self._place / item.name
            if not is_same(files[item.name], place):
                raise RemoteError(f"{place}: differs from what was uploaded. Run the same command again")
            self._finish(item)

        run_all(batch, stage, at_once=_AT_ONCE)
        assert isinstance(self._place, RemotePath)
        added: dict[str, Path | bytes] = {(self._place / name).key: file for name, file in sorted(files.items())}
        if card is not None:
            added[CARD] = card.encode()
        if added:
            what = plural(len(batch), "file") if batch else "the dataset card"
            bucket.commit(added, f"Copy {what} of {self._source.name} with millstream")
        self._place.walk_files()  # one request tells the versions of all
        run_all(batch, verify, at_once=_AT_ONCE)
        for file in files.values():
            self._unstage(file)

    def _card(self) -> str | None:
        """The dataset card, unless there is one or the kind of record makes none."""
        kind = _kind_at(self._source) if self._is_folder else None
        make = getattr(plug(kind, "kind"), "card", None) if kind else None
        assert isinstance(self._place, RemotePath)
        try:
            has_card = CARD in dict(self._place.bucket.list(""))
        except ObjectMissing:
            has_card = False
        if make is None or has_card:
            return None
        return str(make(self._source, url=self._target, folder=self._place.key))

    def _note(self, item: _Item) -> None:
        there = self._place / item.name
        line = json.dumps([item.name, item.version, _version(there)]) + "\n"
        with self._lock, open(self._journal_file, "a") as file:
            file.write(line)

    def _read_journal(self) -> dict[str, tuple[Version, Version]]:
        """What is done, by name: its version at the source and at the target."""
        found: dict[str, tuple[Version, Version]] = {}
        try:
            lines = self._journal_file.read_text().splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                name, here, there = parse_json(line)
                found[str(name)] = here, there
            except (ValueError, TypeError):  # a line that a kill cut short
                continue
        return found


def run_all(jobs: Sequence[Job], do: Callable[[Job], None], *, at_once: int) -> None:
    """Do all jobs in threads; the first error ends them. Daemons: Ctrl-C does not wait for a request."""
    left, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while left and not errors:
            try:
                do(left.popleft())
            except IndexError:
                return
            except BaseException as error:  # also a panic of a client
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _batches(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    batch, size = list[_Item](), 0
    for item in items:
        if batch and (len(batch) == _COMMIT_FILES or size + item.num_bytes > _COMMIT_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.num_bytes
    if batch:
        yield batch


def _items_at(source: Path) -> tuple[bool, list[_Item]]:
    """Whether a path is a folder, and the files to copy."""
    is_web = isinstance(source, RemotePath) and source.scheme.startswith("http")
    if not is_web and not source.is_file() and (found := _walk(source)):
        opened = [name for name in found if name.endswith(".open")]
        if opened:
            say(f"{source}: {plural(len(opened), 'shard')} not sealed, so not copied; see millstream inspect")
        return True, [_Item(name, *found[name]) for name in sorted(found.keys() - set(opened))]
    kind = _kind_at(source)
    files: dict[str, Path] = plug(kind, "kind").files_at(source) if kind else {}
    if not files:
        raise BadSource(f"{source}: no such file or folder" + (", or nothing that can be listed" if is_web else ""))
    items = [_Item(name, file, _version(file)) for name, file in files.items()]
    return source.name not in files, items


def _kind_at(path: Path) -> str | None:
    return next((kind for kind in KINDS if plug(kind, "kind").is_at(path)), None)


def _walk(folder: Path) -> dict[str, tuple[Path, Version]]:
    """All files below a folder by their names, except hidden ones."""
    if isinstance(folder, RemotePath):
        found = {name: (folder / name, _version_of(info)) for name, info in folder.walk_files().items()}
    else:
        found: dict[str, tuple[Path, Version]] = {}
        for place, _, names in os.walk(folder):
            for file in (Path(place) / name for name in names):
                found[str(file.relative_to(folder))] = file, _version(file)
    return {name: one for name, one in found.items() if not any(part.startswith(".") for part in name.split("/"))}


def _version(path: Path) -> Version:
    return _version_of(path.stat())


def _version_of(info: "os.stat_result | ObjectInfo") -> Version:
    if isinstance(info, ObjectInfo):
        return [info.num_bytes, info.etag or info.modified_ns]
    return [info.st_size, info.st_mtime_ns]


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None
