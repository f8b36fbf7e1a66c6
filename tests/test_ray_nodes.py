"""Two Ray nodes that share nothing but an object store give the results of one process, even if one of them dies.

`extract` loses a worker; each of the other commands loses the node of the worker that begins first.
"""

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import millstream as ms
from support.classifying import make_run, write_genomes
from support.clusters import Cluster
from support.commands import run_here as run
from support.effort import THOROUGH
from support.extracting import SETTINGS, TIMINGS, as_arguments, traces_by_id, wait_until, write_questions
from support.extras import need
from support.making import same
from support.remote_stores import objects, remote, upload
from support.s3_server import make_bucket, s3_environment

need("transformers")
pytestmark = [
    pytest.mark.skipif(not THOROUGH, reason="takes half a minute: MILLSTREAM_THOROUGH=1"),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two nodes need two cores"),
]

BUCKET = "nodes"
SECRET = "secret-key-of-node-{}"


@dataclass
class Outcome:
    """What the commands wrote to `there` on two nodes, and to `here` in one process."""

    here: Path
    there: str
    nodes: list[Path]
    logs: bytes  # of Ray and of the commands
    jobs: Counter[str]  # how often each job was begun


@pytest.fixture(scope="module")
def outcome(llama: Path, s3_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of its sockets must be short
    cluster = Cluster(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            make_bucket(s3_address, BUCKET)
            yield run_everything(cluster, llama, s3_address, tmp_path_factory.mktemp("nodes"), patch)
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def run_everything(cluster: Cluster, llama: Path, address: str, path: Path, patch: pytest.MonkeyPatch) -> Outcome:
    here, there = path / "here", f"s3://{BUCKET}"
    machines = [make_machine(path, number, address) for number in range(3)]  # the first is that of the driver
    questions = write_questions(path / "q.jsonl", count=40)
    files, trained = make_run(path)
    ms.extract(questions, here / "traces", model=str(llama), **SETTINGS)
    for name, value in machines[0].items():
        patch.setenv(name, value)
    for file in files:
        remote(f"{there}/reads/{file.name}").put(file)
    upload(trained, f"{there}/run")
    (here / "reads").mkdir()
    for file in files:
        shutil.copy(file, here / "reads")
    write_genomes(here / "genomes")
    upload(here / "genomes", f"{there}/genomes")

    def commands(place: str) -> list[list[str]]:
        return [
            ["featurize", f"{place}/traces", f"{place}/layers", "token=last"],
            ["index", f"{place}/reads"],
            ["pack", f"{there}/genomes", f"{place}/all.pack"],
            [
                "classify",
                str(trained if place == str(here) else f"{place}/run"),
                f"{place}/reads",
                "-o",
                f"{here}.{len(place)}",
            ],
        ]

    cluster.environment |= machines[0]
    extract = ["extract", str(questions), f"{there}/traces", *as_arguments({"model": llama, **SETTINGS})]
    given = [[*command, "--engine", "ray"] for command in [extract, *commands(there)]]
    driver = cluster.start(*given, shared=True, nodes=machines)
    os.kill(cluster.wait_for_stopped_actor(driver), signal.SIGKILL)
    out, err = cluster.finish(driver)
    wait_until(lambda: not cluster.actors(), what="the actors to end", pause=0.05)
    for command in commands(str(here)):
        code, _, said = run(*command)
        assert code == 0, said
    logs = b"".join(
        file.read_bytes() for file in cluster.log.parent.rglob("*") if file.is_file() and not file.is_symlink()
    )
    jobs = Counter(cluster.log.read_text().splitlines())
    folders = [Path(machine["PWD"]) for machine in machines]
    return Outcome(here, there, folders, logs + out.encode() + err.encode(), jobs)


def make_machine(path: Path, number: int, address: str) -> dict[str, str]:
    """The environment of a machine: its own working folder, cache, spool and credentials."""
    home = path / f"machine-{number}"
    home.mkdir()
    return {
        **s3_environment(address),
        "AWS_SECRET_ACCESS_KEY": SECRET.format(number),
        "PWD": str(home),
        "MILLSTREAM_CACHE_DIR": str(home / "blocks"),
        "MILLSTREAM_SPOOL_DIR": "spool" if number else str(home / "spool"),  # in its working folder
    }


def records(url: str) -> dict[object, dict[str, object]]:
    traces = ms.open(url)
    assert isinstance(traces, ms.Traces)
    found = {r["question_id"]: {name: r[name] for name in r if name not in TIMINGS} for r in traces}
    assert len(found) == len(traces), "repeated ids"
    return found


@pytest.mark.parametrize("name", ["traces", "layers"])
def test_stores_have_the_records_of_one_process_each_once(outcome: Outcome, name: str) -> None:
    ours, theirs = records(f"{outcome.there}/{name}"), traces_by_id(outcome.here / name)
    assert ours.keys() == theirs.keys()
    assert [key for key, record in ours.items() if not same(record, theirs[key])] == []


def test_reads_are_classified_to_the_bytes_of_one_process(outcome: Outcome) -> None:
    ours, theirs = (Path(f"{outcome.here}.{len(place)}") for place in (outcome.there, str(outcome.here)))
    assert ours.read_bytes() == theirs.read_bytes()


def test_files_are_packed_into_one_to_the_bytes_of_one_process(outcome: Outcome) -> None:
    assert remote(f"{outcome.there}/all.pack").read_bytes() == (outcome.here / "all.pack").read_bytes()
    assert not [name for name in objects(outcome.there) if ".parts" in name]


@pytest.mark.parametrize("kind", ["index", "part", "classify", "featurize"])
def test_only_the_job_that_was_lost_with_its_node_is_done_again(outcome: Outcome, kind: str) -> None:
    times = sorted(count for job, count in outcome.jobs.items() if job.startswith(f"{kind} "))
    assert times == [1] * (len(times) - 1) + [2]


def test_workers_use_the_folders_and_credentials_of_their_node(outcome: Outcome) -> None:
    driver, *nodes = outcome.nodes
    for node in nodes:
        assert list((node / "spool").iterdir()) and list((node / "blocks").glob("??/*"))
    assert not list(driver.glob("spool/*/shard-*"))
    for number in range(3):
        assert SECRET.format(number).encode() not in outcome.logs
