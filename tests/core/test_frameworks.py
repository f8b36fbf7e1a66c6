"""Lightning, Accelerate and torchdata work with the datasets and streams of a collection, and see every record."""

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import millstream as ms
from millstream.errors import StateMismatch
from support.loading import numbers_of, open_traces, same
from support.remote_stores import upload
from support.s3_server import Bucket

FEATURE = ms.features.fields("label", "vector")
# Warnings of Lightning about itself and about workers; all others stay errors.
ITS_OWN = [
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Your `IterableDataset` has",
]


def loaders(traces: ms.Traces) -> list[DataLoader[Any]]:
    """Map-style and shuffled by torch, and a stream that shuffles by itself, each with a worker."""
    return [
        DataLoader(traces.dataset(FEATURE), batch_size=8, shuffle=True, num_workers=1),
        DataLoader(traces.stream(FEATURE, batch_size=8, seed=1), batch_size=None, num_workers=1),
    ]


@pytest.mark.filterwarnings(*ITS_OWN)
def test_the_lightning_trainer_fits_on_a_dataset_and_a_stream(traces: ms.Traces, tmp_path: Path):
    lightning = pytest.importorskip(
        "pytorch_lightning", reason="Lightning is not installed: pip install pytorch-lightning"
    )

    class Model(lightning.LightningModule):
        def __init__(self, dataset: Any) -> None:
            super().__init__()
            self.dataset = dataset
            self.layer = torch.nn.Linear(5, 1)
            self.seen: list[list[int]] = []

        def on_train_epoch_start(self) -> None:
            self.seen.append([])

        def on_train_epoch_end(self) -> None:
            self.dataset.set_epoch(self.current_epoch + 1)  # Lightning calls it only for samplers

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.seen[-1] += batch["numbers"].tolist()
            return (self.layer(batch["vector"] / 100)[:, 0] - batch["label"] / 100).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for loader in loaders(traces):
        model = Model(loader.dataset)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, loader)
        assert [sorted(epoch) for epoch in model.seen] == [list(range(101))] * 2
        assert model.seen[0] != model.seen[1]
        assert trainer.global_step == 26


def test_accelerate_prepares_a_dataset_and_a_stream(traces: ms.Traces):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    for loader in loaders(traces):
        layer = torch.nn.Linear(5, 1)
        model, optimizer, batches = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), loader)
        seen: list[dict[str, torch.Tensor]] = []
        for batch in batches:
            loss = (model(batch["vector"] / 100)[:, 0] - batch["label"] / 100).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(batch)
        assert len(seen) == len(batches) == 13
        assert sorted(numbers_of(seen)) == list(range(101))
        assert numbers_of(batches) != numbers_of(seen), "Accelerate sets the epoch of a stream by itself"


def stateful_loader(source: Any, **options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="not installed: pip install torchdata")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls it
        return loaders.StatefulDataLoader(source, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine of two cores
@pytest.mark.parametrize(
    ("workers", "options", "batched"),
    [
        (0, {}, True),
        (0, {}, False),
        (1, {}, True),
        (2, {"persistent_workers": True}, False),
        (3, {"snapshot_every_n_steps": 3}, True),
    ],
    ids=["0 batches", "0 samples", "1 batches", "2 samples", "3 batches"],
)
def test_a_stateful_dataloader_resumes_with_any_number_of_workers(
    traces: ms.Traces, workers: int, options: dict[str, Any], batched: bool
):
    def loader() -> Any:
        stream = traces.stream(FEATURE, batch_size=8 if batched else None, seed=1)
        return stateful_loader(stream, batch_size=None if batched else 8, num_workers=workers, **options)

    whole = loader()
    whole.dataset.set_epoch(1)
    batches, states = list[Any](), [json.dumps(whole.state_dict())]
    for batch in whole:
        batches.append(batch)
        states.append(json.dumps(whole.state_dict()))
    wanted = numbers_of(batches)
    assert sorted(wanted) == list(range(101))
    for done in (0, 12, 5):
        resumed = loader()
        resumed.load_state_dict(json.loads(states[done]))
        assert numbers_of(batches[:done]) + numbers_of(resumed) == wanted
        if done != 5:
            continue
        assert numbers_of(resumed) == wanted, "the next loop is the whole epoch, unless set_epoch chooses another"
        resumed.dataset.set_epoch(2)
        following = numbers_of(resumed)
        assert sorted(following) == list(range(101)) and following != wanted


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_a_stateful_dataloader_resumes_a_store_in_a_bucket(
    traces: ms.Traces, s3: Bucket, monkeypatch: pytest.MonkeyPatch, context: str, workers: int
):
    monkeypatch.setenv("MILLSTREAM_CACHE", "0")  # every worker makes requests
    remote = open_traces(upload(traces.path, f"{s3.url}/traces"))
    assert remote[7]["question_id"] == "q7", "before a fork, which does not copy the threads of this client"

    def loader(context: str) -> Any:
        stream = remote.stream(FEATURE, batch_size=8, seed=1)
        return stateful_loader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)

    wanted = list(DataLoader(traces.stream(FEATURE, batch_size=8, seed=1), batch_size=None))
    whole, resumed = loader("fork"), loader(context)
    first = list(islice(whole, 5))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert same([*first, *resumed], wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_saved_after_its_epoch_begins_a_full_one(traces: ms.Traces, workers: int):
    def loader() -> Any:
        return stateful_loader(traces.stream(FEATURE, batch_size=8, seed=1), batch_size=None, num_workers=workers)

    whole, resumed = loader(), loader()
    wanted = numbers_of(whole)
    resumed.load_state_dict(whole.state_dict())
    assert numbers_of(resumed) == wanted


def test_a_resumed_epoch_that_is_interrupted_again_resumes_in_the_right_place(traces: ms.Traces):
    def loader() -> Any:
        return stateful_loader(traces.stream(FEATURE, batch_size=8, seed=1), batch_size=None, num_workers=2)

    wanted, found, state = numbers_of(loader()), list[int](), dict[str, Any]()
    for batches in (3, 4, 6):
        resumed = loader()
        resumed.load_state_dict(state)
        found += numbers_of(islice(resumed, batches))
        state = resumed.state_dict()
    assert found == wanted


def test_a_stateful_dataloader_of_another_shape_is_refused(traces: ms.Traces):
    def loader(workers: int, **options: Any) -> Any:
        stream = traces.stream(FEATURE, seed=1, **{"batch_size": 8, **options})
        return stateful_loader(stream, batch_size=None, num_workers=workers)

    saved = loader(2)
    list(islice(saved, 3))
    for other, offending in ((loader(1), "num_workers: 2 -> 1"), (loader(2, batch_size=4), "batch_size: 8 -> 4")):
        other.load_state_dict(saved.state_dict())
        with pytest.raises(StateMismatch, match=offending):
            iter(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_a_map_style_dataset(traces: ms.Traces, workers: int):
    def loader() -> Any:
        return stateful_loader(traces.dataset(FEATURE), batch_size=8, shuffle=True, num_workers=workers)

    whole, resumed = loader(), loader()
    batches = iter(whole)
    first = numbers_of(islice(batches, 5))
    resumed.load_state_dict(whole.state_dict())
    assert sorted(first + numbers_of(resumed)) == list(range(101))


def test_a_stream_read_by_workers_does_not_guess_its_position(traces: ms.Traces):
    stream = traces.stream(FEATURE, batch_size=8, seed=1)
    list(islice(DataLoader(stream, batch_size=None, num_workers=1), 3))
    with pytest.raises(ValueError, match="batches="):
        stream.state_dict()
    assert stream.state_dict(batches=3)["samples"] == 24
    stream.set_epoch(1)
    assert stream.state_dict()["samples"] == 0
