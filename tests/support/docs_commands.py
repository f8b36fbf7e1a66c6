"""Runs a `sh` block: plain millstream commands in this process, a block with shell syntax in bash."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from unittest import mock

from support.commands import lean_environment, run_here
from support.docs_blocks import ROOT, Block

# Smaller numbers for the small world of a page; the command is the same.
FEWER = {"--reads": "300"}
_ELSEWHERE = ("benchmarks/", "examples/", "docs/")  # scripts that are tested elsewhere or take hours: must exist


def run_block(block: Block) -> None:
    """Run every command of a block; each must exit with 0, or with N if its line says `# exit N`."""
    lines = commands_of(block.text)
    if any(_needs_shell(line) for line in lines):
        _run_bash(block)
        return
    for line in lines:
        expected = re.search(r"#.*\bexit (\d+)", line)
        code, output = _run_line(line)
        assert code == int(expected[1] if expected else 0), f"{block.place}: {line}\nexited with {code}: {output}"


def commands_of(text: str) -> list[str]:
    """The lines, with continuation lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def _needs_shell(line: str) -> bool:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    without_quoted = re.sub(r"'[^']*'", "", line)
    return any(set(word) <= set("();<>|&") for word in lexer) or bool(re.search(r"[$`]", without_quoted))


def _run_line(line: str) -> tuple[int, str]:
    """Exit code and output."""
    words = shlex.split(line, comments=True)
    settings = []
    while words and re.match(r"[A-Z_]+=", words[0]):
        settings.append(words.pop(0).partition("=")[::2])
    written = line.split()
    words = [found for word in words for found in (sorted(glob(word)) if word in written else []) or [word]]
    program, arguments = words[0], words[1:]
    with _environment(dict(settings)):
        if program == "millstream":
            return _run_millstream(arguments)
        if program == "python":
            return _run_python(arguments)
        if program == "pip":
            return _check_pip(arguments)
        if program == "make":
            targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            missing = {word for word in arguments if "=" not in word} - targets
            return int(bool(missing)), f"not in the Makefile: {missing}"
    return _run_child([program, *arguments])


def _run_millstream(arguments: list[str]) -> tuple[int, str]:
    if arguments[0] == "view":
        return _serve(arguments)
    if arguments[0] == "demo" or "model=smollm2" in arguments:  # take minutes, and weights; see tests/demo
        return _parse_only(arguments)
    for place, word in enumerate(arguments[:-1]):
        if word in FEWER:
            arguments[place + 1] = min(arguments[place + 1], FEWER[word], key=int)
    if any(word.startswith("devices=") or word == "--engine" for word in arguments):  # it starts processes of its own
        return _run_child([sys.executable, "-m", "millstream", *arguments])
    code, out, err = run_here(*arguments)
    return code, out + err


def _run_child(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, env=_child_environment())
    return done.returncode, done.stdout + done.stderr


def _parse_only(arguments: list[str]) -> tuple[int, str]:
    import typer.main

    from millstream.cli.app import make_app

    command = typer.main.get_command(make_app())
    try:
        command.commands[arguments[0]].make_context(arguments[0], arguments[1:])  # pyright: ignore
    except Exception as error:
        return 2, str(error)
    return 0, ""


def _serve(arguments: list[str]) -> tuple[int, str]:
    """Everything except serving; tests/view runs real servers."""
    import uvicorn

    with mock.patch.object(uvicorn.Server, "run"):
        code, out, err = run_here(*arguments)
    return code or int("http://127.0.0.1" not in err), out + err


def _run_python(arguments: list[str]) -> tuple[int, str]:
    """`python -m module ...` or `python file.py ...` in this process."""
    is_module = arguments[0] == "-m"
    name, rest = (arguments[1], arguments[2:]) if is_module else (arguments[0], arguments[1:])
    if name.startswith(_ELSEWHERE):
        return int(not (ROOT / name).exists()), f"no {name} in the repository"
    if name == "-c":
        exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})
        return 0, ""
    with mock.patch.object(sys, "argv", [name, *rest]):
        try:
            runpy.run_module(name, run_name="__main__") if is_module else runpy.run_path(name, run_name="__main__")
        except SystemExit as ended:
            return (ended.code, "") if isinstance(ended.code, int) else (int(ended.code is not None), str(ended.code))
    return 0, ""


def _check_pip(arguments: list[str]) -> tuple[int, str]:
    """`pip install 'millstream[a,b]'` has existing extras, and other packages must be pinned."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    if arguments[:1] != ["install"]:
        return 2, "pip install only"
    if arguments[1:2] == ["-c"]:  # the versions tested together
        arguments = [*arguments[:1], *arguments[3:]] if arguments[2] == "constraints.txt" else arguments
    for word in (word for word in arguments[1:] if not word.startswith("-")):
        match = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?", word)
        if not match:
            return 2, f"{word}: not a package name"
        unknown = set((match[2] or "").split(",")) - {"", *project["optional-dependencies"]}
        if match[1] not in ("millstream", ".") and match[1].lower() not in pins:
            return 1, f"{word}: not in constraints.txt"
        if unknown:
            return 1, f"{word}: unknown extra {unknown}"
    return 0, ""


def _run_bash(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.text], capture_output=True, text=True, env=_child_environment()
    )
    assert done.returncode == 0, f"{block.place} exited with {done.returncode}:\n{done.stdout}{done.stderr}"


def _child_environment() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    return {**os.environ, **lean_environment("torchmetrics"), "PATH": f"{bin_folder}:{os.environ['PATH']}"}


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables of a command; PYTHONPATH also applies to this process."""
    added = [str(Path(folder).resolve()) for folder in settings.get("PYTHONPATH", "").split(":") if folder]
    with mock.patch.dict(os.environ, settings), mock.patch.object(sys, "path", [*added, *sys.path]):
        yield
