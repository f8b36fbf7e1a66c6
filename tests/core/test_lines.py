"""Files of JSON lines that grow: what a killed writer or a flipped bit leaves is never taken for a line."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millstream.core.lines import append_lines, read_lines
from millstream.errors import StoreFull

ROWS = [{"id": "q1", "verdict": "right"}, {"id": "Zoë\n\ud800", "verdict": None}, {"id": 3, "list": [1.5, {"a": "}"}]}]


def test_rows_come_back_as_they_were_appended(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    assert read_lines(file) == ([], 0)
    for row in ROWS:
        append_lines(file, [row])
    append_lines(file, ROWS, sync=False)
    assert read_lines(file) == ([*ROWS, *ROWS], 0)
    assert all(json.loads(line) for line in file.read_text().splitlines() if line)


def test_a_line_cut_anywhere_is_dropped_and_the_next_one_is_kept(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    append_lines(file, ROWS[:2])
    data = file.read_bytes()
    begin = data.index(b"\n") + 1
    for cut in range(begin, len(data)):
        file.write_bytes(data[:cut])
        append_lines(file, [ROWS[2]])
        whole = cut == len(data) - 1  # only the line break is missing
        assert read_lines(file) == ([ROWS[0], *ROWS[1:2][:whole], ROWS[2]], int(begin < cut and not whole))


def test_every_flipped_bit_is_noticed(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    append_lines(file, [{"id": "q1", "verdict": "right"}])
    data = file.read_bytes()
    for place in range(data.index(b', "crc32c"')):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert read_lines(file) == ([], 1)


def test_lines_of_other_programs_need_no_checksum(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"id": "q1"}\n\n[1]\nnonsense\n{"id": "q2"}')
    append_lines(file, [{"id": "q3"}])
    assert read_lines(file) == ([{"id": "q1"}, {"id": "q2"}, {"id": "q3"}], 2)


def test_many_writers_at_once_lose_nothing(tmp_path: Path):
    file = tmp_path / "lines.jsonl"

    def write(name: int) -> None:
        for number in range(50):
            append_lines(file, [{"name": name, "number": number, "text": "x" * 300}], sync=False)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows, num_damaged = read_lines(file)
    assert num_damaged == 0
    assert sorted((row["name"], row["number"]) for row in rows) == [(n, i) for n in range(4) for i in range(50)]


def test_a_killed_writer_loses_nothing_that_it_appended(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from millstream.core.lines import append_lines\n"
        "for number in range(10**9):\n"
        "    append_lines(Path(sys.argv[1]), [{'number': number}], sync=False); print(number, flush=True)"
    )
    file = tmp_path / "lines.jsonl"
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    while int(last := child.stdout.readline()) < 100:
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    last = [last, *child.stdout.read().splitlines()][-1]
    child.stdout.close()
    numbers = [row["number"] for row in read_lines(file)[0]]
    assert numbers == list(range(len(numbers))) and len(numbers) > int(last)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "lines.jsonl"
    append_lines(file, ROWS)
    before = file.read_bytes()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 5:
            return write(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFull, match=r"lines\.jsonl"):
        append_lines(file, [{"id": "0123456"[:4]}])
    assert file.read_bytes() == before
