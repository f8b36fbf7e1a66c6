"""What is done so far of a file that takes long to write: a folder `OUT.partial` of growing parts, and how far each is
good. The journal is replaced as a whole, so a kill at any instant leaves one that holds."""

import base64
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from millstream.errors import ConfigMismatch, StoreExists, StoreFull
from millstream.store.layout import publish, remove_unpublished, sync_folder

SUFFIX = ".partial"
_JOURNAL = "journal.json"
_VERSION = 1


class Journal:
    """The folder of one output, locked. `terms` is what must be the same for going on: the sources, the settings.

    `rebuild` forgets what is there; `advice` is what to do when the disk is full.
    """

    def __init__(self, out: Path, terms: Mapping[str, object], *, rebuild: bool, advice: str) -> None:
        self.path = out.with_name(out.name + SUFFIX)
        self._advice = advice
        self._terms = cast(dict[str, object], json.loads(json.dumps(terms)))
        self._lock = _locked(self.path)
        try:
            remove_unpublished(out)
            if rebuild:
                self._clear(set())
            self._check_terms()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def load(self) -> dict[str, Any] | None:
        """The last state that was committed, if any; files that it does not know are removed."""
        content = self._read()
        if content is None:
            self._clear(set())
            return None
        self._clear({_JOURNAL, *content["state"]["sections"]["parts"]})
        return content["state"]

    def commit(self, state: Mapping[str, object]) -> None:
        """From now on the work goes on from here; the parts are on disk already."""
        content = {"version": _VERSION, "terms": self._terms, "state": state}
        try:
            publish(self.path / _JOURNAL, json.dumps(content, default=_array_to_json).encode())
        except StoreFull:
            raise StoreFull(f"{self.path}: no space left for it. {self._advice}") from None
        sync_folder(self.path)

    def remove(self) -> None:
        """Nothing is left to go on from."""
        shutil.rmtree(self.path)

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self.path / _JOURNAL).read_bytes(), object_hook=_array_of_json)
        except (FileNotFoundError, ValueError):
            return None
        return content if content["version"] == _VERSION else None

    def _check_terms(self) -> None:
        content = self._read()
        if content is None or content["terms"] == self._terms:
            return
        differences = "; ".join(_differences(content["terms"], self._terms))
        raise ConfigMismatch(
            f"{self.path}: belongs to an interrupted run with other sources or settings ({differences}). Repeat that "
            "command to go on with it, or start anew with --rebuild"
        )

    def _clear(self, kept: set[str]) -> None:
        for file in self.path.iterdir():
            if file.name not in kept:
                file.unlink()


def _locked(path: Path) -> int:
    """The descriptor of the folder, which no other process has; the kernel drops the lock when we die."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise StoreExists(
                f"{path}: another process is writing there. Wait until it is done, or choose another output"
            ) from None
        os.close(fd)  # the process that had it has just finished and removed it


def _differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _array_to_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return {"dtype": array.dtype.str, "base64": base64.b64encode(array.tobytes()).decode()}
    if isinstance(value, np.integer):
        return int(cast(int, value))
    raise TypeError(f"{value!r} in a journal")


def _array_of_json(value: dict[str, Any]) -> object:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(bytearray(base64.b64decode(value["base64"])), value["dtype"])
    return value
