"""`kmer-linear`: log-frequencies of each k-mer per class, summed over the read."""

# B batch, C classes, K k-mers of all reads

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from millstream.core.split import LABEL
from millstream.reads.classifiers.nets import ReadNet
from millstream.training.task import Batch

ROWS = 1 << 16  # of a table per step
NEVER = -1e4  # the bias of a class without training reads


class KmerLinear(ReadNet):
    """Takes `buckets_k` [K] and `starts_k` [B] for each length k.

    The weights are counted, not learned by gradient descent: `prepare` sees all reads once, and a weight is the log
    count of its bucket in its class, corrected for the size of the class. Gradients only fit the weight of each k
    (`gain`) and a bias per class. During training a read is excluded from the counts that classify it: otherwise long
    k-mers, which every read shares with itself, would get too much weight.
    """

    lr = 0.02
    clips = False
    most_records = 400_000  # only a few parameters are fitted

    def __init__(self, ks: Iterable[int], num_buckets: int, num_classes: int) -> None:
        super().__init__(num_classes, num_classes)
        self.ks = tuple(ks)
        self.gain = nn.Parameter(torch.full((len(self.ks),), 0.3))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        for k in self.ks:
            self.register_buffer(f"table_{k}", torch.zeros(num_buckets, num_classes))
            self.register_buffer(f"size_{k}", torch.zeros(num_classes))  # of each class, as a logarithm

    @property
    def needs_preparation(self) -> bool:
        return True

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Count the k-mers of all batches by class, and turn the counts into weights."""
        for batch in batches:
            self._count(batch)
        self._weigh()

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        sums_BC = self.bias
        for place, k in enumerate(self.ks):
            with torch.no_grad():
                found_BC = functional.embedding_bag(
                    batch[f"buckets_{k}"], self._table(k), batch[f"starts_{k}"], mode="sum"
                )
                if self.training:
                    self._leave_out(found_BC, batch, k)
            sums_BC = sums_BC + self.gain[place] * found_BC
        return sums_BC, {}

    def num_rows(self, batch: Batch) -> int:
        return len(batch["numbers"])

    def _count(self, batch: Batch) -> None:
        for k in self.ks:
            buckets_K, label_K = batch[f"buckets_{k}"].long(), _of_kmers(batch, k)[1]
            places = buckets_K * self.num_classes + label_K
            self._table(k).view(-1).index_add_(0, places, torch.ones(len(places)))

    def _weigh(self) -> None:
        """In place, log(1 + count) less the logarithm of the size of the class. Classes without k-mers never win."""
        seen_C = torch.stack([self._table(k).any(dim=0) for k in self.ks]).any(dim=0)
        with torch.no_grad():
            self.bias.masked_fill_(~seen_C, NEVER)
        for k in self.ks:
            table, size_C = self._table(k), cast(Tensor, getattr(self, f"size_{k}"))
            total_C = (table.sum(dim=0, dtype=torch.float64) + len(table)).log()
            size_C.copy_(total_C - total_C.mean())
            for first in range(0, len(table), ROWS):
                table[first : first + ROWS].log1p_().sub_(size_C)

    def _leave_out(self, found_BC: Tensor, batch: Batch, k: int) -> None:
        """Exclude each read from the counts of its own class."""
        read_K, label_K = _of_kmers(batch, k)
        size_C = cast(Tensor, getattr(self, f"size_{k}"))
        weight_K = self._table(k)[batch[f"buckets_{k}"].long(), label_K]
        less_K = (weight_K + size_C[label_K]).exp().sub_(1).clamp_(min=1).log_() - size_C[label_K]
        found_BC.view(-1).index_add_(0, read_K * self.num_classes + label_K, less_K - weight_K)

    def _table(self, k: int) -> Tensor:
        return cast(Tensor, getattr(self, f"table_{k}"))


def _of_kmers(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """The read of each k-mer, and its label."""
    starts_B, buckets_K = batch[f"starts_{k}"].long(), batch[f"buckets_{k}"]
    counts_B = torch.diff(starts_B, append=starts_B.new_tensor([len(buckets_K)]))
    read_K = torch.repeat_interleave(counts_B)
    return read_K, batch[LABEL].long()[read_K]
