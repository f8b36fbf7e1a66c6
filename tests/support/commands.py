"""The command line in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from millstream.cli import main


def run_here(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # has a buffer, as stdout does
    err = io.StringIO()
    command = ["millstream", *map(str, arguments)]
    with mock.patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        else:
            code = 0
    return code, out.buffer.getvalue().decode(), err.getvalue()  # pyright: ignore
