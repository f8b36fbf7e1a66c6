"""Runs at a URL: resumed on another machine with the same weights, whatever was uploaded when the first one died."""

import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import millstream as ms
from millstream.core.remote import RemotePath, spool_folder
from millstream.errors import BadSource, ConfigMismatch, RemoteError, StoreExists
from millstream.training import run as run_module
from millstream.training.folder import finished_jobs, load
from millstream.training.log import read_lines
from millstream.training.loop import Training
from millstream.training.remote_run import RemoteRun, local_run, writing_run
from support.commands import run_here
from support.effort import THOROUGH
from support.faulty_proxy import Fault, faulty_proxy, unavailable
from support.forked_training import Job
from support.remote_stores import SPOOL, environment, objects, remote, upload
from support.s3_server import Bucket
from support.torchrun import rank_environments, torchrun
from support.training import SHORT, losses_of, scores_of, weights_of

ASKED = {**SHORT, "model": "lstm", "checkpoint_steps": 2}
UPLOAD_S = "MILLSTREAM_UPLOAD_S"
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")


@pytest.fixture
def url(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SPOOL, str(tmp_path / "first"))
    return f"{s3.url}/runs/first"


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    ms.train(store, out=str(out), **ASKED)
    return out


def local_copy(url: str, spool: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a machine that has never seen the run downloads."""
    monkeypatch.setenv(SPOOL, str(spool))
    return local_run(url)


def train_until(step: int, store: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and stop as Ctrl-C does after this step."""
    num_steps = 0

    def counting(training: Training, *args: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        really_step(training, *args)

    really_step = Training._step
    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", counting)
        patch.setattr(run_module, "interruptible", lambda: nullcontext(lambda: num_steps >= step))
        assert ms.train(store, out=url, **ASKED).interrupted


def assert_ends_alike(folder: Path, whole: Path) -> None:
    assert weights_of(folder, "lstm-0") == weights_of(whole, "lstm-0")
    assert scores_of(folder) == scores_of(whole)


def test_a_killed_run_resumes_on_another_machine_with_the_same_weights(
    processes: Callable[[list[Job]], list[int]],
    store: Path,
    whole: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"data": str(store), "out": url, **ASKED}
    environ = {**environment(tmp_path / "first"), UPLOAD_S: "0.001"}
    assert processes([{"settings": settings, "environment": environ, "dies_at": ["lstm", 20]}]) == [-signal.SIGKILL]
    monkeypatch.setenv(SPOOL, str(tmp_path / "second"))
    assert str(ms.train(store, out=url, **ASKED).path) == url
    assert_ends_alike(local_copy(url, tmp_path / "third", monkeypatch), whole)


def test_a_stopped_run_resumes_from_its_checkpoint_on_another_machine(
    store: Path, whole: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(10, store, url, monkeypatch)
    folder = local_copy(url, tmp_path / "second", monkeypatch)
    assert load(folder / "checkpoints" / "lstm-0" / "latest.safetensors")[1]["step"] == 10
    ms.train(store, out=url, **ASKED)
    assert len(losses_of(folder)) == 3
    assert_ends_alike(local_copy(url, tmp_path / "third", monkeypatch), whole)

    monkeypatch.setenv(SPOOL, str(tmp_path / "first"))  # the first machine, which is behind, takes what is there
    assert not ms.train(store, out=url, **ASKED).interrupted
    assert_ends_alike(spool_folder(remote(url)), whole)
    with pytest.raises(ConfigMismatch, match=f"{url}.*batch_size"):
        ms.train(store, out=url, **{**ASKED, "batch_size": 8})


def test_processes_that_share_nothing_but_a_bucket_train_and_resume(
    processes: Callable[[list[Job]], list[int]],
    store: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = upload(store, f"{url.rpartition('/runs')[0]}/traces")

    def train_on_two(data: str, out: str, name: str, dies_at: list[object]) -> list[int]:
        jobs: list[Job] = []
        for rank, own in enumerate(rank_environments(2, nodes=2, name=name)):  # each with files of its own
            environ = environment(tmp_path / f"{name}-{rank}") | ({} if name == "second" else {UPLOAD_S: "0.001"})
            environ["MILLSTREAM_CACHE_DIR"] = str(tmp_path / f"{name}-{rank}-blocks")
            settings = {"data": data, "out": out, **ASKED, "accelerator": "cpu", "lr": 0.05}
            jobs.append({"settings": settings, "environment": environ | own, "dies_at": dies_at})
        return processes(jobs)

    assert train_on_two(str(store), str(tmp_path / "whole"), "whole", ["lstm", -1]) == [0, 0]
    at = load(tmp_path / "whole" / "checkpoints" / "lstm-0" / "latest.safetensors")[1]
    assert at["best_epoch"] < at["epoch"] - 1  # so all need the best weights, which one has saved
    assert train_on_two(data, url, "first", ["lstm", 5]) == [-signal.SIGKILL] * 2
    assert train_on_two(data, url, "second", ["lstm", -1]) == [0, 0]
    assert_ends_alike(local_copy(url, tmp_path / "third", monkeypatch), tmp_path / "whole")


@pytest.mark.skipif(not THOROUGH, reason="starts two agents of torchrun: MILLSTREAM_THOROUGH=1")
def test_the_command_of_two_torchrun_machines_trains_as_two_devices_of_one(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = upload(store, f"{url.rpartition('/runs')[0]}/traces")
    settings = [f"{name}={value}" for name, value in {**ASKED, "accelerator": "cpu", "lr": 0.05}.items()]
    machines = [
        {SPOOL: str(tmp_path / f"spool-{node}"), "MILLSTREAM_CACHE_DIR": str(tmp_path / f"blocks-{node}")}
        for node in range(2)
    ]
    for _ in range(2):  # the second finds it finished
        torchrun(machines, "-m", "millstream", "train", f"data={data}", f"out={url}", *settings)
    assert all(list((tmp_path / f"blocks-{node}").glob("??/*")) for node in range(2))
    whole = tmp_path / "whole"
    torchrun([{}], "-m", "millstream", "train", f"data={store}", f"out={whole}", *settings, "devices=2", processes=2)
    assert_ends_alike(local_copy(url, tmp_path / "third", monkeypatch), whole)


def test_a_run_at_a_url_on_a_store_at_a_url_is_evaluated_and_reported(
    store: Path, s3: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"{s3.url}/traces"
    for file in store.iterdir():
        (remote(data) / file.name).put(file)
    code, _, err = run_here("verify", data)
    assert code == 0 and "all checksums match" in err
    ms.train(data, out=url, **{**SHORT, "model": "mean_logprob"})
    monkeypatch.setenv(SPOOL, str(tmp_path / "second"))
    for command in ("report", "evaluate"):
        code, _, err = run_here(command, url)
        assert code == 0, err
    assert {"report.html", "tables/comparison.csv", "evaluated/test/report.html"} <= {*objects(url)}
    before = objects(url)
    monkeypatch.setenv(SPOOL, str(tmp_path / "first"))
    ms.train(data, out=url, **{**SHORT, "model": "mean_logprob"})
    assert objects(url) == before  # what another machine made of the run is kept


def test_after_any_number_of_uploads_the_remote_folder_is_a_valid_run(
    store: Path, whole: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(10, store, url, monkeypatch)
    run, really_put, left = RemoteRun(remote(url)), RemotePath.put, 0

    def put(path: RemotePath, data: bytes | Path, *, is_new: bool = False) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return really_put(path, data)

    for num_uploads in count():
        shutil.copytree(whole, run.folder, dirs_exist_ok=True)
        left = min(num_uploads, 1)  # one more than the last time
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(RemotePath, "put", put)
            run.upload()
        found = local_copy(url, tmp_path / f"machine-{num_uploads}", monkeypatch)
        at = load(found / "checkpoints" / "lstm-0" / "latest.safetensors")[1]
        best = load(found / "checkpoints" / "lstm-0" / "best.safetensors")[1]
        assert at["best_epoch"] <= best["epoch"]
        assert len(losses_of(found)) >= at["epoch"]
        finished = finished_jobs(found)
        assert len(finished) <= len([line for line in read_lines(found) if line["kind"] == "fit"])
        if left >= 0:
            assert num_uploads > 5 and finished
            return
        monkeypatch.setenv(SPOOL, str(tmp_path / "first"))
        run.fetch(is_job=True)


def test_two_machines_that_write_one_run_are_noticed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSource, match=f"{url}: another machine"), writing_run(url) as first:
        first.mkdir()
        (first / "config.yaml").write_text("1")
        with pytest.raises(StoreExists, match="another process"), writing_run(url):
            pass
        with monkeypatch.context() as patch:
            patch.setenv(SPOOL, str(tmp_path / "second"))
            with writing_run(url) as second:
                second.mkdir()
                (second / "config.yaml").write_text("2")
    assert (remote(url) / "config.yaml").read_text() == "2"
    assert (local_run(url) / "config.yaml").read_text() == "2"


def test_a_run_that_trains_on_another_machine_can_be_reported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing_run(url) as training:
        training.mkdir()
        (training / "config.yaml").write_text("1")
    monkeypatch.setenv(SPOOL, str(tmp_path / "second"))
    with writing_run(url) as reported:
        monkeypatch.setenv(SPOOL, str(tmp_path / "first"))
        with writing_run(url) as training:
            (training / "config.yaml").write_text("2")
        (reported / "report.html").write_text("of what there was")
    assert (remote(url) / "config.yaml").read_text() == "2"
    assert objects(url) == ["config.yaml", "report.html"]


def test_an_outage_costs_no_progress_and_a_flipped_bit_is_fetched_again(
    s3: Bucket, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.2")
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        with pytest.raises(RemoteError, match="run the same command again"), writing_run(url) as folder:
            folder.mkdir()
            (folder / "config.yaml").write_text("a: 1")
            proxy.program(unavailable(), method="PUT")
        proxy.heal()
        with writing_run(url) as folder:
            assert (folder / "config.yaml").read_text() == "a: 1"
        assert objects(url) == ["config.yaml"]
        flipped = proxy.program(Fault(flip_at=2), method="GET", match="config.yaml", times=1)
        assert (local_copy(url, tmp_path / "second", monkeypatch) / "config.yaml").read_text() == "a: 1"
        assert flipped.hits > 1
        with pytest.raises(BadSource, match="no such run"):
            local_run(f"{url}-other")
