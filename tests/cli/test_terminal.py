"""What a person sees and types: progress on a real pseudo-terminal, logs, help, completion, Ctrl-C, errors."""

import io
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

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import millstream.console as console
from commands import run_here
from millstream.cli import app
from millstream.cli_complete import BASH, SCRIPTS, candidates, install
from millstream.cli_help import FLOW
from millstream.cli_settings import groups_of, keys_of, names_of, values_of
from millstream.progress_line import Pace, facts_of, fitted_line, plain_line

GROUP = typer.main.get_command(app)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def on_terminal(*command: str, columns: int = 80, **environment: str) -> tuple[int, str]:
    """Exit code of a command on a terminal of its own, and all that was written there."""
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
    os.close(ours)
    return process.wait(), shown.decode()


WORK = """
import sys, time
from millstream.console import progress, say, within
begun = time.monotonic()
with progress("a job with a name", 4000, unit="reads", memory=within("50MB")) as update:
    for done in range(0, 1300, 10):
        update(done, "shard 3, and more than there is room for on any line of a terminal")
        time.sleep(0.01)
        if done == 800:
            say("a word in between")
say(f"took {time.monotonic() - begun}")
"""


def drawn(shown: str) -> list[str]:
    """The lines that were drawn over each other."""
    return [line for line in re.split(r"\r\x1b\[K|\r\n", shown) if "a job" in line]


# Progress


def test_on_a_terminal_progress_is_one_line_that_fits_and_goes():
    code, shown = on_terminal(sys.executable, "-c", WORK, columns=60, NO_COLOR="1", FORCE_COLOR="")
    lines = drawn(shown)
    assert code == 0 and lines
    assert all(len(line) < 60 and CONTROL.search(line) is None for line in lines), lines
    assert re.match(r"a job with a name .* of 4,000 reads", lines[-1])
    seconds = float(shown.split("took ")[1])
    assert len(lines) <= seconds / console.REFRESH_S + 2  # a word in between has it drawn once more
    assert "\r\x1b[Ka word in between\r\n" in shown
    assert shown[: shown.index("took")].endswith("\r\x1b[K")  # nothing of it remains


def test_a_dumb_terminal_and_a_log_get_no_control_characters():
    code, shown = on_terminal(sys.executable, "-c", WORK, TERM="dumb", FORCE_COLOR="")
    assert code == 0 and CONTROL.search(shown.replace("\r\n", "\n")) is None
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True)
    assert CONTROL.search(done.stderr) is None and done.stderr.startswith("a word in between\n")


def test_colour_is_shown_on_terminals_only_unless_it_is_asked_for_or_not_wanted(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.painted("x", "1", Terminal()) == "\x1b[1mx\x1b[0m"
    assert console.painted("x", "1", io.StringIO()) == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console.painted("x", "1", io.StringIO()) == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.painted("x", "1", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert console.painted("x", "1", Terminal()) == "x"


def test_a_log_gets_a_line_an_interval_with_all_the_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "INTERVAL_S", 0.02)
    log = io.StringIO()
    with redirect_stderr(log), console.progress("index", 10_000_000, unit="bytes", memory=lambda: (5, 9)) as update:
        update(4_000_000)
        while log.getvalue().count("\n") < 2:
            update(6_000_000, "shard 7")
            time.sleep(0.01)
    line = log.getvalue().splitlines()[-1]
    fact = r"index: 6\.0 of 10\.0 MB \(60 %\), \d.* [kMG]?B/s, \d+ s left, RAM 5 of 9 B, shard 7"
    assert re.fullmatch(fact, line), line


def test_work_that_is_done_in_a_moment_shows_nothing():
    code, shown = on_terminal(
        sys.executable, "-c", "from millstream.console import progress\nwith progress('x', 3) as p: p(3)"
    )
    assert (code, shown) == (0, "")


def test_what_was_there_before_is_not_counted_as_done_now():
    pace = Pace()
    pace.look(0, 900)  # a resumed job begins here
    assert pace.rate is None and pace.left(1000) is None
    pace.look(10, 910)
    assert pace.rate == 1 and pace.left(1000) == 90


def test_a_slow_start_is_forgotten_and_a_stall_is_noticed():
    pace = Pace()
    for second in range(60):
        pace.look(second, 0)
    for second in range(60, 120):
        pace.look(second, 100 * (second - 59))
    assert pace.rate == pytest.approx(100) and pace.left(7000) == pytest.approx(10)
    for second in range(120, 135):
        pace.look(second, 6000)
    assert pace.rate == pytest.approx(100 * 16 / 31, rel=0.1)
    for second in range(135, 170):
        pace.look(second, 6000)
    assert pace.rate is None and pace.left(7000) is None  # nothing comes: no time is named


@given(
    st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=60),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.sampled_from(["bytes", "reads"]),
    st.text(st.characters(codec="ascii", categories=["L"]), max_size=80),
    st.integers(20, 240),
)
def test_a_line_fits_any_terminal(label: str, done: int, total: int, unit: str, note: str, width: int):
    pace = Pace()
    pace.look(0, 0)
    pace.look(7, done)
    facts = facts_of(done, total, unit, pace, (10**9, 2 * 10**9))
    line = fitted_line(label, done, total, facts, note, width=width)
    assert len(line) <= width
    if width >= 100 and len(label) < 20:
        assert all(fact in line for fact in facts if fact is facts[0] or fact is facts[2])
    assert all(fact in plain_line(label, done, total, facts, note) for fact in facts)


# Help


def test_millstream_alone_shows_the_commands_along_the_flow():
    code, out, err = run_here()
    assert (code, err) == (0, "") and out == run_here("--help")[1]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    registered = set(GROUP.commands)
    order = [name for group in FLOW.values() for name in group if name in registered]
    assert set(order) == registered, "every command has its place and its line"
    shown = [line.split()[0] for line in lines if re.match(r"  [a-z]+  ", line)]
    assert shown == order
    headings = [heading for heading, group in FLOW.items() if registered & set(group)]
    assert [line for line in lines if line in FLOW] == headings
    assert "millstream demo" in " ".join(lines[-4:]) and "docs/" in " ".join(lines[-4:])


def test_the_help_of_every_command_fits_and_lists_its_settings():
    for name in GROUP.commands:
        code, out, err = run_here(name, "--help")
        assert (code, err) == (0, ""), name
        assert max(map(len, out.splitlines())) <= 80, name
        for settings in groups_of(name).values():
            assert all(re.search(rf"^  {re.escape(one.name)}=", out, re.MULTILINE) for one in settings), name


def test_settings_read_from_the_source_are_those_of_the_dataclasses():
    from millstream.config import read_settings
    from millstream.dataset.featurize import FeaturizeSettings
    from millstream.dataset.label import LabelSettings
    from millstream.errors import BadSetting
    from millstream.source.llm.settings import ExtractSettings
    from millstream.train.evaluate import EvaluateSettings
    from millstream.train.read_settings import ReadSettings
    from millstream.train.settings import TrainSettings

    kinds = {
        "extract": ExtractSettings,
        "label": LabelSettings,
        "featurize": FeaturizeSettings,
        "evaluate": EvaluateSettings,
    }
    for command, kind, typed in [
        *((command, kind, []) for command, kind in kinds.items()),
        ("train", TrainSettings, ["data=x"]),
        ("train", ReadSettings, ["data.train=x"]),
    ]:
        with pytest.raises(BadSetting, match="there is") as error:
            read_settings(kind, {"zzzzzzzz": 1})
        known = str(error.value).split("there is ")[1].split(", ")
        assert set(names_of(command, typed)) == set(known), command


def test_names_of_models_are_those_there_are():
    from millstream.model.baselines import BASELINES
    from millstream.model.read_zoo import CLASSIFIERS
    from millstream.model.zoo import NETS

    model = names_of("train", [])["model"]
    assert values_of("train", model, ["data=x"]) == [*NETS, "baselines", *BASELINES]
    assert values_of("train", model, ["data.train=x"]) == list(CLASSIFIERS)
    assert keys_of("model/zoo.py", "NETS") == list(NETS)


# Completion


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tr"], ["train"]),
        (["--ver"], ["--version"]),
        (["index", "--on-mis"], ["--on-mismatch"]),
        (["index", "--on-mismatch", ""], ["error", "skip", "null"]),
        (["index", "reads"], []),
        (["extract", "fa"], ["facts"]),
        (["extract", "facts", "fa"], []),
        (["extract", "facts", "traces", "max"], ["max_new_tokens="]),
        (["extract", "facts", "traces", "tier=p"], ["tier=probe"]),
        (["extract", "--engine", "ray", "facts", "traces", "--workers", "2", "tie"], ["tier="]),
        (["label", "traces", "rule=e"], ["rule=em"]),
        (["train", "mod"], ["model="]),
        (["train", "data.train=x", "mapp"], ["mapping="]),
        (["train", "data=x", "mapp"], []),
        (["train", "data=x", "model=lstm,gvae_"], ["model=lstm,gvae_shuffled", "model=lstm,gvae_unwired"]),
        (["train", "data.train=x", "model=k"], ["model=kmer-linear"]),
        (["train", "data=tra"], []),
        (["train", "nonsense=x"], []),
        (["train", "tensorboard="], ["tensorboard=true", "tensorboard=false"]),
        (["nonsense", "x"], []),
    ],
)  # fmt: skip
def test_words_are_completed(words: list[str], found: list[str]):
    assert candidates(GROUP, words) == found


def test_completion_answers_without_heavy_imports():
    code = (
        "import sys; sys.argv = ['millstream', 'train', 'data=x', 'model=lstm,gnn_']\n"
        "from millstream.cli import main; main()\n"
        "assert not {'numpy', 'pyarrow', 'torch', 'rich'} & set(sys.modules)"
    )
    env = {**os.environ, "_MILLSTREAM_COMPLETE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stderr == "" and done.stdout.split() == ["model=lstm,gnn_shuffled", "model=lstm,gnn_unwired"]


def test_bash_joins_what_it_took_apart_at_the_equals_sign(tmp_path: Path):
    program = tmp_path / "millstream"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m millstream "$@"\n')
    program.chmod(0o755)
    typed = [
        ("train model = ls", "lstm lstm_states"),
        ("train data.train = x.fa model =", "kmer-linear cnn lstm transformer hf"),
        ("train memo", "memory="),
        ("inde", "index"),
    ]
    asks = "\n".join(
        f"COMP_WORDS=(millstream {words}) COMP_CWORD={len(words.split())}; _millstream {program}; "
        'echo "${COMPREPLY[@]}"'
        for words, _ in typed
    )
    done = subprocess.run(["bash", "-c", f"{BASH}\n{asks}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == [answer for _, answer in typed]


def test_completion_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".bashrc").write_text("alias x=y")
    for shell, script in SCRIPTS.items():
        first, *_ = install(shell)
        assert first.read_text() == script
        assert install(shell) == [first]
    rc = (tmp_path / ".bashrc").read_text().splitlines()
    assert rc == ["alias x=y", f"source '{tmp_path}/.bash_completions/millstream.sh'"]


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
    said = "millstream: interrupted; what was done is kept: the same command goes on from there\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_ctrl_c_in_the_middle_leaves_a_sentence_and_no_file(tmp_path: Path):
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
    assert said.splitlines()[-1] == "millstream: interrupted; nothing was written: the same command begins anew"
    assert "Traceback" not in said and list(out.parent.iterdir()) == []


def test_a_demo_whose_command_was_interrupted_is_interrupted_too():
    from millstream.demo import child_decides

    before = signal.getsignal(signal.SIGINT)
    for code, expected in ((130, KeyboardInterrupt), (3, SystemExit)):
        with pytest.raises(expected), child_decides():
            subprocess.run([sys.executable, "-S", "-c", f"raise SystemExit({code})"], check=True)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_within_the_demo_leaves_what_comes_next_to_the_demo(tmp_path: Path):
    from millstream.demo import child_decides

    reads = tmp_path / "reads.fa"
    reads.write_text(">a\nACGT\n")
    assert "Next: " in run_here("index", reads)[2]
    with child_decides():
        assert "Next: " not in run_here("index", reads)[2]
    assert "Next: " in run_here("index", reads)[2]


# Errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "no such command 'nonsense'. See: millstream --help"),
        (["trian"], "Did you mean 'train'? See: millstream --help"),
        (["index"], "index: missing argument 'FILE'. See: millstream index --help"),
        (["index", "a", "--nmaes"], "index: no such option: --nmaes (Possible options: --names). See: "),
        (["simulate", "g", "-o", "x", "--reads", "many"], "simulate: invalid value for '--reads': "),
        (["merge", "a"], "merge: give the stores to merge and then the store to write: millstream merge A B OUT. "),
        (["train", "data=x", "modle=lstm"], "modle=lstm: no such setting; did you mean model=?"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_with_a_hint(arguments: list[str], says: str):
    code, out, err = run_here(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("millstream: ") and says in line


@pytest.mark.parametrize("command", ["inspect", "verify", "index", "unpack", "label", "report", "subset"])
def test_files_of_another_kind_are_refused_in_one_line_that_names_them(command: str, tmp_path: Path):
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


def test_a_path_with_spaces_can_be_pasted_from_what_is_said(tmp_path: Path):
    reads = tmp_path / "my reads.fa"
    reads.write_text(">a\nACGT\n")
    assert f"Next: millstream inspect '{reads}'\n" in run_here("index", reads)[2]
    reads.write_text(">a\nACGTACGT\n")
    assert f"millstream index '{reads}' --rebuild" in run_here("inspect", reads)[2]
    assert f"OLD... '{tmp_path}/no store'" in run_here("label", tmp_path / "no store")[2]


def test_nobody_reading_on_is_no_error_and_a_full_disk_is_one_line(tmp_path: Path):
    reads = tmp_path / "reads.fa"
    reads.write_text(">a\nACGT\n")
    command = [sys.executable, "-m", "millstream", "inspect", str(reads)]
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
    assert done.stderr == "millstream: No space left on device. Free some space and run the same command again\n"


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path):
    reads = tmp_path / "reads.fa"
    reads.write_text(">a\nACGT\n")
    taken = tmp_path / "file"
    taken.write_text("")
    code, _, err = run_here("pack", reads, taken / "reads.pack")
    assert code == 1 and len(err.splitlines()) == 1 and str(taken) in err
