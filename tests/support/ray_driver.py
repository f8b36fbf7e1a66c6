"""Runs commands on Ray, the first of them with a worker that stops itself. Run as a script:

    python ray_driver.py '{"mark": PATH, "commands": [[...], ...], "shared": BOOL}'

If the file at `mark` exists, the first worker to write a trace renames it to `mark.PID` and stops (SIGSTOP), so a test
can kill the worker or this driver at a known point, however slow the machine is. With `shared`, all commands run on
one cluster that this script starts; otherwise the command starts its own.
"""

import json
import os
import signal
import sys
from typing import Any

from millstream.cli.app import main
from millstream.core.engine import Engine
from millstream.errors import BadSource
from millstream.traces import extract

GIVEN = json.loads(sys.argv[1])


class StoppingWorker(extract.ExtractWorker):
    """Ray pickles a class of `__main__` by value, so it reaches the workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        append = self._writer.append

        def append_and_stop(record: Any) -> None:
            append(record)
            try:
                os.rename(GIVEN["mark"], f"{GIVEN['mark']}.{os.getpid()}")
            except FileNotFoundError:  # another worker has stopped
                return
            os.kill(os.getpid(), signal.SIGSTOP)

        self._writer.append = append_and_stop


def square(item: int) -> int:
    if item == 7:
        raise BadSource("7: not this one")
    return item * item


def run_on_one_cluster() -> None:
    import ray

    ray.init(address="local", num_cpus=2, log_to_driver=False)
    run_commands()
    found: list[int] = []
    try:
        for result in Engine("ray", workers=2).map(square, range(9)):
            found.append(result)
    except BadSource as error:
        print(found == [0, 1, 4, 9, 16, 25, 36][: len(found)], error)
    assert ray.is_initialized(), "a cluster that existed before is left running"
    ray.shutdown()


def run_commands() -> None:
    for command in GIVEN["commands"]:
        sys.argv = ["millstream", *command]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    extract.ExtractWorker = StoppingWorker
    run_on_one_cluster() if GIVEN["shared"] else run_commands()
