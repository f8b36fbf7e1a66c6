"""On a real Ray cluster of this machine the results are those of one process, whoever is killed amid the work."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
    Watch,
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

COUNT = 60
LONGER = {**SETTINGS, "max_new_tokens": 16}
TOKEN = "token=mean_answer"


class Cluster:
    """What a driver started by a test starts in turn, told from all else by its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._mark = f"RAY_TMPDIR={folder}".encode()
        self._drivers: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        driver = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._drivers.append(driver)
        return driver

    def finish(self, driver: subprocess.Popen[str]) -> tuple[str, str]:
        out, err = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == 0, err
        return out, err

    def processes(self) -> dict[int, str]:
        """Process id and command of all that was started."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # gone, or of somebody else
                continue
        return {pid: command for pid, command in found.items() if command}

    def wait_for_writer(self, store: Path, driver: subprocess.Popen[str], *, num_bytes: int) -> int:
        """An actor with an open shard of so many bytes."""
        files: list[Path] = []

        def look() -> bool:
            assert driver.poll() is None, "the driver ended too early"
            files[:] = [file for file in store.glob("*.open") if _size(file) >= num_bytes]
            return bool(files)

        wait_until(look, what="an actor that writes", pause=0.005)
        (writer,) = [pid for pid in self.actors() if str(files[0]) in _open_files(pid)]
        return writer

    def actors(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::_Actor")]

    def end(self) -> None:
        """End what is left of it, and nothing else: Ray's agents outlive a driver that was killed by a minute."""
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for driver in self._drivers:
            driver.communicate()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # sealed just now
        return 0


def _open_files(pid: int) -> list[str]:
    return [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of its sockets must be short
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


# Commands one after another on one cluster, which takes seconds to start.
COMMANDS = """if True:
    import json
    import sys
    import ray
    from millstream.cli.app import main
    from millstream.core.engine import Engine
    from millstream.errors import BadSource

    def square(item):
        if item == 7:
            raise BadSource("7: not this one")
        return item * item

    if __name__ == "__main__":
        ray.init(address="local", num_cpus=2, log_to_driver=False)
        for command in json.loads(sys.argv[1]):
            sys.argv = ["millstream", *command, "--engine", "ray", "--workers", "2"]
            try:
                main()
            except SystemExit as end:
                assert not end.code, command
        found = []
        try:
            for result in Engine("ray", workers=2).map(square, range(9)):
                found.append(result)
        except BadSource as error:
            print(found == [0, 1, 4, 9, 16, 25, 36][:len(found)], error)
        assert ray.is_initialized(), "a cluster that was there before is left alone"
        ray.shutdown()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two actors need two cores")
def test_with_the_driver_killed_and_then_an_actor_every_command_gives_what_it_gives_in_one_process(
    cluster: Cluster, llama: Path, tmp_path: Path
):
    questions = write_questions(tmp_path / "q.jsonl", count=COUNT)
    whole, store = tmp_path / "whole", tmp_path / "store"
    ms.extract(questions, whole, model=str(llama), **LONGER)
    enough = Watch(whole).bytes_of(2)
    extract = ["extract", str(questions), str(store), *as_arguments({"model": llama, **LONGER})]

    driver = cluster.start("-m", "millstream", *extract, "--engine", "ray", "--workers", "1")
    cluster.wait_for_writer(store, driver, num_bytes=enough)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not cluster.actors(), what="the actors to die with their driver", pause=0.05)
    wait_until(lambda: recovered_ids(store) and not list_shards(store)[1], what="their shards to be let go", pause=0.05)
    before = recovered_ids(store)
    assert 0 < len(set(before)) == len(before) < COUNT

    here, there = write_answers(tmp_path / "here"), tmp_path / "there"
    shutil.copytree(here, there)
    commands = [extract, ["label", str(there)], ["featurize", str(there), f"{tmp_path}/layers-there", TOKEN]]
    (tmp_path / "commands.py").write_text(COMMANDS)
    driver = cluster.start(tmp_path / "commands.py", json.dumps(commands))
    actor = cluster.wait_for_writer(store, driver, num_bytes=enough)
    os.kill(actor, signal.SIGKILL)
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
    """200 traces to label and to featurize, four of which failed."""
    rng = np.random.default_rng(0)
    with ms.TraceWriter(path, shard_records=70) as writer:
        for number in range(200):
            about = {"question_id": f"q{number}", "aliases": [f"Paris {number % 3}"], "prompt_len": 2}
            hidden = None if number % 50 == 9 else rng.normal(size=(3, 4 + number % 5, 8)).astype(np.float16)
            said = f"it is Paris {number % 4}"
            writer.append(
                {**about, "generated_answer": said, "hidden": hidden, "status": "ok" if number % 50 != 9 else "error"}
            )
    return path
