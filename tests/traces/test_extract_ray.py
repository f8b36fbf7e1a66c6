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
from extracting import (
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
from making import same

import millstream as ms
from commands import run_here as run
from extras import need
from millstream.store.layout import list_shards

need("transformers")
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

COUNT = 60
LONGER = {**SETTINGS, "max_new_tokens": 16}


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
        out, err = driver.communicate(timeout=240)
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


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two actors need two cores")
def test_with_the_driver_killed_and_then_an_actor_the_traces_are_those_of_one_process(
    cluster: Cluster, llama: Path, tmp_path: Path
):
    questions = write_questions(tmp_path / "q.jsonl", count=COUNT)
    whole, store = tmp_path / "whole", tmp_path / "store"
    ms.extract(questions, whole, model=str(llama), **LONGER)
    enough = Watch(whole).bytes_of(2)
    command = ["-m", "millstream", "extract", questions, store, *as_arguments({"model": llama, **LONGER})]
    command += ["--engine", "ray", "--workers", "2"]

    driver = cluster.start(*command)
    cluster.wait_for_writer(store, driver, num_bytes=enough)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not cluster.actors(), what="the actors to die with their driver", pause=0.05)
    wait_until(lambda: recovered_ids(store) and not list_shards(store)[1], what="their shards to be let go", pause=0.05)
    before = recovered_ids(store)
    assert 0 < len(set(before)) == len(before) < COUNT

    driver = cluster.start(*command, "--json")
    actor = cluster.wait_for_writer(store, driver, num_bytes=enough)
    os.kill(actor, signal.SIGKILL)
    out, err = cluster.finish(driver)
    assert json.loads(out)["records"] == COUNT
    assert f"{len(before)} of {COUNT} done already" in err
    assert "Traceback" not in err and "Warning" not in err
    assert not cluster.actors()
    assert_all_sealed(store)
    assert_same_traces(store, whole)


BOTH = """if True:
    import sys
    import ray
    from millstream.cli import main
    from millstream.engine import Engine
    from millstream.errors import BadSource

    def square(item):
        if item == 7:
            raise BadSource("7: not this one")
        return item * item

    if __name__ == "__main__":
        ray.init(address="local", num_cpus=2, log_to_driver=False)
        for command in sys.argv[1:]:
            sys.argv = ["millstream", *command.split(" "), "--engine", "ray", "--workers", "2"]
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


def test_label_and_featurize_on_a_cluster_give_what_they_give_here(cluster: Cluster, tmp_path: Path):
    rng = np.random.default_rng(0)
    with ms.TraceWriter(tmp_path / "here", shard_records=200) as writer:
        for number in range(600):
            about = {"question_id": f"q{number}", "aliases": [f"Paris {number % 3}"], "prompt_len": 2}
            hidden = None if number % 50 == 9 else rng.normal(size=(3, 4 + number % 5, 8)).astype(np.float16)
            said = f"it is Paris {number % 4}"
            writer.append(
                {**about, "generated_answer": said, "hidden": hidden, "status": "ok" if number % 50 != 9 else "error"}
            )
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (tmp_path / "both.py").write_text(BOTH)
    commands = [f"label {tmp_path}/there", f"featurize {tmp_path}/there {tmp_path}/layers-there token=mean_answer"]
    out, err = cluster.finish(cluster.start(tmp_path / "both.py", *commands))
    assert out.endswith("True 7: not this one\n")
    assert "Traceback" not in err

    assert run("label", tmp_path / "here")[0] == 0
    assert run("featurize", tmp_path / "here", tmp_path / "layers-here", "token=mean_answer")[0] == 0
    ours, theirs = (pq.read_table(tmp_path / place / "labels.parquet") for place in ("here", "there"))
    assert ours.equals(theirs)
    here, there = (traces_by_id(tmp_path / f"layers-{place}") for place in ("here", "there"))
    assert len(here) == 588 and here.keys() == there.keys()
    assert all(same(there[name], here[name]) for name in here)
    assert_all_sealed(tmp_path / "layers-there")
