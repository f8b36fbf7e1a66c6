"""Files appear complete or not at all, one process at a time makes them, and a killed writer resumes exactly."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from millstream.core.files import (
    is_complete,
    locked,
    make_once,
    publish,
    publish_folder,
    publishing,
    publishing_folder,
    remove_unpublished,
)
from millstream.core.outputs import PartialOutput, TextOutput, check_new, partial_folder, publishing_text
from millstream.errors import BadSetting, ConfigMismatch, StoreExists, StoreFull

pytestmark = pytest.mark.on_disk


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Another process, which runs this code and is talked to by lines."""
    head = "import os, signal, sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- publishing


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_writer_killed_before_its_file_is_complete_leaves_the_old_bytes(tmp_path: Path, step: str):
    file = tmp_path / "file"
    publish(file, b"old")
    code = f"""
        from millstream.core.files import publish
        os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        publish(path, b"new" * 100_000)
    """
    process = start(code, file)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"old"
    remove_unpublished(file)
    assert names_in(tmp_path) == ["file"]


def test_an_error_within_the_block_leaves_the_old_bytes_and_nothing_else(tmp_path: Path):
    publish(tmp_path / "file", b"old")
    with pytest.raises(ZeroDivisionError), publishing(tmp_path / "file") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_bytes() == b"old" and names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_of_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def full(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    publish(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull) as error:
        publish(tmp_path / "file", b"new")
    assert str(tmp_path / "file") in str(error.value) and os.strerror(code).lower() in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_bytes() == b"old" and names_in(tmp_path) == ["file"]


def test_a_text_file_appears_when_it_is_complete_and_replaces_nothing(tmp_path: Path):
    for name in ("text", "text.gz"):
        with publishing_text(tmp_path / name) as write:
            write(b"one ")
            write(memoryview(b"two"))
            assert not (tmp_path / name).exists()
    assert (tmp_path / "text").read_bytes() == b"one two"
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"one two"
    with pytest.raises(StoreExists, match="text"), publishing_text(tmp_path / "text"):
        raise AssertionError("it is there")


def test_a_folder_appears_when_it_is_complete_and_replaces_only_an_empty_one(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with publishing_folder(out) as folder:
        (folder / "a").write_text("a")
        assert names_in(out) == []
    assert names_in(out) == ["a"]
    with pytest.raises(StoreExists, match="out"), publishing_folder(out) as folder:
        (folder / "b").write_text("b")
    assert names_in(out) == ["a"] and names_in(tmp_path) == ["out"]


# -- folders made once


def test_one_process_makes_the_folder_while_the_other_waits_for_it(tmp_path: Path):
    code = """
        from millstream.core.files import make_once

        def make(folder):
            print("making", flush=True)
            input()
            (folder / "a").write_text("made by another")

        make_once(path, make, notify=print)
    """
    out = tmp_path / "out"
    maker = start(code, out)
    assert maker.stdout is not None and maker.stdout.readline() == "making\n"
    told: list[str] = []

    def waits(text: str) -> None:
        told.append(text)
        assert maker.stdin is not None and not out.exists()
        maker.stdin.write("\n")
        maker.stdin.flush()

    def never(folder: Path) -> None:
        raise AssertionError("made twice")

    assert make_once(out, never, notify=waits) == out
    assert (out / "a").read_text() == "made by another"
    assert len(told) == 1 and str(out) in told[0]
    maker.communicate()
    assert maker.returncode == 0


def test_a_folder_of_a_killed_process_is_not_taken_for_complete(tmp_path: Path):
    code = """
        from millstream.core.files import make_once

        def make(folder):
            (folder / "a").write_text("half")
            print("making", flush=True)
            input()

        make_once(path, make, notify=print)
    """
    out = tmp_path / "out"
    maker = start(code, out)
    assert maker.stdout is not None and maker.stdout.readline() == "making\n"
    kill(maker)
    assert not out.exists()
    told: list[str] = []
    make_once(out, lambda folder: (folder / "b").write_text("whole") and None, notify=told.append)
    assert is_complete(out) and (out / "b").read_text() == "whole" and not (out / "a").exists()
    assert told == []  # the lock ended with the process
    assert names_in(tmp_path) == ["out", "out.lock"]


def test_a_folder_that_lost_bytes_is_made_again(tmp_path: Path):
    out = tmp_path / "out"
    publish_folder(out, lambda folder: (folder / "a").write_text("whole") and None)
    assert is_complete(out)
    os.truncate(out / "a", 2)
    assert not is_complete(out)
    make_once(out, lambda folder: (folder / "a").write_text("again") and None, notify=print)
    assert (out / "a").read_text() == "again"


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path, name: str):
    (tmp_path / "folder").mkdir()
    code = """
        from millstream.core.files import locked
        with locked(path):
            print("locked", flush=True)
            input()
    """
    holder = start(code, tmp_path / name)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    waited: list[bool] = []
    with locked(tmp_path / name, on_wait=lambda: (waited.append(True), kill(holder))):
        assert waited == [True]


# -- resuming


def test_committed_progress_is_resumed_and_later_files_are_removed(tmp_path: Path):
    out = tmp_path / "out"
    numbers = np.arange(5, dtype=np.int32)
    with PartialOutput(out, {"seed": 1}) as output:
        assert output.load() is None
        (output.path / "part").write_bytes(b"12345")
        output.commit({"numbers": numbers, "count": np.int64(3)}, {"part": 3})
        (output.path / "later").write_bytes(b"x")
    with PartialOutput(out, {"seed": 1}) as output:
        state = output.load()
        assert state is not None and state["count"] == 3
        assert state["numbers"].dtype == np.int32 and state["numbers"].tolist() == numbers.tolist()
        assert names_in(output.path) == ["journal.json", "part"]
        output.remove()
    assert names_in(tmp_path) == []


def test_without_a_commit_nothing_is_left_behind(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), PartialOutput(tmp_path / "out", {}) as output:
        (output.path / "part").write_bytes(b"12345")
        raise KeyboardInterrupt
    assert names_in(tmp_path) == []


def test_other_settings_are_an_error_that_names_them_and_the_progress_is_kept(tmp_path: Path):
    out = tmp_path / "out"
    with PartialOutput(out, {"seed": 1, "file": ["a", 7]}) as output:
        output.commit({"record": 9}, {})
    with pytest.raises(ConfigMismatch, match=r"out\.partial.*seed: 1 -> 2") as error:
        PartialOutput(out, {"seed": 2, "file": ("a", 7)})
    assert "file" not in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigMismatch, match=r"file: .*'a', 7.*--rebuild"):
        PartialOutput(out, {"seed": 1, "file": []}, start_over="start over with --rebuild")
    with PartialOutput(out, {"seed": 1, "file": ["a", 7]}) as output:
        assert output.load() == {"record": 9}
    with PartialOutput(out, {"seed": 2}, rebuild=True) as output:
        assert output.load() is None


def test_a_second_process_is_refused_until_the_first_one_is_killed(tmp_path: Path):
    code = """
        from millstream.core.outputs import PartialOutput
        with PartialOutput(path, {}) as output:
            output.commit({"record": 1}, {})
            print("writing", flush=True)
            input()
    """
    out = tmp_path / "out"
    writer = start(code, out)
    assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    with pytest.raises(StoreExists, match=r"out\.partial"):
        PartialOutput(out, {})
    kill(writer)
    with PartialOutput(out, {}) as output:
        assert output.load() == {"record": 1}


@pytest.mark.parametrize("damage", ["part cut", "part gone", "journal torn", "another version"])
def test_unusable_progress_is_reported_and_discarded(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    with PartialOutput(out, {}) as output:
        (output.path / "part").write_bytes(b"12345")
        output.commit({}, {"part": 5})
    journal = partial_folder(out) / "journal.json"
    if damage == "part cut":
        os.truncate(partial_folder(out) / "part", 4)
    elif damage == "part gone":
        (partial_folder(out) / "part").unlink()
    elif damage == "journal torn":
        os.truncate(journal, 10)
    else:
        journal.write_text(json.dumps({**json.loads(journal.read_text()), "version": 1}))
    with PartialOutput(out, {}) as output:
        assert output.load() is None and names_in(output.path) == []
    assert "out.partial" in capsys.readouterr().err


LINES = [b"line %d of %s\n" % (number, b"text" * (number % 7)) for number in range(200)]


def write_lines(out: Path, *, until: int, save_each: int = 1) -> bool:
    """Write the lines up to a given one, or all; returns whether the file is complete."""
    with TextOutput(out, {"lines": 200}, chunk_bytes=100) as file:
        first = int(file.saved["line"]) if file.saved else 0
        for number in range(first, min(until, 200)):
            file.write(LINES[number])
            if number % save_each == 0:
                file.save({"line": number + 1})
        if until < 200:
            return False
        file.finish({"line": 200})
        file.publish()
    return True


@pytest.mark.parametrize("name", ["text", "text.gz"])
@pytest.mark.parametrize("save_each", [1, 7])
def test_interrupted_anywhere_a_text_has_the_same_bytes(tmp_path: Path, name: str, save_each: int):
    write_lines(tmp_path / f"whole.{name}", until=200)
    for until in range(3, 220, 23):
        write_lines(tmp_path / name, until=until, save_each=save_each)
    whole = (tmp_path / f"whole.{name}").read_bytes()
    assert (tmp_path / name).read_bytes() == whole
    assert (gzip.decompress(whole) if name.endswith(".gz") else whole) == b"".join(LINES)
    assert name == "text" or whole.count(b"\x1f\x8b\x08") > 30  # members of 100 bytes of text
    assert names_in(tmp_path) == [name, f"whole.{name}"]


# A process without threads forks writers that die at every step, and resumes each.
KILLED = """
from millstream.core.outputs import TextOutput, check_new
from millstream.errors import StoreExists

CALLS = "rename write truncate unlink rmdir mkdir"
expected = b"line 0\\nline 1\\nline 2\\nline 3\\n"

def write():
    with TextOutput(path, {"lines": 4}, chunk_bytes=10) as file:
        for number in range(int(file.saved["line"]) if file.saved else 0, 4):
            file.write(b"line %d\\n" % number)
            if number % 2:
                file.save({"line": number + 1})
        if not file.is_finished:
            file.finish({"line": 4})
        file.publish()

def write_and_die(at, when):
    step = 0
    def dying(real):
        def call(*given, **named):
            nonlocal step
            step += 1
            if (step, when) == (at, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*given, **named)
            if step == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call
    for name in CALLS.split():
        setattr(os, name, dying(getattr(os, name)))
    write()
    os._exit(0)

deaths, ended = 0, False
while not ended:
    for when in ("before", "after"):
        child = os.fork()
        if not child:
            write_and_die(deaths // 2 + 1, when)
        status = os.waitpid(child, 0)[1]
        ended = status == 0
        assert status in (0, signal.SIGKILL), status
        deaths += 1
        try:
            check_new(path)
            write()
            assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
        except StoreExists:  # it died after all was done
            assert ended or not (path.parent / "text.partial" / "journal.json").exists()
        assert path.read_bytes() == expected
        path.unlink()
print(deaths)
"""


def test_killed_before_and_after_any_step_a_text_has_the_same_bytes(tmp_path: Path):
    process = start(KILLED, tmp_path / "text")
    told = process.communicate()[0]
    assert process.returncode == 0 and int(told) > 20


def test_an_existing_output_or_a_missing_folder_is_an_error_before_any_work(tmp_path: Path):
    (tmp_path / "text").write_text("mine")
    with pytest.raises(StoreExists, match="text"):
        check_new(tmp_path / "text")
    with pytest.raises(BadSetting, match="nowhere"):
        check_new(tmp_path / "nowhere" / "text")
    with pytest.raises(StoreExists, match="text"), TextOutput(tmp_path / "text", {}):
        raise AssertionError("it is there")
    assert names_in(tmp_path) == ["text"] and (tmp_path / "text").read_text() == "mine"
