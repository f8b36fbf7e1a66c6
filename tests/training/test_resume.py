"""A run that was killed or stopped anywhere ends with the same weights as an uninterrupted one."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import millstream as ms
from millstream.errors import BadSource
from millstream.training.folder import load, save
from millstream.training.log import Log, read_lines
from support.commands import run_here
from support.effort import THOROUGH
from support.forked_training import Job
from support.making import flip
from support.training import SHORT, losses_of, scores_of, weights_of

ASKED = {**SHORT, "model": "lstm,gvae", "checkpoint_steps": 2}
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")


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


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole run, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run")


def test_a_checkpoint_that_is_cut_off_or_a_folder_is_an_error_that_names_it(store: Path, copy: Path):
    (copy / "checkpoints" / "lstm-0" / "scores.parquet").unlink()
    file = copy / "checkpoints" / "lstm-0" / "latest.safetensors"
    content = file.read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(BadSource, match=r"latest\.safetensors"):
            ms.train(store, out=str(copy), **ASKED)
    file.unlink()
    file.mkdir()
    with pytest.raises(BadSource, match=r"latest\.safetensors.*a folder"):
        ms.train(store, out=str(copy), **ASKED)


def test_no_flipped_bit_of_a_checkpoint_is_loaded_unnoticed(tmp_path: Path):
    tensors = {"half": torch.arange(5).to(torch.bfloat16), "one": torch.tensor(3.0), "none": torch.zeros(0, 2)}
    about = {"epoch": 2, "best": 0.1 + 0.2, "sums": {"loss": 1e-9}, "loader": None}
    save(tmp_path / "whole", tensors, about)
    found, said = load(tmp_path / "whole")
    assert said == about and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    content = (tmp_path / "whole").read_bytes()
    for bit in range(0, 8 * len(content), 1 if THOROUGH else 7):  # a bit or two of every byte
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "changed").write_bytes(changed)
        try:
            found, said = load(tmp_path / "changed")
        except BadSource:
            continue
        assert said == about and set(found) == set(tensors), bit
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), bit


def test_a_flipped_bit_in_the_weights_is_not_resumed_from_and_removing_the_folder_trains_again(
    store: Path, whole: Path, copy: Path
):
    folder = copy / "checkpoints" / "lstm-0"
    (folder / "scores.parquet").unlink()
    flip(folder / "latest.safetensors", (folder / "latest.safetensors").stat().st_size - 5)
    with pytest.raises(BadSource, match=rf"Remove {folder} .*finished models are kept"):
        ms.train(store, out=str(copy), **ASKED)
    flip(copy / "checkpoints" / "gvae-0" / "detector.safetensors", 5000)
    with pytest.raises(BadSource, match=r"gvae-0/detector\.safetensors"):
        ms.evaluate(copy, model="gvae")
    shutil.rmtree(folder)
    ms.train(store, out=str(copy), **ASKED)
    assert weights_of(copy, "lstm-0") == weights_of(whole, "lstm-0")


def test_weights_of_another_version_are_an_error_that_names_the_checkpoint(store: Path, copy: Path):
    (copy / "checkpoints" / "lstm-0" / "scores.parquet").unlink()
    file = copy / "checkpoints" / "lstm-0" / "latest.safetensors"
    tensors, about = load(file)
    save(file, {**tensors, "model.more": torch.zeros(2)}, about)
    with pytest.raises(BadSource, match=r"latest\.safetensors"):
        ms.train(store, out=str(copy), **ASKED)
    save(file, tensors, {**about, "moon": "full"})
    with pytest.raises(BadSource, match=r"latest\.safetensors.*moon"):
        ms.train(store, out=str(copy), **ASKED)


BAD_MAPPINGS = {
    "garbage": b"\xff\xfe\x00 {[ no\n",
    "a list": b"[1, 2]\n",
    "empty": b"",
    "a tag": b"!!python/object/apply:os.system ['true']\n",
    "a text": b"once upon a time\n",
    "nested": b"[" * 1_500,
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("config.yaml", case) for case in BAD_MAPPINGS),
        *(("data.json", case) for case in (BAD_MAPPINGS if THOROUGH else ("garbage", "a list", "nested"))),
    ],
)
def test_damaged_settings_or_data_cards_are_named_in_one_line_and_finished_models_are_kept(
    store: Path, copy: Path, name: str, case: str
):
    (copy / name).write_bytes(BAD_MAPPINGS[case])
    kept = scores_of(copy)
    settings = [f"{key}={value}" for key, value in ASKED.items()]
    commands = [("train", f"data={store}", f"out={copy}", *settings), ("evaluate", copy), ("report", copy)]
    for command in commands:
        code, _, err = run_here(*command)
        assert code == 1 and name in err and err.count("\n") == 1, (command[0], err)
    assert scores_of(copy) == kept and (copy / name).read_bytes() == BAD_MAPPINGS[case]


def test_a_data_card_of_something_else_is_named(copy: Path):
    (copy / "data.json").write_text('{"1": 2}')
    with pytest.raises(BadSource, match=r"data\.json.* store"):
        ms.evaluate(copy)


def test_a_run_in_a_folder_whose_name_is_not_utf_8_is_evaluated(copy: Path, tmp_path: Path):
    odd = copy.rename(tmp_path / os.fsdecode(b"run\xff"))
    assert scores_of(ms.evaluate(odd, model="lstm", out=str(tmp_path / "out")))


def test_damaged_scores_are_named_and_written_again_once_removed(store: Path, whole: Path, copy: Path):
    file = copy / "checkpoints" / "lstm-0" / "scores.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    for work in (lambda: ms.train(store, out=str(copy), **ASKED), lambda: ms.evaluate(copy)):
        with pytest.raises(BadSource, match=r"lstm-0/scores\.parquet.*Remove it"):
            work()
    file.unlink()
    ms.train(store, out=str(copy), **ASKED)
    assert scores_of(copy) == scores_of(whole)


@pytest.mark.parametrize(
    "line", [b"garbage", b"\x00\xff", b"[1]", b"{}", b'{"kind": "fit"}', b"[" * 100_000, b'{"time_s": "late"}', b""]
)
def test_a_damaged_line_of_the_log_stops_neither_training_nor_evaluation(store: Path, copy: Path, line: bytes):
    lines = (copy / "metrics.jsonl").read_bytes().split(b"\n")
    (copy / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], line, *lines[2:-1], line, b""]))
    ms.train(store, out=str(copy), **ASKED)
    assert set(scores_of(ms.evaluate(copy, model="lstm"))) == {("lstm", 0)}
    code, _, err = run_here("report", copy)
    assert code in (0, 1) and "Traceback" not in err
    assert code == 0 or ("metrics.jsonl: line 3" in err and err.count("\n") == 1)
