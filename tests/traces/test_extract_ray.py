"""On a real Ray cluster on this machine, the results are those of one process, even if driver or actors are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.traces.store.manifest import list_shards
from support.commands import run_here as run
from support.effort import PATIENCE_S
from support.extracting import (
    SETTINGS,
    as_arguments,
    assert_all_sealed,
    assert_same_traces,
    recovered_ids,
    traces_by_id,
    wait_until,
    write_questions,
)
from support.extras import need

need("transformers")
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

DRIVER = Path(__file__).parents[1] / "support" / "ray_driver.py"
COUNT = 40
TOKEN = "token=mean_answer"


class Cluster:
    """The processes that a driver starts, recognised by their temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._mark = f"RAY_TMPDIR={folder}".encode()
        self._stop = folder / "stop"
        self._drivers: list[subprocess.Popen[str]] = []

    def start(self, *commands: Sequence[str], shared: bool) -> subprocess.Popen[str]:
        """Start a driver; the first worker to write a trace stops, see `support/ray_driver.py`."""
        self._stop.touch()
        given = {"mark": str(self._stop), "commands": commands, "shared": shared}
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(given)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._drivers.append(driver)
        return driver

    def wait_for_stopped_actor(self, driver: subprocess.Popen[str]) -> int:
        """The process id of the actor that has written one trace and stopped."""

        def stopped() -> list[Path]:
            assert driver.poll() is None, driver.communicate()
            return list(self._stop.parent.glob(f"{self._stop.name}.*"))

        wait_until(stopped, what="an actor that writes", pause=0.05)
        (mark,) = stopped()
        mark.unlink()
        return int(mark.suffix[1:])

    def finish(self, driver: subprocess.Popen[str]) -> tuple[str, str]:
        out, err = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == 0, err
        return out, err

    def processes(self) -> dict[int, str]:
        """Process id and command of every process."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # has ended, or belongs to another user
                continue
        return {pid: command for pid, command in found.items() if command}

    def actors(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::_Actor")]

    def end(self) -> None:
        """Kill the remaining processes, and no others: Ray's agents outlive a killed driver by a minute."""
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for driver in self._drivers:
            driver.communicate()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of its sockets must be short
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two actors need two cores")
def test_every_command_gives_the_results_of_one_process_even_if_driver_and_actor_are_killed(
    cluster: Cluster, llama: Path, tmp_path: Path
):
    questions = write_questions(tmp_path / "q.jsonl", count=COUNT)
    whole, store = tmp_path / "whole", tmp_path / "store"
    ms.extract(questions, whole, model=str(llama), **SETTINGS)
    extract = ["extract", str(questions), str(store), *as_arguments({"model": llama, **SETTINGS})]

    driver = cluster.start([*extract, "--engine", "ray", "--workers", "1"], shared=False)
    actor = cluster.wait_for_stopped_actor(driver)
    driver.kill()
    driver.communicate()
    os.kill(actor, signal.SIGCONT)  # a stopped process could not notice that its driver is dead
    wait_until(lambda: not cluster.actors(), what="the actors to die with their driver", pause=0.05)
    wait_until(lambda: recovered_ids(store) and not list_shards(store)[1], what="their shards to be let go", pause=0.05)
    before = recovered_ids(store)
    assert 0 < len(set(before)) == len(before) < COUNT

    here, there = write_answers(tmp_path / "here"), tmp_path / "there"
    shutil.copytree(here, there)
    commands = [extract, ["label", str(there)], ["featurize", str(there), f"{tmp_path}/layers-there", TOKEN]]
    on_two = ["--engine", "ray", "--workers", "2"]
    driver = cluster.start(*([*command, *on_two] for command in commands), shared=True)
    os.kill(cluster.wait_for_stopped_actor(driver), signal.SIGKILL)
    out, err = cluster.finish(driver)
    assert f"{len(before)} of {COUNT} done already" in err
    assert "Traceback" not in err and "Warning" not in err
    assert out.endswith("True 7: not this one\n")
    wait_until(lambda: not cluster.actors(), what="the actors to end", pause=0.05)
    assert_all_sealed(store)
    assert_same_traces(store, whole)

    assert run("label", here)[0] == 0
    assert run("featurize", here, tmp_path / "layers-here", TOKEN)[0] == 0
    assert pq.read_table(here / "labels.parquet").equals(pq.read_table(there / "labels.parquet"))
    assert len(traces_by_id(tmp_path / "layers-here")) == 196
    assert_same_traces(tmp_path / "layers-there", tmp_path / "layers-here")
    assert_all_sealed(tmp_path / "layers-there")


def write_answers(path: Path) -> Path:
    """200 traces to label and featurize, four of them failed."""
    rng = np.random.default_rng(0)
    with ms.TraceWriter(path, shard_records=70) as writer:
        for number in range(200):
            about = {"question_id": f"q{number}", "aliases": [f"Paris {number % 3}"], "prompt_len": 2}
            hidden = None if number % 50 == 9 else rng.normal(size=(3, 4 + number % 5, 8)).astype(np.float16)
            answer = f"it is Paris {number % 4}"
            writer.append(
                {**about, "generated_answer": answer, "hidden": hidden, "status": "ok" if number % 50 != 9 else "error"}
            )
    return path
