"""Long-running output that survives kill -9: growing parts in `OUT.partial/`, and a journal of what is committed.

    OUT.partial/journal.json   version, terms (inputs and settings), parts (name -> committed bytes), state
    OUT.partial/NAME ...       the parts; bytes after the committed ones are written again

The journal is replaced as a whole, after its parts are on disk, so it is valid at any time. The same command resumes
from it, produces the same bytes, and removes the folder.
"""

import base64
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from millstream.core.config import config_diff
from millstream.core.console import say
from millstream.core.files import (
    already_there,
    gzip_member,
    is_same_file,
    lock,
    no_space,
    publish,
    remove_unpublished,
    sync_folder,
)
from millstream.errors import BadSetting, ConfigMismatch, StoreExists

RESUME = "Progress saved; free some space and run the same command again to resume"
_JOURNAL = "journal.json"
_TEXT = "text"  # the only part of a TextOutput
_VERSION = 2


def partial_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


class PartialOutput:
    """The folder of one unfinished output, locked. To resume, `terms` (inputs and settings) must match.

    `rebuild` discards existing progress; `start_over` is the advice in the error when the terms differ.

    >>> with PartialOutput(Path("reads.pack"), {"source": "f00d"}) as output:
    ...     state = output.load()  # None: start from the beginning
    ...     output.commit({"record": 7}, {"bases": 1024})
    ...     output.remove()
    """

    def __init__(
        self,
        out: Path,
        terms: Mapping[str, object],
        *,
        rebuild: bool = False,
        start_over: str | None = None,
    ) -> None:
        self.out, self.path = out, partial_folder(out)
        self._terms = cast(dict[str, object], json.loads(json.dumps(terms)))
        self._lock = _locked_folder(self.path)
        try:
            remove_unpublished(out)
            if rebuild:
                self._clear(kept=set())
            self._check_terms(start_over or f"remove {self.path} to start over")
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.path / _JOURNAL).exists():
            self.remove()  # nothing to resume from
        os.close(self._lock)

    def load(self) -> dict[str, Any] | None:
        """The last committed state, if any. Files that are not in the journal are removed."""
        content = self._read()
        if content is not None and not self.out.exists():  # else a part has been renamed to it
            for name, size in content["parts"].items():
                if (found := _size(self.path / name)) < size:
                    say(f"{self.path / name}: {found} bytes, expected at least {size}. Starting over")
                    content = None
                    break
        self._clear(kept={_JOURNAL, *content["parts"]} if content else set())
        return content and content["state"]

    def commit(self, state: Mapping[str, object], parts: Mapping[str, int]) -> None:
        """A killed run now resumes from here. `parts` maps each part to its bytes on disk."""
        content = {"version": _VERSION, "terms": self._terms, "parts": parts, "state": state}
        publish(self.path / _JOURNAL, json.dumps(content, default=_array_to_json).encode(), RESUME)
        sync_folder(self.path)

    def publish(self, part: str) -> None:
        """Rename a part, complete and on disk, to the output."""
        os.rename(self.path / part, self.out)
        sync_folder(self.out.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder: nothing is left to resume from."""
        if is_same_file(self._lock, self.path):
            shutil.rmtree(self.path)

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self.path / _JOURNAL).read_bytes(), object_hook=_array_from_json)
            if content["version"] == _VERSION:
                return content
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):
            pass
        say(f"{self.path}: the journal is damaged or from another version of millstream. Starting over")
        self._clear(kept=set())
        return None

    def _check_terms(self, start_over: str) -> None:
        content = self._read()
        if content is None or content["terms"] == self._terms:
            return
        raise ConfigMismatch(
            f"{self.path}: holds the progress of a run with other inputs or settings "
            f"({config_diff(content['terms'], self._terms)}). Run that command again to resume it, or {start_over}"
        )

    def _clear(self, *, kept: set[str]) -> None:
        for file in self.path.iterdir():
            if file.name not in kept:
                file.unlink()


class TextOutput:
    """A text file written in pieces, as gzip members if its name ends in .gz; after a resume it has the same bytes.

    `saved` is what the writer saved last; `is_finished` once all text is written, even if `out` is not there yet.

    >>> with TextOutput(Path("out.tsv"), {"reads": "f00d"}) as file:
    ...     file.write(b"a row\\n"); file.save({"row": 1}); file.finish({"row": 1}); file.publish()
    """

    def __init__(self, out: Path, terms: Mapping[str, object], *, chunk_bytes: int = 1 << 20) -> None:
        self.out, self.terms = out, dict(terms)
        self.saved: Mapping[str, Any] | None = None
        self.is_finished = False
        self._chunk_bytes = chunk_bytes  # text per write; in a .gz file, per member
        self._pending = bytearray()
        self._fd = -1

    def __enter__(self) -> Self:
        check_new(self.out)
        self._output = PartialOutput(self.out, self.terms)
        try:
            state = self._output.load()
            self._file = self._output.path / _TEXT
            if self.out.exists() and not (state and state["finished"] and not self._file.exists()):
                raise already_there(self.out)  # another process has just finished it
            self._resume(state or {"bytes": 0, "pending": "", "saved": None, "finished": False})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._output.__exit__()

    def write(self, text: bytes) -> None:
        self._pending += text
        while len(self._pending) >= self._chunk_bytes:  # the same members, whatever the sizes of the pieces
            self._put(bytes(self._pending[: self._chunk_bytes]))
            del self._pending[: self._chunk_bytes]

    def save(self, saved: Mapping[str, object], *, finished: bool = False) -> None:
        """Commit the text written so far, with the position of the writer as JSON."""
        with no_space(self.out, RESUME):
            os.fsync(self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_CUR)
        pending = self._pending.decode("latin-1")
        self._output.commit({"bytes": size, "pending": pending, "saved": saved, "finished": finished}, {_TEXT: size})

    def finish(self, saved: Mapping[str, object]) -> None:
        """Commit the end of the text."""
        if self._pending:
            self._put(bytes(self._pending))
            self._pending.clear()
        self.save(saved, finished=True)
        self.saved, self.is_finished = saved, True

    def publish(self) -> None:
        """Give the file its final name."""
        if self._fd >= 0:
            self._output.publish(_TEXT)
        else:
            self._output.remove()

    def _put(self, text: bytes) -> None:
        if self.out.name.endswith(".gz"):
            member = gzip_member()
            text = member.compress(text) + member.flush()
        left = memoryview(text)
        with no_space(self.out, RESUME):
            while left:
                left = left[os.write(self._fd, left) :]

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.saved, self.is_finished = state["saved"], state["finished"]
        if self.out.exists():
            return
        self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.truncate(self._fd, state["bytes"])  # what was written after the last save is written again
        os.lseek(self._fd, 0, os.SEEK_END)
        self._pending += state["pending"].encode("latin-1")


def check_new(out: Path) -> None:
    """Refuse, before anything is read, an output that already exists or whose folder does not."""
    if not out.absolute().parent.is_dir():
        raise BadSetting(f"{out}: there is no such folder. Make it: mkdir -p {out.parent}")
    folder = partial_folder(out)
    was_published = (folder / _JOURNAL).exists() and not (folder / _TEXT).exists()  # killed just before the end
    if out.exists() and not was_published:
        raise already_there(out)


def _locked_folder(path: Path) -> int:
    """A descriptor of the folder, locked by this process."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not lock(fd, without_locks=True):
            os.close(fd)
            raise StoreExists(f"{path}: another process is writing to it. Wait for it, or choose another output")
        if is_same_file(fd, path):
            return fd
        os.close(fd)  # the process that had it has just finished and removed it


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _array_to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}
    if isinstance(value, np.integer):
        return int(cast(int, value))
    raise TypeError(f"{value!r} in a journal")


def _array_from_json(value: dict[str, Any]) -> object:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(bytearray(base64.b64decode(value["base64"])), value["dtype"])
    return value
