"""A run that was killed or stopped anywhere ends with the same weights as an uninterrupted one."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import millstream as ms
from millstream.training.folder import Log, load, read_lines
from support.forked_training import Job
from support.training import SHORT, losses_of, scores_of, weights_of

ASKED = {**SHORT, "model": "lstm,gvae", "checkpoint_steps": 2}


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    ms.train(store, out=str(out), **ASKED)
    return out


def test_a_killed_run_ends_with_the_same_weights(
    processes: Callable[[list[Job]], list[int]], store: Path, whole: Path, tmp_path: Path
):
    out = tmp_path / "run"
    settings = {"data": str(store), "out": str(out), **ASKED}
    assert processes([{"settings": settings, "environment": {}, "dies_at": ["lstm", 5]}]) == [-signal.SIGKILL]
    assert load(out / "checkpoints" / "lstm-0" / "latest.safetensors")[1]["step"] == 4
    assert not (out / "predictions.parquet").exists()
    ms.train(store, out=str(out), **ASKED)
    for job in ("lstm-0", "gvae-0"):
        assert weights_of(out, job) == weights_of(whole, job)
    assert scores_of(out) == scores_of(whole)


@pytest.mark.parametrize("stopped_at", [1, 7, 8])  # 7 steps an epoch: within one, at its end, in the next
def test_a_run_stopped_at_any_step_ends_with_the_same_weights(
    store: Path, whole: Path, tmp_path: Path, stopped_at: int, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "run"
    asked = {**ASKED, "model": "gvae", "checkpoint_steps": 1000}
    from contextlib import contextmanager

    from millstream.training import run as module

    steps = 0

    @contextmanager
    def stop_then():
        def stop() -> bool:
            nonlocal steps
            steps += 1
            return steps == stopped_at + 1  # the first question is before the first step

        yield stop

    monkeypatch.setattr(module, "interruptible", stop_then)
    assert ms.train(store, out=str(out), **asked).interrupted
    monkeypatch.undo()
    again = ms.train(store, out=str(out), **asked)
    assert not again.interrupted
    assert weights_of(out, "gvae-0") == weights_of(whole, "gvae-0")
    assert losses_of(out)[-3:] == losses_of(whole)[-3:]


def test_an_incomplete_line_of_the_log_is_cut_off_and_time_continues(tmp_path: Path):
    log = Log(tmp_path)
    log.write("epoch", model="lstm", seed=0, epoch=0, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "loss": 0.')
    before = read_lines(tmp_path)
    assert len(before) == 1
    again = Log(tmp_path)
    again.write("epoch", model="lstm", seed=0, epoch=1, loss=0.5)
    lines = read_lines(tmp_path)
    assert [line["loss"] for line in lines] == [1.0, 0.5]
    assert lines[1]["time_s"] >= lines[0]["time_s"]


def test_a_damaged_checkpoint_is_an_error_that_names_it(store: Path, whole: Path, tmp_path: Path):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "checkpoints" / "lstm-0" / "scores.parquet").unlink()
    file = out / "checkpoints" / "lstm-0" / "latest.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    from millstream.errors import BadSource

    with pytest.raises(BadSource, match=r"latest\.safetensors"):
        ms.train(store, out=str(out), **ASKED)
