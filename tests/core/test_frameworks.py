"""Lightning's Trainer and Accelerate train on the stock DataLoaders of a collection, and see every record."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import millstream as ms
from support.loading import numbers_of

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
