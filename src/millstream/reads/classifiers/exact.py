"""`kmer-exact`: the classes that the k-mers of a read were seen in, and how sure that makes it of one, or of none."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.order import mix_words
from millstream.core.split import LABEL
from millstream.reads.classifiers.nets import NEVER, ReadNet
from millstream.reads.kmers.hits import (
    FEATURES,
    LONGEST,
    LOW_31,
    ChosenKmers,
    Hits,
    Pieces,
    find_hits,
    whole_reads,
)
from millstream.reads.kmers.sets import MANY, KmerCounts, KmerSets, Numbers
from millstream.reads.syncmers import Syncmers
from millstream.training.task import Batch

# B batch, C classes, M classes that a read may be of, F what is seen of each of them, W width

WIDTH = 16
FRAGMENT = LONGEST  # bases of the fragments that genomes are cut into
GROUP = 10  # neighbouring reads or fragments with blocks of the same size
BLOCKS = np.array([1, 4, 20])  # halves of fragments that are left out together, as strains differ by genes and islands
LEFT_OUT = np.uint64(round(0.1 * (1 << 24)))  # of 24 random bits: one block in ten
HIDDEN = 0.05  # of pieces: their class is left out, as if no genome of it were known
MUTATED, MOST_MUTATED = 0.03, 0.15  # of the bases of a piece: on average in one half of them, at most in the other
SHORTEST = 50  # piece, in bases
SAMPLE = 4_000_000  # k-mers of the reads that it is calibrated on
STEPS, PIECES, LR = 300, 1024, 0.02  # of the calibration


class KmerExact(ReadNet):
    """`kmer-exact`: a table from each k-mer to the classes it was seen in; a k-mer that was not seen is a miss.

    `prepare` counts the k-mers of all reads once, and then fits a small network that scores the classes of a read by
    what the k-mers say of each, all by the same weights. One more class, the last, is none of them. What it is fitted
    on are pieces as of other strains: mutated; one block in ten as of a region that its class lacks, and some without
    their class. All that remains of those are k-mers that other classes share.
    """

    most_records = 1  # nothing is left to learn after `prepare`
    BUFFERS: Mapping[str, tuple[int, torch.dtype]] = {  # the fields of KmerSets, and what they are at first
        "table": (1, torch.int32),
        "starts": (MANY + 2, torch.int32),
        "members": (0, torch.int32),
        "form": (3, torch.int64),
        "kin": (0, torch.float32),
    }

    def __init__(self, chosen: Syncmers, num_classes: int, memory: int, num_bases: int | None = None) -> None:
        super().__init__(num_classes + 1, num_classes)
        self.chosen, self.memory, self.num_bases = chosen, memory, num_bases
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)
        for name, (size, dtype) in self.BUFFERS.items():
            self.register_buffer(name, torch.zeros(num_classes if name == "kin" else size, dtype=dtype))

    @property
    def needs_preparation(self) -> bool:
        return True

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Count the k-mers of all batches by class, make the table, and calibrate on a sample of the reads."""
        expected = None if self.num_bases is None else int(self.num_bases * self.chosen.share)
        counts = KmerCounts(self.num_classes, self.memory, expected)
        sample = Sample(min(SAMPLE, self.memory // 64))
        for batch in batches:
            some = LabelledReads.of(batch)
            counts.add(some.chosen.kmers, np.repeat(some.labels, some.sizes), some.is_left_out())
            sample.add(some)
        for name, values in zip(self.BUFFERS, counts.finish(), strict=True):
            setattr(self, name, torch.as_tensor(values))
        self._calibrate(sample.joined())

    def forward(self, batch: Batch, target_B: Tensor, weight_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of pieces of these reads. It has no gradient: weights were fitted before."""
        with torch.no_grad():
            loss = self._loss_of_pieces(LabelledReads.of(batch), torch.arange(len(target_B)))
        return loss + 0.0 * self.outer.bias.sum(), {self.loss_name: loss}

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, C + 1]: the last is that of no class."""
        found = self._hits(_chosen(batch), whole_reads(_array(batch["lengths"]).astype(np.int64)))
        return self._scores(found), {}

    def num_rows(self, batch: Batch) -> int:
        return len(batch["starts"])

    def is_supported(self, batch: Batch, logits_BC: Tensor) -> Tensor:
        """[B]: whether some class has more of the k-mers than chance gives."""
        return logits_BC[:, : self.num_classes].amax(dim=1) > NEVER

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The table takes the size of the one that is loaded."""
        for name in self.BUFFERS:
            if name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[name], device=self.outer.weight.device))
        return super().load_state_dict(state_dict, strict, assign)

    def _calibrate(self, sample: "LabelledReads") -> None:
        if not len(sample.labels):
            return
        optimizer = torch.optim.Adam(self.parameters(), LR)
        per_base = torch.as_tensor(sample.lengths + 1.0)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = LR * (0.51 + 0.49 * math.cos(math.pi * step / STEPS))
            optimizer.zero_grad()
            rows_B = torch.multinomial(per_base, PIECES, replacement=True)
            loss = self._loss_of_pieces(sample, rows_B)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.zero_grad()

    def _loss_of_pieces(self, reads: "LabelledReads", rows_B: Tensor) -> Tensor:
        """The mean loss of a random piece of each of these reads."""
        target_B = torch.as_tensor(reads.labels)[rows_B]
        logits_BC = self._scores(self._hits(reads.chosen, _random_pieces(reads, rows_B))).cpu()
        is_found_B = logits_BC.gather(1, target_B[:, None])[:, 0] > NEVER
        return functional.cross_entropy(logits_BC, torch.where(is_found_B, target_B, self.num_classes))

    def _hits(self, chosen: ChosenKmers, pieces: Pieces) -> Hits:
        sets = KmerSets(*(_array(cast(Tensor, getattr(self, name))) for name in self.BUFFERS))
        return find_hits(chosen, pieces, sets, by=self.chosen, num_classes=self.num_classes)

    def _scores(self, found: Hits) -> Tensor:
        device = self.outer.weight.device
        classes_BM = torch.as_tensor(found.classes, device=device).long()
        features_BMF = torch.as_tensor(found.features, device=device)
        score_BM = self.outer(functional.relu(self.inner(features_BMF)))[:, :, 0]
        # The last column but one is no class; the last takes the places without a candidate.
        logits_BC = score_BM.new_full((len(classes_BM), self.num_classes + 2), NEVER)
        logits_BC[:, self.num_classes] = 0.0
        place_BM = torch.where(classes_BM < 0, self.num_classes + 1, classes_BM)
        return logits_BC.scatter(1, place_BM, score_BM)[:, : self.num_classes + 1]


@dataclass(frozen=True)
class LabelledReads:
    """The k-mers of reads or fragments, and their classes."""

    chosen: ChosenKmers
    lengths: Numbers
    labels: Numbers
    numbers: Numbers

    @staticmethod
    def of(batch: Batch) -> "LabelledReads":
        lengths, labels, numbers = (_array(batch[name]).astype(np.int64) for name in ("lengths", LABEL, "numbers"))
        return LabelledReads(_chosen(batch), lengths, labels, numbers)

    @property
    def sizes(self) -> Numbers:
        """The number of k-mers of each."""
        return np.diff(self.chosen.starts, append=np.int32(self.chosen.kmers.size)).astype(np.int64)

    def is_left_out(self) -> NDArray[np.bool_]:
        """[k-mer]: whether the calibration leaves it out of its class."""
        is_second = self.chosen.places >= FRAGMENT // 2
        return halves_left_out(self.numbers)[np.repeat(np.arange(len(self.numbers)), self.sizes), is_second.astype(int)]

    def where(self, is_wanted: NDArray[np.bool_]) -> "LabelledReads":
        is_inside, sizes = np.repeat(is_wanted, self.sizes), self.sizes[is_wanted]
        starts = (np.cumsum(sizes) - sizes).astype(np.int32)
        chosen = ChosenKmers(self.chosen.kmers[is_inside], self.chosen.places[is_inside], starts)
        return LabelledReads(chosen, self.lengths[is_wanted], self.labels[is_wanted], self.numbers[is_wanted])


@dataclass
class Sample:
    """Some of the reads that are added, with at most so many k-mers; the same ones in whatever order they come."""

    most_kmers: int
    every: int = 1
    parts: list[LabelledReads] = field(default_factory=list[LabelledReads])
    num_kmers: int = 0

    def add(self, reads: LabelledReads) -> None:
        self._keep([*self.parts, self._thinned(reads)])
        while self.num_kmers > self.most_kmers and self.every < 1 << 30:
            self.every *= 2
            self._keep([self._thinned(part) for part in self.parts])

    def joined(self) -> LabelledReads:
        order = sorted(self.parts, key=lambda part: int(part.numbers[0]))
        first = np.cumsum([0, *(part.chosen.kmers.size for part in order)])
        starts = [part.chosen.starts + at for part, at in zip(order, first, strict=False)]
        chosen = ChosenKmers(
            np.concatenate([np.empty(0, np.int64), *(part.chosen.kmers for part in order)]),
            np.concatenate([np.empty(0, np.int32), *(part.chosen.places for part in order)]),
            np.concatenate([np.empty(0, np.int32), *starts]).astype(np.int32),
        )
        others = [
            np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in order)])
            for name in ("lengths", "labels", "numbers")
        ]
        return LabelledReads(chosen, *others)

    def _keep(self, parts: list[LabelledReads]) -> None:
        self.parts = [part for part in parts if len(part.numbers)]
        self.num_kmers = sum(part.chosen.kmers.size for part in self.parts)

    def _thinned(self, reads: LabelledReads) -> LabelledReads:
        return reads.where(mix_words(reads.numbers, 1) & np.uint64(self.every - 1) == 0)


def halves_left_out(numbers: Numbers) -> NDArray[np.bool_]:
    """[read, half]: whether the calibration leaves this half of a fragment out of its class. Reads are first halves."""
    size = BLOCKS[(mix_words(numbers // GROUP, 1) >> np.uint64(40)).astype(np.int64) % len(BLOCKS)]
    blocks = (2 * numbers[:, None] + np.arange(2)) // size[:, None] * 32 + size[:, None]
    return (mix_words(blocks.reshape(-1)) >> np.uint64(40) < LEFT_OUT).reshape(-1, 2)


def _random_pieces(reads: LabelledReads, rows_B: Tensor) -> Pieces:
    """One of each of these reads, mutated; of some, the class is hidden."""
    size = len(rows_B)
    lengths_B = torch.as_tensor(reads.lengths)[rows_B].double()
    least_B = lengths_B.clamp(max=SHORTEST)
    pieces_B = (least_B * (lengths_B / least_B.clamp(min=1)).clamp(min=1) ** torch.rand(size).double()).round()
    begins_B = (torch.rand(size) * (lengths_B - pieces_B + 1)).long()
    drawn_B = torch.rand(size).double().clamp(min=1e-9)
    rate_B = torch.where(torch.rand(size) < 0.5, MOST_MUTATED * drawn_B, -MUTATED * drawn_B.log())
    labels_B = torch.as_tensor(reads.labels)[rows_B]
    return Pieces(
        rows_B.numpy(),
        begins_B.numpy(),
        (begins_B + pieces_B.long()).numpy(),
        (-1 / torch.log1p(-rate_B.clamp(max=0.5))).numpy(),
        torch.randint(1, LOW_31, (size,)).numpy(),
        torch.where(torch.rand(size) < HIDDEN, labels_B, -1).numpy(),
        is_tested=True,
    )


def _chosen(batch: Batch) -> ChosenKmers:
    return ChosenKmers(*(_array(batch[name]) for name in ("kmers", "places", "starts")))


def _array(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()
