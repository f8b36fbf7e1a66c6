"""The command line in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from millstream.cli import main


def run_here(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    command = ["millstream", *map(str, arguments)]
    with mock.patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()
