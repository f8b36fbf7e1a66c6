"""A run folder at a URL: training works in a folder of the spool, whose changed files are uploaded in the background.

Files are uploaded in such an order that the remote folder is a run that can be resumed, whatever the moment at which
the machine dies. A journal beside the folder has the version of every file when both were the same: if the remote run
still has these versions, the local one is as new or newer; else another machine has continued, and its files are taken.
"""

import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from millstream.core.config import parse_json
from millstream.core.console import format_bytes, plural, quoted, say
from millstream.core.files import lock, locked, publish_json
from millstream.core.remote import RemotePath, spool_folder, to_path
from millstream.core.transfer import fetch
from millstream.errors import BadSource, MillstreamError, RemoteError, StoreExists
from millstream.training.folder import EVALUATED, LATEST, METRICS, PREDICTIONS, SCORES, WEIGHTS

UPLOAD_S = "20"  # between uploads while a run trains; $MILLSTREAM_UPLOAD_S
# Uploaded in this order, all other files of a run first and what is made of it last. A checkpoint follows the lines of
# the log and the best weights that belong to it; scores mark a model as finished.
_ORDER = (METRICS, LATEST, WEIGHTS, SCORES, PREDICTIONS)
_DERIVED = ("report.html", "figures/", "tables/", f"{EVALUATED}/")
Stamp = list[int]  # size and modification time of a local file


@dataclass
class Synced:
    """A file when it was the same on both sides."""

    etag: str | None
    stamp: Stamp


class RemoteRun:
    """A run at a URL, and its folder on this machine."""

    def __init__(self, url: RemotePath) -> None:
        self.url = url
        self.folder = spool_folder(url)
        self._journal, self._lock, self._frozen = (
            self.folder.with_name(f".{self.folder.name}.{end}") for end in ("json", "lock", "frozen")
        )
        self.job_lock = self.folder.with_name(f".{self.folder.name}.job")

    def fetch(self, *, is_job: bool = False) -> None:
        """Download what another machine has written. While a job on this machine writes the run, only the job does."""
        with locked(self._lock):
            found = self.url.walk_files()
            synced = self._read_journal()
            new = {name: info for name, info in found.items() if name not in synced or synced[name].etag != info.etag}
            is_continued = any(map(_is_own, new)) or any(_is_own(name) for name in synced.keys() - found.keys())
            if (not new and not is_continued) or (not is_job and self._is_busy()):
                return
            if is_continued:
                self._write_journal({})  # if this is interrupted, everything is downloaded again
                new |= {name: found[name] for name in synced.keys() & found.keys() if self._is_changed(name, synced)}
                for name in self._files().keys() - found.keys():
                    (self.folder / name).unlink()
            size = sum(info.num_bytes for info in new.values())
            say(f"{self.url}: downloading {plural(len(new), 'file')}, {format_bytes(size)}")
            for name, info in new.items():
                fetch(self.url / name, self.folder / name)
                synced[name] = Synced(info.etag, _stamp_of(self.folder / name) or [])
            self._write_journal({name: one for name, one in synced.items() if name in found})

    def upload(self) -> None:
        """Upload what has changed since the last time."""
        with locked(self._lock):
            synced = self._read_journal()
            here = self._files()
            changed = [name for name in here if self._is_changed(name, synced)]
            removed = synced.keys() - here.keys()
            if not changed and not removed:
                return
            found = self.url.walk_files()
            theirs = {name: info.etag for name, info in found.items() if _is_own(name)}
            ours = {name: one.etag for name, one in synced.items() if _is_own(name)}
            if any(map(_is_own, (*changed, *removed))) and theirs != ours:
                raise BadSource(
                    f"{self.url}: another machine is writing this run. Stop one of the two; the same command again "
                    "resumes the run as it is there"
                )
            shutil.rmtree(self._frozen, ignore_errors=True)
            self._frozen.mkdir()
            order = sorted(changed, key=_place)
            stamps = {name: self._freeze(name, number) for number, name in reversed([*enumerate(order)])}
            for number, name in enumerate(order):
                if stamps[name] is not None:
                    info = (self.url / name).put(self._frozen / str(number))
                    synced[name] = Synced(info.etag, stamps[name] or [])
                    self._write_journal(synced)
            for name in removed:
                (self.url / name).unlink()
                del synced[name]
                self._write_journal(synced)
            shutil.rmtree(self._frozen)

    @contextmanager
    def job(self) -> Generator[None]:
        """The only job on this machine that writes the run: files are uploaded while it lasts and when it ends."""
        with open(self.job_lock, "a") as held:
            if not lock(held.fileno(), without_locks=True):
                raise StoreExists(f"{self.url}: another process on this machine is writing it. Wait for it, or stop it")
            self.fetch(is_job=True)
            self.upload()  # of a killed process
            ended = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True, name="millstream-run")
            watcher.start()
            try:
                yield
            except BaseException:
                ended.set()
                with suppress(MillstreamError):  # the first error says more; the next job uploads the rest
                    self.upload()
                raise
            finally:
                ended.set()
                watcher.join()
            self.upload()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(float(os.environ.get("MILLSTREAM_UPLOAD_S", UPLOAD_S))):
            try:
                self.upload()
            except RemoteError as error:  # training can continue without the server
                say(f"not uploaded yet: {error}")
            except BadSource as error:
                say(f"warning: {error}")
                return

    def _freeze(self, name: str, number: int) -> Stamp | None:
        """Keep a file as it is now, to be uploaded; None if it has just been removed."""
        file, frozen = self.folder / name, self._frozen / str(number)
        stamp = _stamp_of(file)
        try:
            if file.suffix == ".safetensors":  # large, and always replaced as a whole
                os.link(file, frozen)
                return _stamp_of(frozen)
        except FileNotFoundError:
            return None
        except OSError:  # a file system without links
            pass
        with suppress(FileNotFoundError):
            shutil.copyfile(file, frozen)
            return stamp
        return None

    def _files(self) -> dict[str, Stamp]:
        """The files of the local folder, except temporary ones."""
        found: dict[str, Stamp] = {}
        for place, folders, names in os.walk(self.folder):
            folders.sort()
            for name in names:
                file = Path(place) / name
                if not name.startswith(".") and (stamp := _stamp_of(file)) is not None:
                    found[str(file.relative_to(self.folder))] = stamp
        return found

    def _is_busy(self) -> bool:
        with open(self.job_lock, "a") as file:
            return not lock(file.fileno(), without_locks=True)

    def _is_changed(self, name: str, synced: dict[str, Synced]) -> bool:
        return name not in synced or synced[name].stamp != _stamp_of(self.folder / name)

    def _read_journal(self) -> dict[str, Synced]:
        try:
            content = parse_json(self._journal.read_bytes())
            return {name: Synced(one["etag"], one["stamp"]) for name, one in content.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def _write_journal(self, synced: dict[str, Synced]) -> None:
        publish_json(self._journal, {name: {"etag": one.etag, "stamp": one.stamp} for name, one in synced.items()})


def local_run(run: str | Path) -> Path:
    """The folder of a run; for a URL, of a copy on this machine that is brought up to date."""
    path = to_path(run)
    if not isinstance(path, RemotePath):
        return path
    copy = RemoteRun(path)
    copy.fetch()
    if not copy.folder.is_dir():
        raise BadSource(f"{path}: no such run. Next: millstream train data=DATA out={quoted(path)}")
    return copy.folder


@contextmanager
def writing_run(run: str | Path) -> Generator[Path]:
    """The same, to write to: a remote run gets what was written, and errors name its URL."""
    path = to_path(run)
    if not isinstance(path, RemotePath):
        yield path
        return
    remote = RemoteRun(path)
    try:
        with remote.job():
            yield remote.folder
    except MillstreamError as error:
        error.args = tuple(
            part.replace(str(remote.folder), str(path)) if isinstance(part, str) else part for part in error.args
        )
        raise


def _is_own(name: str) -> bool:
    """Whether training writes this file."""
    return not name.startswith(_DERIVED)


def _place(name: str) -> tuple[int, str]:
    if not _is_own(name):
        return len(_ORDER) + 1, name
    last = name.rpartition("/")[2]
    return _ORDER.index(last) + 1 if last in _ORDER else 0, name


def _stamp_of(file: Path) -> Stamp | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns]
