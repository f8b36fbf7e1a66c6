"""Runs the command line in this process, or in an environment where it starts faster."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from millstream.cli import app


@cache
def _command() -> Any:
    """The command line, which takes ten milliseconds to make."""
    return typer.main.get_command(app.make_app())


def run_here(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # has a buffer, like stdout
    err = io.StringIO()
    command = ["millstream", *map(str, arguments)]
    made = _command()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(app, "make_app", return_value=made),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            app.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        else:
            code = 0
    return code, out.buffer.getvalue().decode(), err.getvalue()  # pyright: ignore


def lean_environment(*without: str) -> dict[str, str]:
    """For a process in which these packages are not installed; see `lean/sitecustomize.py`."""
    folders = [str(Path(__file__).parent / "lean"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), "MILLSTREAM_TESTS_WITHOUT": ",".join(without)}
