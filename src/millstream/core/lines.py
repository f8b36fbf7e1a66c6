"""Files of JSON lines that only grow, from any number of processes. A line is there whole or not at all.

    append_lines(file, [{"id": "q1", "verdict": "right"}])
    rows, num_damaged = read_lines(file)

Each line ends with its CRC-32C. What a killed process, a power cut or a full disk left of a line is not taken for one.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from millstream.core.bucket import is_url
from millstream.core.config import parse_json
from millstream.core.files import lock, no_space, sync_folder
from millstream.core.record import crc32c

_ADVICE = "Nothing that was written is lost; free some space and run the same command again"
_CHECKSUM = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}')


def append_lines(file: Path, rows: Iterable[Mapping[str, object]], *, sync: bool = True) -> None:
    """Append rows, all of them or none; with `sync`, they survive a power cut, else only the death of this process."""
    data = to_lines(rows)
    with no_space(file, _ADVICE):
        is_new = not file.exists()
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(fd, wait=True, without_locks=True)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data  # ends what a killed process left
            try:
                while data:
                    data = data[os.write(fd, data) :]
            except OSError:
                os.ftruncate(fd, size)
                raise
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    if is_new and sync:
        sync_folder(file.parent)


def to_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    """The bytes of a file with these rows."""
    return b"".join(map(_line, rows))


def read_lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, none if it does not exist, and how many lines are damaged. Lines need no checksum."""
    rows: list[dict[str, Any]] = []
    num_damaged = 0
    for line in _bytes_of(file).split(b"\n"):
        if line.strip():
            row = _row(line)
            num_damaged += row is None
            rows += [] if row is None else [row]
    return rows, num_damaged


def _bytes_of(file: Path) -> bytes:
    """All bytes, while nobody is writing."""
    try:
        if is_url(file):
            return file.read_bytes()
        with file.open("rb") as stream:
            lock(stream.fileno(), wait=True, shared=True, without_locks=True)
            return stream.read()
    except FileNotFoundError:
        return b""


def _line(row: Mapping[str, object]) -> bytes:
    text = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text)


def _row(line: bytes) -> dict[str, Any] | None:
    end = len(line) - 23
    checksum = _CHECKSUM.fullmatch(line, max(end, 0))
    text = line if checksum is None else line[:end] + b"}"
    if checksum is not None and crc32c(text) != int(checksum[1], 16):
        return None
    try:
        row = parse_json(text)
    except ValueError:
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) and "crc32c" not in row else None
