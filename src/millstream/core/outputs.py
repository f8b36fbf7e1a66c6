"""Long outputs that survive kill -9, and finished ones that the same command finds again.

Parts grow in `OUT.partial/`, next to a journal of what is committed.

    OUT.partial/journal.json   version, terms (inputs and settings), parts (name -> committed bytes), state
    OUT.partial/NAME ...       the parts; bytes after the committed ones are written again

The journal is replaced as a whole, after its parts are on disk, so it is valid at any time. The same command resumes
from it, produces the same bytes, and removes the folder. Beside a finished file, the hidden `.NAME.done` has its inputs
and settings with its size and time: a file that was changed, or that another program wrote, is never taken for ours.
"""

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np

from millstream.core.bucket import is_url
from millstream.core.config import config_diff, parse_json
from millstream.core.console import quoted, say
from millstream.core.files import (
    NOTHING_LEFT,
    already_exists,
    check_replaceable,
    is_same_file,
    locked_folder,
    move_into_place,
    no_space,
    publish,
    publish_json,
    publishing,
    remove_unpublished,
    spool_root,
    sync_folder,
)
from millstream.errors import BadSetting, ConfigMismatch, StoreExists

Write = Callable[[bytes | memoryview], object]
STDOUT = "-"  # the name of an output that goes to stdout instead
RESUME = "Progress saved; free some space and run the same command again to resume"
_JOURNAL = "journal.json"
_TEXT = "text"  # the only part of a TextOutput
_VERSION = 2


def stdout() -> BinaryIO:
    """Stdout for an output; BadSetting if it is closed."""
    if sys.stdout is None:
        raise BadSetting(f"{STDOUT}: stdout is closed. Choose a file")
    return sys.stdout.buffer


def partial_folder(out: Path) -> Path:
    """Where an output grows: beside it, or in the spool folder if it is an object."""
    if is_url(out):
        return spool_root() / f"{out.name}-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}.partial"
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
        self, out: Path, terms: Mapping[str, object], *, rebuild: bool = False, start_over: str | None = None
    ) -> None:
        check_replaceable(out)
        self.out, self.path = out, partial_folder(out)
        self._terms = cast(dict[str, object], json.loads(json.dumps(terms)))
        self._lock = locked_folder(self.path)
        try:
            remove_unpublished(out)
            if rebuild:
                self._clear(kept=set())
            content = self._read()
            if content is not None and content["terms"] != self._terms:
                raise ConfigMismatch(
                    f"{self.path}: holds the progress of a run with other inputs or settings "
                    f"({config_diff(content['terms'], self._terms)}). Run that command again to resume it, or "
                    f"{start_over or f'remove {self.path} to start over'}"
                )
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
                part = self.path / name
                if (found := part.stat().st_size if part.exists() else 0) < size:
                    say(f"{part}: {found} bytes, expected at least {size}. Starting over")
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
        if is_url(self.out):
            cast(Any, self.out).put(self.path / part)
        else:
            move_into_place(self.path / part, self.out)
        self.remove()

    def remove(self) -> None:
        """Remove the folder: nothing is left to resume from."""
        if is_same_file(self._lock, self.path):
            shutil.rmtree(self.path)

    def _read(self) -> dict[str, Any] | None:
        try:
            content = parse_json((self.path / _JOURNAL).read_bytes(), object_hook=_array_from_json)
            if content["version"] == _VERSION:
                return content
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError):
            pass
        say(f"{self.path}: the journal is damaged or from another version of millstream. Starting over")
        self._clear(kept=set())
        return None

    def _clear(self, *, kept: set[str]) -> None:
        for file in self.path.iterdir():
            if file.name not in kept:
                file.unlink()


class TextOutput:
    """A text file written in pieces, as gzip members if its name ends in .gz; after a resume it has the same bytes.

    `saved` is the last saved position of the writer; `is_finished`: all text is written, even if `out` does not exist.

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
            self._resume(self._output.load() or {"bytes": 0, "pending": "", "saved": None, "finished": False})
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
        while len(self._pending) >= self._chunk_bytes:  # members do not depend on the sizes of the pieces
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
        file = self._output.path / _TEXT
        if self.out.exists():
            if self.is_finished and not file.exists():
                return  # renamed, and killed before the folder was removed
            is_ours = is_url(self.out) and file.exists() and file.stat().st_size == self.out.stat().st_size
            if not (self.is_finished and is_ours):  # uploaded, and killed before the folder was removed
                raise already_exists(self.out)  # another process has just finished it
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.truncate(self._fd, state["bytes"])  # what was written after the last save is written again
        os.lseek(self._fd, 0, os.SEEK_END)
        self._pending += state["pending"].encode("latin-1")


def check_new(out: Path, *, resumable: bool = True) -> None:
    """Refuse, before anything is read, an output that already exists or whose folder does not."""
    if not is_url(out) and not out.absolute().parent.is_dir():
        raise BadSetting(f"{out}: its folder does not exist. Make it: mkdir -p {quoted(out.parent)}")
    folder = partial_folder(out)
    # Killed just before the end. An object is uploaded from its part, which is still there.
    was_published = (folder / _JOURNAL).exists() and (is_url(out) or not (folder / _TEXT).exists())
    if out.exists() and not (resumable and was_published):
        raise already_exists(out)


@contextmanager
def publishing_text(out: Path) -> Generator[Write]:
    """Write a new text file in pieces, gzipped if its name ends in .gz."""
    check_new(out, resumable=False)
    with publishing(out, NOTHING_LEFT) as file:
        if out.name.endswith(".gz"):
            deflate = gzip_member()
            yield lambda text: file.write(deflate.compress(text))
            file.write(deflate.flush())
        else:
            yield file.write
    sync_folder(out.parent)


def gzip_member() -> Any:
    """A compressor that writes one gzip member: by isal, which is six times as fast, or without it by zlib."""
    return import_module("isal.isal_zlib" if find_spec("isal") else "zlib").compressobj(2, 8, 31)


# -- finished


def done_file(out: Path) -> Path:
    return out.with_name(f".{out.name}.done")


def remember_finished(out: Path, terms: Mapping[str, object], state: object = True) -> None:
    """Record that `out` is finished; `state` is JSON for `find_finished` to return."""
    publish_json(done_file(out), {"terms": terms, "state": state, **_size_and_time(out)})


def find_finished(out: Path, terms: Mapping[str, object]) -> Any:
    """The state recorded for `out` if it was written with these inputs and settings; None if it does not exist.

    StoreExists if it was written with others, by another program, or changed since.
    """
    if not out.exists():
        done_file(out).unlink(missing_ok=True)  # of an output that was removed
        return None
    try:
        known = cast("dict[str, Any]", parse_json(done_file(out).read_bytes()))
        is_ours = {key: known[key] for key in ("bytes", "mtime_ns")} == _size_and_time(out)
        before, state = dict[str, object](known["terms"]), known["state"]
    except (OSError, ValueError, LookupError, TypeError):
        raise already_exists(out) from None
    if not is_ours:
        raise already_exists(out)
    wanted = cast("dict[str, object]", json.loads(json.dumps(terms)))
    if before != wanted:
        raise StoreExists(
            f"{out}: already exists, with other inputs or settings ({config_diff(before, wanted)}). Choose another "
            "name, or remove it"
        )
    say(f"{out}: already written by the same command; nothing to do")
    return state


def forget_finished(out: Path) -> None:
    """Remove an output and the record of how it was written."""
    for file in (out, done_file(out)):
        file.unlink(missing_ok=True)


def _size_and_time(out: Path) -> dict[str, int]:
    stat = out.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _array_to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}
    return int(cast(np.integer, value))


def _array_from_json(value: dict[str, Any]) -> object:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(bytearray(base64.b64decode(value["base64"])), value["dtype"])
    return value
