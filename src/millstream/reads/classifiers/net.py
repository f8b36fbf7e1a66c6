"""What read classifiers share: the loss, and predictions over both strands, read pairs and ranks."""

# B batch, C classes, G taxa of a rank, M mates

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from millstream.reads.features import OTHER
from millstream.reads.taxonomy import answer_column
from millstream.training.net import Batch, Net

CLASS, PROBABILITY = "class", "probability"


class ReadNet(Net):
    """`logits` [B, C] of the classes."""

    at_most = 4096
    loss_name = "cross_entropy"

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width)
        self.num_classes = num_classes

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        return (functional.cross_entropy(logits.float(), target_B, reduction="none") * weight_B).mean()


@dataclass(frozen=True)
class ReadAnswers:
    """A net's logits -> the class of each read, or of each read pair (`mates=2`), and its taxon at each rank.

    `ranks` has the taxon of each class, by number, at each rank; -1 for none.
    """

    ranks: Mapping[str, NDArray[np.int64]]
    mates: int = 1

    def __call__(self, net: Net, batch: Batch) -> dict[str, Tensor]:
        """The most probable class and its probability; and the same for the taxa of each rank, summed over classes."""
        found_BC = probabilities(net, batch)
        if self.mates > 1:
            found_BC = found_BC.reshape(-1, self.mates, found_BC.shape[1]).mean(dim=1)
        probability_B, class_B = found_BC.max(dim=1)
        answers = {CLASS: class_B.int(), PROBABILITY: probability_B}
        for name, of_class in self.ranks.items():
            taxon_C = torch.as_tensor(of_class, device=found_BC.device)
            sums_BG = found_BC.new_zeros(len(found_BC), int(of_class.max()) + 2)
            sums_BG.index_add_(1, taxon_C + 1, found_BC)  # the first column is for classes without a taxon
            rank_probability_B, taxon_B = sums_BG[:, 1:].max(dim=1)
            column = answer_column(name)
            answers |= {column: taxon_B.int(), f"{column}_{PROBABILITY}": rank_probability_B}
        return answers


def probabilities(net: Net, batch: Batch) -> Tensor:
    """[B, C]: the mean over both strands, where the batch has them."""
    found_BC = net.logits(batch)[0].float().softmax(dim=1)
    other = {name.removeprefix(OTHER): value for name, value in batch.items() if name.startswith(OTHER)}
    if not other:
        return found_BC
    return (found_BC + net.logits(other)[0].float().softmax(dim=1)) / 2


def seen_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], T at least 1, and their mask, in which the first position is always set."""
    ids_BT, mask_BT = batch["input_ids"].long(), batch["attention_mask"].bool()
    if not ids_BT.shape[1]:  # all reads are too short for a token
        ids_BT, mask_BT = functional.pad(ids_BT, (0, 1)), functional.pad(mask_BT, (0, 1))
    return ids_BT, mask_BT | (torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0)
