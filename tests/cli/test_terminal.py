"""What a person sees and types: progress on a real pseudo-terminal, logs, help, completion, Ctrl-C, errors."""

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
import millstream.core.console as console
from millstream.cli.app import make_app
from millstream.core.config import list_settings
from millstream.reads.kind import ReadSettings
from millstream.traces.kind import (
    EvaluateSettings,
    ExtractSettings,
    FeaturizeSettings,
    LabelSettings,
    TrainSettings,
)
from support.commands import run_here
from support.extras import need
from support.making import flip, place_of

GROUP = typer.main.get_command(make_app())
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def on_terminal(*command: str, columns: int = 80, until: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and output of a command on its own terminal. Enter is pressed when `until` appears."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environment}
    env = {name: value for name, value in env.items() if value}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece
        if until and re.search(until, shown.decode(errors="ignore")):
            os.write(ours, b"\n")
            until = ""
    os.close(ours)
    return process.wait(), shown.decode()


WORK = """
import time
from millstream.core.console import progress, say
looks = []

def look():  # called at most once per second, before progress is shown
    looks.append(time.monotonic())
    return 21_000_000, 50_000_000

with progress("a job with a name", 4000, unit="reads", memory=look, line_s=0.5) as update:
    for done in range(4000):
        update(done, "shard 3, and a note that is longer than any line of a terminal")
        time.sleep(0.01)
        if len(looks) == 2:
            say("a message [in] between")
            break
say("finished")
"""


def drawn(shown: str) -> list[str]:
    """The lines that were drawn over each other."""
    return [line for line in re.split(r"\r\x1b\[2K|\r\n|\r", shown) if "a job" in line]


# Progress


def test_on_a_terminal_progress_is_one_line_that_fits_and_disappears():
    code, shown = on_terminal(sys.executable, "-c", WORK, columns=60, NO_COLOR="1", FORCE_COLOR="")
    lines = drawn(shown)
    assert code == 0 and lines
    assert all(len(line) < 60 and CONTROL.search(line) is None for line in lines), lines
    assert re.match(r"a job with a name \d+%, ", lines[-1])
    assert "\r\x1b[2Ka message [in] between\r\n" in shown
    assert CONTROL.sub("", shown[: shown.index("finished")]).endswith("[2K")  # nothing of it remains
    assert "\x1b[?25l" not in shown  # the cursor is never hidden


def test_a_dumb_terminal_and_a_log_get_no_control_characters():
    code, shown = on_terminal(sys.executable, "-c", WORK, TERM="dumb", FORCE_COLOR="")
    assert code == 0 and CONTROL.search(shown.replace("\r\n", "\n")) is None
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True)
    assert CONTROL.search(done.stderr) is None
    lines = [line for line in done.stderr.splitlines() if not line.startswith("a job with a name: ")]
    assert lines == ["a message [in] between", "finished"]


def test_colour_is_for_terminals_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.colorize("x", "1", Terminal()) == "\x1b[1mx\x1b[0m"
    assert console.colorize("x", "1", io.StringIO()) == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console.colorize("x", "1", io.StringIO()) == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.colorize("x", "1", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert console.colorize("x", "1", Terminal()) == "x"


def test_a_log_gets_a_line_per_interval_with_amount_time_left_memory_and_rate():
    log, done = io.StringIO(), 4_000_000
    with (
        redirect_stderr(log),
        console.progress("index", 10_000_000, unit="bytes", memory=lambda: (5, 9), line_s=0.02) as update,
    ):
        while "left" not in log.getvalue():
            update(done := min(done + 1000, 9_000_000), "shard 7")
            time.sleep(0.01)
    line = next(line for line in log.getvalue().splitlines() if "left" in line)
    facts = r"index: \d\.\d of 10\.0 MB \(\d+%\), \d.* left, RAM 5 of 9 B, \d.* [kMG]?B/s, shard 7"
    assert re.fullmatch(facts, line), line


def test_quick_work_shows_nothing():
    code, shown = on_terminal(
        sys.executable, "-c", "from millstream.core.console import progress\nwith progress('x', 3) as p: p(3)"
    )
    assert (code, shown) == (0, "")


def test_concurrent_jobs_share_the_terminal():
    nested = (
        "from millstream.core.console import progress\n"
        "with progress('outer job', 9) as outer, progress('inner job', 9) as inner:\n"
        "    outer(1)\n    inner(1)\n    input()"
    )
    both = r"outer job [^\r]*\r\n[^\r]*inner job|inner job [^\r]*\r\n[^\r]*outer job"
    code, shown = on_terminal(sys.executable, "-c", nested, until=both, NO_COLOR="1", FORCE_COLOR="")
    assert code == 0 and re.search(both, shown)


# Help


def test_millstream_without_arguments_lists_the_commands_in_data_flow_order():
    code, out, err = run_here()
    assert (code, err) == (0, "") and out == run_here("--help")[1]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split()[1] for line in lines if re.match(r"│ [a-z]+  ", line)]
    assert shown == GROUP.list_commands(None)
    assert shown[0] == "demo" and shown.index("extract") < shown.index("train") < shown.index("verify")
    assert "millstream demo" in " ".join(lines[-4:]) and "docs/" in " ".join(lines[-4:])


def test_the_help_of_every_command_fits_in_80_columns():
    for name in GROUP.commands:
        code, out, err = run_here(name, "--help")
        assert (code, err) == (0, ""), name
        assert max(map(len, out.splitlines())) <= 80, name


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ("extract", [ExtractSettings]),
        ("label", [LabelSettings]),
        ("featurize", [FeaturizeSettings]),
        ("evaluate", [EvaluateSettings]),
        ("train", [TrainSettings, ReadSettings]),
    ],
)
def test_help_lists_every_setting(command: str, kinds: list[type]):
    out = run_here(command, "--help")[1]
    for setting in (setting for kind in kinds for setting in list_settings(kind)):
        assert re.search(rf"^│ {re.escape(setting.name)}=", out, re.MULTILINE), setting.name
        assert setting.help.split()[0] in out


def test_typer_completes_commands_and_options():
    done = {
        words: subprocess.run(
            [sys.executable, "-m", "millstream"],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "_MILLSTREAM_COMPLETE": "complete_bash",
                "COMP_WORDS": f"millstream {words}",
                "COMP_CWORD": str(len(words.split())),
            },
        ).stdout.split()
        for words in ("tra", "index --on-mis", "index --on-mismatch s")
    }
    assert list(done.values()) == [["train"], ["--on-mismatch"], ["skip"]]


# Ctrl-C


@pytest.mark.parametrize("moment", ["import", "collection"])
def test_ctrl_c_is_not_lost_where_python_would_lose_it(moment: str, tmp_path: Path):
    text = {
        "import": "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\nexcept BaseException: pass",
        "collection": textwrap.dedent(
            """
            class Last:
                def __del__(self):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(1)
            def work():
                Last()
            """
        ),
    }[moment]
    (tmp_path / "lossy.py").write_text(f"import os, signal, time\n{text}\n")
    code = "import sys; sys.argv[1:] = ['pack']\nimport millstream.__main__, lossy\nlossy.work()\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    assert re.fullmatch(r"millstream: interrupted; .*\bresume\n", done.stderr)


def test_ctrl_c_leaves_one_sentence_and_no_file(tmp_path: Path):
    genome = tmp_path / "562_Escherichia_coli.fna"
    genome.write_text(f">chromosome\n{'ACGTTGCA' * 500}\n")
    out = tmp_path / "out" / "reads.fa"
    out.parent.mkdir()
    command = [sys.executable, "-m", "millstream", "simulate", str(genome), "-o", str(out), "--reads", "99000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(out.parent.iterdir()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("millstream: interrupted; nothing was written")
    assert "Traceback" not in said and list(out.parent.iterdir()) == []


def test_interrupting_a_command_of_the_demo_interrupts_the_demo():
    from millstream.demo.stories import child_decides

    before = signal.getsignal(signal.SIGINT)
    for code, expected in ((130, KeyboardInterrupt), (3, SystemExit)):
        with pytest.raises(expected), child_decides():
            subprocess.run([sys.executable, "-S", "-c", f"raise SystemExit({code})"], check=True)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_inside_the_demo_does_not_print_the_next_step(tmp_path: Path):
    from millstream.demo.stories import child_decides

    reads = tmp_path / "reads.fa"
    reads.write_text(">a\nACGT\n")
    assert "Next: " in run_here("index", reads)[2]
    with child_decides():
        assert "Next: " not in run_here("index", reads)[2]
    assert "Next: " in run_here("index", reads)[2]


# Errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "'nonsense'.* millstream --help"),
        (["trian"], "'train'.* millstream --help"),
        (["index"], "index: .*'FILE'.* millstream index --help"),
        (["index", "a", "--nmaes"], "index: .*--nmaes.*--names"),
        (["simulate", "g", "-o", "x", "--reads", "many"], "simulate: .*'--reads'"),
        (["merge", "a"], "merge: "),
        (["train", "data=x", "modle=lstm"], "modle=lstm.* model="),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint(arguments: list[str], named: str):
    code, out, err = run_here(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert re.match(rf"millstream: .*{named}", line)


@pytest.mark.parametrize("command", ["inspect", "verify", "index", "unpack", "label", "report", "subset"])
def test_files_of_another_kind_are_an_error_of_one_line_that_names_them(command: str, tmp_path: Path):
    picture, empty, folder = tmp_path / "picture.png", tmp_path / "empty", tmp_path / "photos"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    empty.touch()
    folder.mkdir()
    (folder / "readme.txt").write_text("hello")
    more = {"unpack": [tmp_path / "out.fa"], "subset": [tmp_path / "out", "--shards", "0"]}.get(command, [])
    for path in (picture, empty, folder, tmp_path / "nowhere"):
        code, out, err = run_here(command, path, *more)
        (line,) = err.splitlines()
        assert (code, out) == (1, "") and line.startswith("millstream: ") and str(path) in line


def test_paths_with_spaces_are_quoted_in_messages(tmp_path: Path):
    reads = tmp_path / "my reads.fa"
    reads.write_text(">a\nACGT\n")
    assert f"Next: millstream inspect '{reads}'\n" in run_here("index", reads)[2]
    reads.write_text(">a\nACGTACGT\n")
    assert f"millstream index '{reads}' --rebuild" in run_here("inspect", reads)[2]
    assert f"OLD... '{tmp_path}/no store'" in run_here("label", tmp_path / "no store")[2]


def test_a_closed_pipe_is_silent_and_a_full_disk_is_one_line(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "traces") as writer:
        writer.append({"question_id": "q"})
    command = [sys.executable, "-m", "millstream", "inspect", str(tmp_path / "traces")]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"millstream: .*{os.strerror(errno.ENOSPC)}.*\n", done.stderr)


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path):
    reads = tmp_path / "reads.fa"
    reads.write_text(">a\nACGT\n")
    taken = tmp_path / "file"
    taken.write_text("")
    code, _, err = run_here("pack", reads, taken / "reads.pack")
    assert code == 1 and len(err.splitlines()) == 1 and str(taken) in err


HOSTILE = "q\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\u202eevil"
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def test_nothing_that_a_command_prints_from_data_reaches_the_terminal_as_a_control_character(tmp_path: Path):
    need("numba")
    store, reads = tmp_path / f"store {HOSTILE}", tmp_path / "reads.fa"
    with ms.TraceWriter(store) as writer:
        for number in range(3):
            record = {"question_id": f"{HOSTILE}{number}", "question": HOSTILE, HOSTILE.replace("\r", ""): number}
            writer.append({**record, "hidden": np.full((2, 3), number, np.float32)})
    reads.write_text(">q\x9b31m\u202eevil\nACGT\n", encoding="utf-8")  # FASTA with bytes below 32 is refused
    flip(*place_of(store, 1, "hidden"))
    for command in (
        ["inspect", store, "--examples", 3],
        ["inspect", store, "--json"],
        ["inspect", store, store],
        ["inspect", reads, "--examples", 1],
        ["inspect", reads, "--examples", 1, "--json"],
        ["inspect", tmp_path / HOSTILE],
        ["verify", store],
        ["verify", store, "--json"],
        ["train", f"data={store}", f"out={tmp_path / 'run'}", "model=length"],
        ["repair", store],
    ):
        _, out, err = run_here(*command)
        assert UNSAFE.findall(out + err) == [], command
        assert re.search(r"\\x9b|\\u009b", out + err), command
    _, out, _ = run_here("inspect", store, "--examples", 1, "--json")
    assert json.dumps(HOSTILE)[1:-1] in json.dumps(json.loads(out)), "JSON has the text itself, escaped"


@given(text=st.text(), extra=st.characters(categories=["Cc", "Cs"]))
def test_printable_text_is_one_line_and_keeps_everything_else(text: str, extra: str):
    shown = console.printable(text + extra)
    assert UNSAFE.findall(shown) == [] and "\n" not in shown and shown.encode()
    plain = "".join(character for character in text if character.isprintable() or character == "\t")
    assert console.printable(plain) == plain
