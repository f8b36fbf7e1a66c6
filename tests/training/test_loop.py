"""The parts of the training loop: learning rate, class weights, scores, checkpoints, memory log."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import millstream as ms
from millstream.core.config import read_settings
from millstream.core.memory import Allowance, tree_bytes
from millstream.errors import BadSetting, BadSource, StoreFull
from millstream.features import fields
from millstream.traces.detectors import DETECTION
from millstream.traces.detectors.net import DetectorNet
from millstream.traces.kind import TrainSettings
from millstream.training.devices import make_fabric
from millstream.training.folder import load, save
from millstream.training.log import Log, read_lines
from millstream.training.loop import learning_share, pack_optimizer, predict, unpack_optimizer
from support.making_traces import labelled, make_traces

NUM = 40


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return labelled(make_traces(tmp_path_factory.mktemp("loop") / "traces", num=NUM))


@pytest.fixture(scope="module")
def fabric() -> Any:
    return make_fabric(TrainSettings(accelerator="cpu"))


# -- learning rate


@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("total", [20, 1000])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(total: int, warmup: float):
    shares = [learning_share(step, total, warmup) for step in range(total)]
    peak = max(1, round(total * warmup)) - 1
    assert max(shares) == shares[peak] == 1.0 and min(shares) > 0
    assert shares[: peak + 1] == pytest.approx(np.linspace(0, 1, peak + 2)[1:])
    assert all(later <= before for before, later in zip(shares[peak:], shares[peak + 1 :], strict=False))
    assert learning_share(total, total, warmup) == pytest.approx(0.1)
    assert 0.1 < shares[-1] < 0.13
    halfway = (peak + 1 + total) / 2
    assert learning_share(int(halfway), total, warmup) == pytest.approx(0.55, abs=0.06)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_run_of_few_steps_has_a_positive_learning_rate(total: int):
    assert all(0.1 <= learning_share(step, total, warmup) <= 1 for step in range(total) for warmup in (0.0, 0.05, 0.9))


# -- classes


def test_right_and_wrong_answers_have_the_same_total_weight(traces: ms.Collection):
    labels = traces.column("label").to_numpy()
    uneven = traces.subset([*np.flatnonzero(labels == 0)[:12], *np.flatnonzero(labels == 1)[:4]])
    weight = DETECTION.weights(uneven)[uneven.column("label").to_pylist()]
    assert weight[:12].sum().item() == pytest.approx(weight[12:].sum().item()) == pytest.approx(8)
    assert weight.mean().item() == pytest.approx(1)  # so that the loss of chance is that of even classes
    alone = traces.subset(np.flatnonzero(labels == 1)[:4])
    assert DETECTION.weights(alone).isfinite().all()


# -- scores


class Reading(DetectorNet):
    """Its logit is a number of the record, and it counts what it is given."""

    def __init__(self) -> None:
        super().__init__(8, 0)
        self.one = nn.Parameter(torch.ones(()))

    def logits(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert not self.training and not torch.is_grad_enabled()
        return batch["p_true"].float() * self.one, {}

    def measures(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"mean": batch["p_true"].mean()}


def expected_of(collection: ms.Collection) -> np.ndarray:
    return 1 / (1 + np.exp(-collection.column("p_true").to_numpy().astype(np.float64)))


def scores_of(collection: ms.Collection, fabric: Any, at_once: int = 64) -> tuple[np.ndarray, dict[str, float]]:
    given = {"task": DETECTION, "memory": 50 << 20, "fabric": fabric, "at_once": at_once}
    outcome, measures = predict(Reading().train(), collection, [fields("p_true")], **given)
    return outcome["score"].astype(np.float64), measures


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_scores_are_in_the_order_of_the_collection(traces: ms.Collection, fabric: Any, at_once: int):
    shuffled = np.random.default_rng(0).permutation(NUM)[:23]
    for collection in (traces, traces.subset(shuffled), traces.subset(shuffled).subset([9, 3, 4])):
        scores, measures = scores_of(collection, fabric, at_once)
        assert scores.dtype == np.float64 and scores == pytest.approx(expected_of(collection), abs=1e-6)
        if len(collection) % min(at_once, len(collection)) == 0:  # batches of equal size
            assert measures["mean"] == pytest.approx(np.mean(collection.column("p_true").to_numpy()), abs=1e-6)


def test_a_repeated_record_has_its_score_twice(traces: ms.Collection, fabric: Any):
    twice = traces.subset([5, 8, 5, 5])
    assert scores_of(twice, fabric)[0] == pytest.approx(expected_of(twice), abs=1e-6)


# -- checkpoints


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        net(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def test_weights_and_state_of_adamw_resume_bit_for_bit_from_a_checkpoint(tmp_path: Path):
    net, optimizer = made()
    stepped(net, optimizer, range(3))
    about = {"epoch": 2, "best": 0.625, "sums": {"loss": 1 / 3}, "loader": None, "said": "Mühle"}
    path = tmp_path / "new" / "latest.safetensors"
    save(path, {**net.state_dict(prefix="model."), **pack_optimizer(optimizer)}, about)
    tensors, read = load(path)
    assert read == about
    again, other = made()
    again.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
    unpack_optimizer(other, tensors)
    before, after = pack_optimizer(optimizer), pack_optimizer(other)
    assert set(before) == set(after) and len(before) == 12
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype
    stepped(net, optimizer, range(3, 6))
    stepped(again, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_the_state_of_an_optimizer_before_its_first_step_is_empty_and_loads(tmp_path: Path):
    net, optimizer = made()
    save(tmp_path / "c", {**net.state_dict(prefix="model."), **pack_optimizer(optimizer)}, {})
    again, other = made()
    unpack_optimizer(other, load(tmp_path / "c")[0])
    assert pack_optimizer(other) == {}
    stepped(again, other, range(1))


@pytest.mark.parametrize("content", [b"", b"no tensors", bytes(64)])
def test_a_file_that_is_not_a_checkpoint_is_an_error_that_names_it(tmp_path: Path, content: bytes):
    from safetensors.torch import save_file

    (tmp_path / "c.safetensors").write_bytes(content)
    with pytest.raises(BadSource, match=r"c\.safetensors"):
        load(tmp_path / "c.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "c.safetensors")  # of another program
    with pytest.raises(BadSource, match=r"c\.safetensors"):
        load(tmp_path / "c.safetensors")


def test_tensors_that_are_views_are_saved(tmp_path: Path):
    whole = torch.arange(12.0).reshape(3, 4)
    save(tmp_path / "c", {"columns": whole.T, "number": torch.tensor(3.5)}, {})
    found, _ = load(tmp_path / "c")
    assert torch.equal(found["columns"], whole.T) and found["number"].shape == ()


def test_on_a_full_disk_the_previous_checkpoint_is_kept(tmp_path: Path):
    save(tmp_path / "c", {"x": torch.ones(2)}, {})
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o666 & ~current_umask()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        with pytest.raises(StoreFull, match=str(tmp_path / "c")):
            save(tmp_path / "c", {"x": torch.ones(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert load(tmp_path / "c")[0]["x"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": 0.9, "val": 0.2}, "train=0.9 val=0.2: their sum"),
        ({"batch_size": 33, "devices": 2}, "batch_size=33: must be a multiple of devices=2"),
        ({"positive": "yes"}, "positive=yes: must be one of right, wrong"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error(settings: dict[str, Any], said: str):
    with pytest.raises(BadSetting, match=said):
        read_settings(TrainSettings, {"data": "traces", **settings}).check()


def test_settings_that_do_not_affect_results_may_change_when_a_run_resumes():
    one = TrainSettings(data="a", seeds=3, devices=1, checkpoint_minutes=5)
    assert one.science() == TrainSettings(data="b", seeds=5, devices=2, checkpoint_minutes=1).science()
    assert one.science() != TrainSettings(data="a", lr=0.1).science()
    TrainSettings(data="a", k=None, checkpoint_steps=None).check()


# -- memory


def test_memory_is_logged_only_inside_the_block(tmp_path: Path):
    log = Log(tmp_path)
    allowance = Allowance("1GB")
    with log.memory(allowance, interval_s=0.02):
        while len(read_lines(tmp_path)) < 3:
            time.sleep(0.01)
        log.write("epoch", epoch=0)
    lines = read_lines(tmp_path)
    time.sleep(0.1)
    assert read_lines(tmp_path) == lines
    watched = [line for line in lines if line["kind"] == "memory"]
    assert len(watched) >= 3 and {line["budget"] for line in watched} == {allowance.num_bytes}
    assert all(isinstance(line["bytes"], int) and line["bytes"] > 10_000_000 for line in watched)
    times: list[Any] = [line["time_s"] for line in lines]
    assert times == sorted(times) and len(lines) == len(watched) + 1


def test_an_error_inside_the_block_ends_logging(tmp_path: Path):
    with pytest.raises(KeyError), Log(tmp_path).memory(Allowance(1)):
        raise KeyError
    assert [line["kind"] for line in read_lines(tmp_path)] == ["memory"]


def test_measured_memory_follows_the_process():
    """It is between private and resident memory, and a block more is a block more. In a process without children."""
    code = """
import numpy as np
from pathlib import Path
from millstream.core.memory import tree_bytes

def own_bytes(name):
    return int(Path("/proc/self/status").read_text().split(f"\\n{name}:")[1].split()[0]) << 10

before = tree_bytes()
assert 0.7 * own_bytes("RssAnon") < before < 1.3 * own_bytes("VmRSS"), before
block = np.ones(64 << 17)
grown = tree_bytes() - before
assert 0.7 * block.nbytes < grown < 1.3 * block.nbytes, grown
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_measured_memory_includes_children():
    before = tree_bytes()
    code = "block = bytearray(b'x') * (64 << 20); print(len(block), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:  # pyright: ignore
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline().strip() == str(64 << 20)
        grown = tree_bytes() - before
        child.stdin.write("\n")
    assert 60 << 20 < grown < 100 << 20
