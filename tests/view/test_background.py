"""Background work for pages: runs once, and never while the process exits."""

import subprocess
import sys
import threading

import pytest

from millstream.errors import BadSource
from millstream.view import Later
from support.effort import PATIENCE_S

AT_THE_END = """
import atexit, time
def begin():  # runs after all that was registered later
    late.start()
    time.sleep(0.2)
atexit.register(begin)
from millstream.view import Later
late = Later(lambda: print("ran"))
"""


def test_no_work_starts_while_the_process_exits():
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_an_error_is_raised_to_every_caller_and_the_work_runs_once():
    tried: list[int] = []

    def fail() -> None:
        tried.append(1)
        raise BadSource("gone")

    later = Later(fail)
    for _ in range(3):
        with pytest.raises(BadSource, match="gone"):
            later.soon(None)
    assert tried == [1]


def test_repeated_delayed_starts_wait_in_one_thread():
    done = threading.Event()
    later = Later(done.set)
    before = threading.active_count()
    for _ in range(20):
        later.start(0.3)
    assert threading.active_count() <= before + 1
    assert done.wait(PATIENCE_S)
