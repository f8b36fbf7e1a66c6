"""On a real Ray cluster on this machine, the results are those of one process, even if driver or actors are killed."""

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.traces.store.manifest import list_shards
from support.classifying import make_run, write_genomes
from support.clusters import Cluster
from support.commands import run_here as run
from support.effort import THOROUGH
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
from support.making_traces import make_traces

need("transformers")
pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two actors need two cores"),
]

COUNT = 40
ONCE_MORE = 2 if THOROUGH else 1  # times that the job of a worker is begun that dies in a thorough run; see SPARED
LOOPBACK = {"0000000000000000FFFF00000100007F", "0100007F"}  # 127.0.0.1, as an IPv6 and an IPv4 address


@dataclass
class Outcome:
    """What the commands wrote into `there` on Ray, while workers died, and into `here` in one process."""

    here: Path
    there: Path
    listens_at: set[str]  # addresses of the cluster that a command started for itself
    environment: list[bytes]  # of a worker there
    before: list[object]  # ids of the traces that were there when a driver was killed
    out: str
    err: str
    jobs: Counter[str]  # how often each job was begun
    files: list[Path]
    run: Path


@pytest.fixture(scope="module")
def outcome(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of its sockets must be short
    cluster = Cluster(folder)
    try:
        yield run_everything(cluster, llama, tmp_path_factory.mktemp("ray"))
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def run_everything(cluster: Cluster, llama: Path, path: Path) -> Outcome:
    here, there = path / "here", path / "there"
    questions = write_questions(path / "q.jsonl", count=COUNT)
    settings = {**SETTINGS, "samples": 1, "temperature": 1.0}
    ms.extract(questions, here / "traces", model=str(llama), **settings)
    store = there / "traces"
    extract = ["extract", str(questions), str(store), *as_arguments({"model": llama, **settings})]
    files, trained = make_run(path)
    make_traces(path / "labelled", num=80)
    models = "model=mean_logprob,probe_last_answer"
    write_genomes(path / "genomes")

    driver = cluster.start([*extract, "--engine", "ray", "--workers", "1"], shared=False)
    actor = cluster.wait_for_stopped_actor(driver)
    listens_at = cluster.listens_at()
    environment = Path(f"/proc/{actor}/environ").read_bytes().split(b"\0")
    driver.kill()
    driver.communicate()
    os.kill(actor, signal.SIGCONT)  # a stopped process could not notice that its driver is dead
    wait_until(lambda: not cluster.actors(), what="the actors to die with their driver", pause=0.05)
    wait_until(lambda: recovered_ids(store) and not list_shards(store)[1], what="their shards to be let go", pause=0.05)
    before = recovered_ids(store)

    shutil.copytree(write_answers(here / "answers"), there / "answers")

    def commands(place: Path) -> list[list[str]]:
        index_dir = ["--index-dir", f"{place}/indexes"]
        return [
            ["label", f"{place}/answers"],
            ["featurize", f"{place}/answers", f"{place}/layers", "token=mean_answer"],
            ["index", *map(str, files), *index_dir],
            ["pack", *map(str, files), f"{place}/packs/"],
            ["pack", f"{path}/genomes", f"{place}/all.pack"],
            ["train", f"data={path}/labelled", models, "folds=2", "memory=200MB", f"out={place}/run"],
            ["classify", str(trained), *map(str, files), "-o", f"{place}/rows.tsv.gz", *index_dir],
        ]

    workers = {"extract": "2"}  # one for the others: starting a worker takes seconds
    given = [
        [*command, "--engine", "ray", "--workers", workers.get(command[0], "1")]
        for command in [extract, *commands(there)]
    ]
    driver = cluster.start(*given, shared=True)
    os.kill(cluster.wait_for_stopped_actor(driver), signal.SIGKILL)
    out, err = cluster.finish(driver)
    wait_until(lambda: not cluster.actors(), what="the actors to end", pause=0.05)
    for command in commands(here):
        code, _, said = run(*command)
        assert code == 0, said
    jobs = Counter(cluster.log.read_text().splitlines())
    return Outcome(here, there, listens_at, environment, before, out, err, jobs, files, trained)


def test_extract_gives_the_traces_of_one_process_even_if_driver_and_actor_are_killed(outcome: Outcome):
    assert 0 < len(set(outcome.before)) == len(outcome.before) < 2 * COUNT
    assert f"{len(outcome.before)} of {2 * COUNT} done already" in outcome.err
    assert "Traceback" not in outcome.err and "Warning" not in outcome.err
    assert_all_sealed(outcome.there / "traces")
    assert_same_traces(outcome.there / "traces", outcome.here / "traces")


def test_a_local_cluster_listens_on_loopback_only_and_requires_a_token(outcome: Outcome):
    assert outcome.listens_at and outcome.listens_at <= LOOPBACK
    assert b"RAY_AUTH_MODE=token" in outcome.environment
    assert [len(value) for value in outcome.environment if value.startswith(b"RAY_AUTH_TOKEN=")] == [15 + 64]


def test_an_error_of_a_worker_arrives_as_it_was_and_the_cluster_is_left_running(outcome: Outcome):
    assert outcome.out.endswith("True 7: not this one\n")


def test_label_gives_the_labels_of_one_process(outcome: Outcome):
    labels = (pq.read_table(place / "answers" / "labels.parquet") for place in (outcome.here, outcome.there))
    assert next(labels).equals(next(labels))


def test_featurize_gives_the_records_of_one_process_even_if_a_worker_dies(outcome: Outcome):
    assert len(traces_by_id(outcome.here / "layers")) == 588
    assert_same_traces(outcome.there / "layers", outcome.here / "layers")
    assert_all_sealed(outcome.there / "layers")
    first, *_ = chunks = [int(job.split()[1]) for job in outcome.jobs if job.startswith("featurize")]
    assert first == 256 and first - 10 in chunks, "only the rest of its chunk is done again"


@pytest.mark.parametrize(("command", "folder"), [("index", "indexes"), ("pack", "packs")])
def test_files_are_indexed_and_packed_to_the_bytes_of_one_process(outcome: Outcome, command: str, folder: str):
    here, there = files_in(outcome.here / folder), files_in(outcome.there / folder)
    assert len(here) == 3 and here == there
    times = {job.split()[1]: count for job, count in outcome.jobs.items() if job.startswith(f"{command} ")}
    assert sorted(times) == sorted(file.name for file in outcome.files)
    assert sorted(times.values()) == [1, 1, ONCE_MORE], "only the job of the worker that died is done again"


def test_files_are_packed_into_one_to_the_bytes_of_one_process_even_if_a_worker_dies(outcome: Outcome):
    assert (outcome.there / "all.pack").read_bytes() == (outcome.here / "all.pack").read_bytes()
    times = {job.split()[1]: count for job, count in outcome.jobs.items() if job.startswith("part ")}
    assert set(times) == {"0.fa", "1.fa", "2.fa"}
    assert sorted(times.values()) == [1, 1, 2], "only the job of the worker that died is done again"
    assert not list(outcome.there.glob("all.pack.*"))


def test_models_of_all_folds_are_trained_to_the_scores_of_one_process(outcome: Outcome):
    names = [f"{model}-0.fold{fold}" for model in ("mean_logprob", "probe_last_answer") for fold in (1, 2)]
    for name in names:
        here, there = (place / "run" / "checkpoints" / name for place in (outcome.here, outcome.there))
        for file in ("scores.parquet", "detector.safetensors"):
            assert (here / file).read_bytes() == (there / file).read_bytes()
    tables = [pq.read_table(place / "run" / "predictions.parquet") for place in (outcome.here, outcome.there)]
    assert tables[0].equals(tables[1]) and (outcome.there / "run" / "report.html").exists()
    times = {job.split()[1]: count for job, count in outcome.jobs.items() if job.startswith("train ")}
    assert set(times) == set(names) and sorted(times.values()) == [1, 1, 1, ONCE_MORE], (
        "only the job of the worker that died"
    )


def test_reads_are_classified_to_the_bytes_of_one_process(outcome: Outcome):
    assert (outcome.there / "rows.tsv.gz").read_bytes() == (outcome.here / "rows.tsv.gz").read_bytes()
    spans = {job.split()[1]: count for job, count in outcome.jobs.items() if job.startswith("classify")}
    assert set(spans) == {f"{first}-{min(first + 128, 900)}" for first in range(0, 900, 128)}
    assert sorted(spans.values()) == [1] * 7 + [ONCE_MORE], "only the chunk of the worker that died is done again"
    assert sorted(path.name for path in outcome.there.iterdir() if "rows" in path.name) == [
        ".rows.tsv.gz.done",
        "rows.tsv.gz",
    ]


def test_nothing_that_is_finished_is_done_again(outcome: Outcome):
    """Ray is not even started."""
    there, ray = outcome.there, ["--engine", "ray"]
    index_dir = ["--index-dir", there / "indexes"]
    paths = [*(there / "indexes").iterdir(), *(there / "packs").iterdir(), there / "all.pack", there / "rows.tsv.gz"]
    times = [path.stat().st_mtime_ns for path in paths]
    for command in (
        ["index", *outcome.files, *index_dir],
        ["pack", *outcome.files, there / "packs"],
        ["pack", outcome.files[0].parent / "genomes", there / "all.pack"],
        ["classify", outcome.run, *outcome.files, "-o", there / "rows.tsv.gz", *index_dir],
        ["train", there / "run" / "config.yaml"],
    ):
        code, _, err = run(*command, *ray)
        assert code == 0, err
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert "ray" not in sys.modules


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_answers(path: Path) -> Path:
    """600 traces to label and featurize, twelve of them failed."""
    rng = np.random.default_rng(0)
    with ms.TraceWriter(path, shard_records=210) as writer:
        for number in range(600):
            about = {"question_id": f"q{number}", "aliases": [f"Paris {number % 3}"], "prompt_len": 2}
            hidden = None if number % 50 == 9 else rng.normal(size=(3, 4 + number % 5, 8)).astype(np.float16)
            answer = f"it is Paris {number % 4}"
            writer.append(
                {**about, "generated_answer": answer, "hidden": hidden, "status": "ok" if number % 50 != 9 else "error"}
            )
    return path
