"""A text file that is written piece by piece and, whenever its writer is killed, goes on to the same bytes."""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from millstream.config import config_diff
from millstream.console import say
from millstream.errors import BadSetting, StoreExists
from millstream.store.layout import no_space, publish, remove_unpublished, sync_folder
from millstream.store.text_file import gzipping

CHUNK_BYTES = 1 << 20  # of text written at once; of a .gz file, one member
_GO_ON = "Free some space; the same command goes on"


class PartialFile:
    """What is written is in a hidden file beside `out`, and beside that what the writer saved with it last.

    `key` is what the text depends on: of another one, nothing is taken over. `saved` is what the writer had saved.

    >>> with PartialFile(Path("out.tsv"), {"reads": "f00d"}) as file:
    ...     file.write(b"a row\\n"); file.save({"row": 1}); file.finish({"row": 1}); file.publish()
    """

    def __init__(self, out: Path, key: Mapping[str, object]) -> None:
        self.out, self.key = out, dict(key)
        self.saved: Mapping[str, Any] | None = None
        self.is_finished = False  # all was written, but not all of the end was done
        self._path, self._state = _hidden(out)
        self._pending = bytearray()
        self._fd = -1

    def __enter__(self) -> Self:
        state = self._read_state()
        if self.out.exists():  # killed at the very end, or not ours
            if self._path.exists() or not (state and state["finished"] and state["key"] == self.key):
                raise _exists(self.out)
            self.saved, self.is_finished = state["saved"], True
            return self
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreExists(f"{self.out}: another process is writing it. Choose another name, or wait") from None
        except OSError:  # a file system without locks
            pass
        if not (self._path.exists() and os.path.samestat(os.fstat(self._fd), os.stat(self._path))):
            os.close(self._fd)  # another process has just finished it
            raise _exists(self.out)
        remove_unpublished(self._state)
        self._resume(self._read_state())
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            if not self._state.exists():
                self._path.unlink(missing_ok=True)  # there is nothing to go on from
            os.close(self._fd)

    def write(self, text: bytes) -> None:
        self._pending += text
        while len(self._pending) >= CHUNK_BYTES:  # whatever the sizes of the pieces: the same members
            self._put(bytes(self._pending[:CHUNK_BYTES]))
            del self._pending[:CHUNK_BYTES]

    def save(self, saved: Mapping[str, object], *, finished: bool = False) -> None:
        """Keep all that was written so far, and with it where the writer is, as JSON."""
        with no_space(self.out, _GO_ON):
            os.fsync(self._fd)
        state = {
            "key": self.key,
            "bytes": os.lseek(self._fd, 0, os.SEEK_CUR),
            "pending": self._pending.decode("latin-1"),
            "saved": saved,
            "finished": finished,
        }
        publish(self._state, json.dumps(state).encode())

    def finish(self, saved: Mapping[str, object]) -> None:
        """All is written."""
        if self._pending:
            self._put(bytes(self._pending))
            self._pending.clear()
        self.save(saved, finished=True)
        self.saved, self.is_finished = saved, True

    def publish(self) -> None:
        """Let `out` appear."""
        if self._fd >= 0:
            os.rename(self._path, self.out)
            sync_folder(self.out.parent)
        self._state.unlink()

    def _put(self, text: bytes) -> None:
        if self.out.name.endswith(".gz"):
            deflate = gzipping()
            text = deflate.compress(text) + deflate.flush()
        left = memoryview(text)
        with no_space(self.out, _GO_ON):
            while left:
                left = left[os.write(self._fd, left) :]

    def _resume(self, state: Mapping[str, Any] | None) -> None:
        whole = os.fstat(self._fd).st_size
        if state is not None and (state["key"] != self.key or whole < state["bytes"]):
            why = config_diff(state["key"], self.key) or "what was written of it is gone"
            say(f"{self.out}: begun before, but it cannot go on ({why}); starting anew")
            state = None
        if state is None:
            self._state.unlink(missing_ok=True)
            os.truncate(self._fd, 0)
            return
        os.truncate(self._fd, state["bytes"])  # what was written after the state was saved is written again
        os.lseek(self._fd, 0, os.SEEK_END)
        self._pending += state["pending"].encode("latin-1")
        self.saved, self.is_finished = state["saved"], state["finished"]

    def _read_state(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._state.read_bytes())
        except (FileNotFoundError, ValueError):
            return None


def check_new(out: Path) -> None:
    """Refuse, before anything is read, what `PartialFile` would refuse."""
    if not out.absolute().parent.is_dir():
        raise BadSetting(f"{out}: there is no such folder. Make it: mkdir -p {out.parent}")
    path, state = _hidden(out)
    if out.exists() and (path.exists() or not state.exists()):
        raise _exists(out)


def _hidden(out: Path) -> tuple[Path, Path]:
    return out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.state")


def _exists(out: Path) -> StoreExists:
    return StoreExists(f"{out}: already there. Choose another name, or remove it")
