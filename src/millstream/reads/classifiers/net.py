"""What the classifiers of reads share: a loss over classes, and answers over both strands, pairs and ranks."""

# B batch, C classes, G taxa of a rank, M mates

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from millstream.dataset.both_strands import OTHER
from millstream.model.net import Batch, Net
from millstream.source.classes import answer_column

CLASS, PROBABILITY = "class", "probability"


class ReadNet(Net):
    """`logits` [B, C] of the classes."""

    at_most = 4096
    loss_name = "cross_entropy"

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, 0)
        self.num_classes = num_classes
        self.mates = 1
        self._ranks: dict[str, Tensor] = {}

    def ask_for(self, ranks: dict[str, NDArray[np.int64]], mates: int = 1) -> None:
        """Let `answer` also tell the taxon at these ranks (the taxon of each class, -1 for none), and pairs as one."""
        self._ranks = {name: torch.from_numpy(of_class) for name, of_class in ranks.items()}  # pyright: ignore
        self.mates = mates

    def loss(self, logits: Tensor, target_B: Tensor, weight_B: Tensor) -> Tensor:
        return (functional.cross_entropy(logits.float(), target_B, reduction="none") * weight_B).mean()

    def answer(self, batch: Batch) -> dict[str, Tensor]:
        """The likeliest class and its probability; the same, summed over classes, for the taxa of each rank."""
        found_BC = self.probabilities(batch)
        if self.mates > 1:
            found_BC = found_BC.reshape(-1, self.mates, self.num_classes).mean(dim=1)
        probability_B, class_B = found_BC.max(dim=1)
        answers = {CLASS: class_B.int(), PROBABILITY: probability_B}
        for name, taxon_C in self._ranks.items():
            taxon_C = taxon_C.to(found_BC.device)
            sums_BG = found_BC.new_zeros(len(found_BC), int(taxon_C.max()) + 2)
            sums_BG.index_add_(1, taxon_C + 1, found_BC)  # the first is of classes that have none
            chance_B, taxon_B = sums_BG[:, 1:].max(dim=1)
            column = answer_column(name)
            answers |= {column: taxon_B.int(), f"{column}_{PROBABILITY}": chance_B}
        return answers

    def probabilities(self, batch: Batch) -> Tensor:
        """[B, C]: the mean over both strands, where the batch has them."""
        found_BC = self.logits(batch)[0].float().softmax(dim=1)
        other = {name.removeprefix(OTHER): value for name, value in batch.items() if name.startswith(OTHER)}
        if not other:
            return found_BC
        return (found_BC + self.logits(other)[0].float().softmax(dim=1)) / 2


def seen_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], at least one place of them, and which count: all there are, or the first place of none."""
    ids_BT, mask_BT = batch["input_ids"].long(), batch["attention_mask"].bool()
    if not ids_BT.shape[1]:  # all reads are too short for a token
        ids_BT, mask_BT = functional.pad(ids_BT, (0, 1)), functional.pad(mask_BT, (0, 1))
    return ids_BT, mask_BT | (torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0)
