"""Small read classifiers, what they see of reads, and reads that one can learn to tell apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from millstream.reads.batch import ReadBatch
from millstream.reads.classifiers import classifier_kit
from millstream.reads.classifiers.nets import ReadNet
from millstream.reads.classifiers.nets import probabilities as probabilities_of
from millstream.reads.kind import ReadSettings
from millstream.training.study import Kit
from millstream.training.task import Batch

NUM_CLASSES = 3
LENGTHS = (37, 90, 12, 61, 5, 150)  # of reads that need padding beside each other
COMPLEMENT = str.maketrans("ACGT", "TGCA")


def make_kit(
    name: str,
    *,
    num_classes: int = NUM_CLASSES,
    num_bases: int | None = None,
    clades: Sequence[NDArray[np.int64]] = (),
    **changes: Any,
) -> Kit:
    """A small classifier, with other settings if given."""
    words = {"lstm": "kmer(3)", "transformer": "kmer(3, stride=2)"}.get(name, "auto")
    given: dict[str, Any] = {"memory": 1 << 23, "k": "4,6/2", "bits": 9, "width": 16, "layers": 2, "dropout": 0.0}
    return classifier_kit(
        name, ReadSettings(**given | {"tokenizer": words} | changes), num_classes, num_bases=num_bases, clades=clades
    )


def random_reads(lengths: Sequence[int], seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("ACGT"), length)) for length in lengths]


def reverse_complement(read: str) -> str:
    return read[::-1].translate(COMPLEMENT)


def batch_of(kit: Kit, reads: Sequence[str], labels: Sequence[int] = (), *, train: bool = False) -> Batch:
    """What the net sees of reads while scoring, or while training."""
    flat = np.frombuffer("".join(reads).encode(), np.uint8)
    fetched = ReadBatch(np.arange(len(reads)), flat, np.cumsum([0, *map(len, reads)], dtype=np.int64), {})
    made: dict[str, Any] = {"numbers": fetched.numbers}
    for feature in kit.features if train or kit.scoring is None else kit.scoring:
        made |= feature(fetched)
    if len(labels):
        made["label"] = np.array(labels)
    return {name: torch.as_tensor(value) for name, value in made.items()}


def probabilities(kit: Kit, net: ReadNet, reads: Sequence[str]) -> np.ndarray:
    with torch.inference_mode():
        return probabilities_of(net, batch_of(kit, reads))[0].numpy()


def together_as_alone(kit: Kit, net: ReadNet, reads: Sequence[str]) -> np.ndarray:
    """The probabilities of reads, which depend neither on the other reads nor on padding."""
    together = probabilities(kit, net, reads)
    assert together.sum(axis=1) == pytest.approx(1, abs=1e-5) and np.ptp(together[:, 0]) > 1e-3
    for number, read in enumerate(reads):
        assert probabilities(kit, net, [read])[0] == pytest.approx(together[number], abs=1e-5)
    return together


def easy_reads(num: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Of two classes, one of them rich in A and T."""
    labels = np.arange(num) % 2
    rng = np.random.default_rng(seed)
    shares = np.array([[0.35, 0.15, 0.15, 0.35], [0.15, 0.35, 0.35, 0.15]])
    lengths = rng.integers(40, 70, num)
    pairs = zip(labels, lengths, strict=True)
    return ["".join(rng.choice(list("ACGT"), length, p=shares[label])) for label, length in pairs], labels


def learn(kit: Kit, net: ReadNet, steps: int, num: int = 96) -> tuple[float, float]:
    """The loss on reads that are not trained on, before and after."""
    reads, labels = easy_reads(num, seed=1)
    batch = batch_of(kit, reads, labels, train=True)
    test, truth = easy_reads(64, seed=2)
    net.prepare([batch])
    optimizer = net.optimizer(4 * net.lr, 0.01)

    def loss_now() -> float:
        net.eval()
        with torch.inference_mode():
            return net(batch_of(kit, test), torch.from_numpy(truth), torch.ones(len(test)))[0].item()

    before = loss_now()
    net.train()
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch, torch.from_numpy(labels), torch.ones(num))[0].backward()
        optimizer.step()
    return before, loss_now()
