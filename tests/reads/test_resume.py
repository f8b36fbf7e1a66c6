"""Training read classifiers: killed or stopped anywhere, a run ends with the same weights; two processes act as one."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.reads.simulate import SimulateSettings, simulate
from millstream.training import run as module
from millstream.training.folder import load
from support.forked_training import Job
from support.torchrun import rank_environments
from support.training import lines_of, losses_of, weights_of

pytestmark = pytest.mark.usefixtures("roughly_measured_memory")

MODELS = ("kmer-linear", "cnn")
NUM_STEPS = 10  # of an epoch


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    rng = np.random.default_rng(3)
    genomes: list[Path] = []
    for tax_id, at in ((562, 0.4), (573, 0.25), (564, 0.1)):  # the frequency of A, and of T
        genomes.append(path / f"{tax_id}_x.fna")
        bases = rng.choice(np.frombuffer(b"ACGT", np.uint8), 5000, p=[at, 0.5 - at, 0.5 - at, at])
        genomes[-1].write_text(f">{tax_id}\n{bases.tobytes().decode()}\n")
    for seed, (name, count) in enumerate({"train": 32 * NUM_STEPS - 5, "val": 61, "test": 45}.items()):
        settings = SimulateSettings(reads=count, length=80, seed=seed)
        simulate(genomes, [path / f"{name}.fa"], settings=settings, mapping=path / "species.tsv")
    return path


def settings_for(made: Path, out: Path, **settings: object) -> dict[str, Any]:
    files = {name: str(made / f"{name}.fa") for name in ("train", "val", "test")}
    small = {"epochs": 3, "batch_size": 32, "bits": 10, "width": 8, "layers": 1, "lr": 0.02, "memory": "200MB"}
    common = {"data": files, "mapping": str(made / "species.tsv"), "out": str(out), "model": ",".join(MODELS)}
    return {**common, **small, "checkpoint_steps": 3, **settings}


@pytest.fixture(scope="module")
def whole(made: Path) -> Path:
    """A run without interruptions."""
    out = made / "whole"
    assert not ms.train(**settings_for(made, out)).interrupted
    return out


def predictions_of(run: Path) -> Any:
    return pq.read_table(run / "predictions.parquet")


def steps_of(out: Path, model: str) -> int:
    """The step of the checkpoint."""
    step = load(out / "checkpoints" / f"{model}-0" / "latest.safetensors")[1]["step"]
    assert isinstance(step, int)
    return step


def test_a_run_killed_again_and_again_ends_with_the_same_weights_and_predictions(
    processes: Callable[[list[Job]], list[int]], made: Path, whole: Path, tmp_path: Path
):
    out = tmp_path / "run"
    settings = settings_for(made, out)
    # In the first epoch and in the last; at the step of a checkpoint, before it is written; after the end of an epoch.
    for model, at, saved in (("kmer-linear", 5, 3), ("kmer-linear", 24, 21), ("cnn", 6, 3), ("cnn", 11, 10)):
        assert processes([{"settings": settings, "environment": {}, "dies_at": [model, at]}]) == [-signal.SIGKILL]
        assert steps_of(out, model) == saved
        assert (out / "checkpoints" / "kmer-linear-0" / "scores.parquet").exists() == (model == "cnn")
    done = ms.train(**settings)
    assert done.models == list(MODELS) and not done.interrupted
    for model in MODELS:
        assert weights_of(out, f"{model}-0") == weights_of(whole, f"{model}-0")
    assert predictions_of(out).equals(predictions_of(whole))
    epochs = [(line["model"], line["epoch"], line["loss"], line["val_macro_f1"]) for line in lines_of(whole, "epoch")]
    assert [(line["model"], line["epoch"], line["loss"], line["val_macro_f1"]) for line in lines_of(out, "epoch")] == (
        epochs
    )


@pytest.mark.parametrize(
    ("model", "stopped_at"),
    [("kmer-linear", 1), ("kmer-linear", NUM_STEPS + 1), ("cnn", NUM_STEPS), ("cnn", 3 * NUM_STEPS - 1)],
)
def test_a_run_stopped_at_any_step_ends_with_the_same_weights(
    made: Path, whole: Path, tmp_path: Path, model: str, stopped_at: int, monkeypatch: pytest.MonkeyPatch
):
    settings = settings_for(made, tmp_path / "run", model=model, checkpoint_steps=1000)
    num_calls = 0

    @contextmanager
    def stop_then() -> Generator[Callable[[], bool]]:
        counting = 1 if model == "kmer-linear" else 0  # one batch of reads is counted before training

        def stop() -> bool:
            nonlocal num_calls
            num_calls += 1
            return num_calls == 1 + counting + stopped_at  # the first call is before the first model

        yield stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "interruptible", stop_then)
        stopped = ms.train(**settings)
    assert stopped.interrupted and stopped.models == [] and steps_of(tmp_path / "run", model) == stopped_at
    assert not (tmp_path / "run" / "predictions.parquet").exists()
    assert not ms.train(**settings).interrupted
    assert weights_of(tmp_path / "run", f"{model}-0") == weights_of(whole, f"{model}-0")
    mine = predictions_of(whole).filter(np.array(predictions_of(whole).column("model").to_pylist()) == model)
    assert predictions_of(tmp_path / "run").equals(mine)


def test_a_run_resumes_with_another_memory_budget_and_keeps_its_table_size(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = settings_for(made, tmp_path / "run", model="kmer-linear", checkpoint_steps=1, memory="400MB", bits=None)
    num_calls = 0

    @contextmanager
    def stop_soon() -> Generator[Callable[[], bool]]:
        def stop() -> bool:
            nonlocal num_calls
            num_calls += 1
            return num_calls == 4

        yield stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "interruptible", stop_soon)
        assert ms.train(**settings).interrupted
    assert not ms.train(**{**settings, "memory": "100MB"}).interrupted
    assert len(predictions_of(tmp_path / "run")) > 0


def test_two_processes_train_like_one_and_score_every_read_once(
    made: Path, tmp_path: Path, processes: Callable[[list[Job]], list[int]]
):
    same = {"dropout": 0.0, "accelerator": "cpu", "epochs": 2}
    settings = settings_for(made, tmp_path / "two", devices=2, **same)
    jobs: list[Job] = [
        {"settings": settings, "environment": environment, "dies_at": ["", 0]} for environment in rank_environments(2)
    ]
    assert processes(jobs) == [0, 0]
    ms.train(**settings_for(made, tmp_path / "one", **same))
    assert losses_of(tmp_path / "two")[:2] == pytest.approx(losses_of(tmp_path / "one")[:2], rel=2e-3)  # kmer-linear
    one, two = predictions_of(tmp_path / "one"), predictions_of(tmp_path / "two")
    for name in ("part", "record", "label", "model", "seed"):
        assert two.column(name).equals(one.column(name))
    assert two.num_rows == 2 * (61 + 45)
    linear = slice(61 + 45, None)  # the cnn is normalised over the batch, half of which each process has
    assert two["class"][linear].equals(one["class"][linear])
    assert two["probability"][linear].to_numpy() == pytest.approx(one["probability"][linear].to_numpy(), abs=0.01)
    right = [np.mean(table["class"].to_numpy() == table["label"].to_numpy()) for table in (one, two)]
    assert right[1] > 0.9 and right[1] == pytest.approx(right[0], abs=0.05)
    assert sorted(os.listdir(tmp_path / "two")) == sorted(os.listdir(tmp_path / "one"))
    assert [line["model"] for line in lines_of(tmp_path / "two", "fit")] == list(MODELS)  # only one process logs
