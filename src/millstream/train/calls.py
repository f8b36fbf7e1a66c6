"""All that can be said of a read, numbered: each class, each taxon above them, and last that nothing is likely."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from millstream.model.read_net import CLASS, PROBABILITY
from millstream.source.classes import Classes, Taxon, answer_column

SPECIES, NO_RANK = "species", "no rank"
UNCLASSIFIED = Taxon("unclassified", 0)
Numbers = NDArray[np.int64]


class Calls:
    """Number -> taxon, rank and, of a class, its id; and answers of a net -> numbers."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        size = len(classes)
        self.starts = np.cumsum([size, *(len(rank.taxa) for rank in classes.ranks)]).tolist()  # of each rank
        self.taxa: Sequence[Taxon] = [*classes.taxa, *(t for r in classes.ranks for t in r.taxa), UNCLASSIFIED]
        above = [rank.name for rank in classes.ranks for _ in rank.taxa]
        self.ranks: Sequence[str] = [*(rank_of(classes, label) for label in range(size)), *above, ""]
        self.class_ids: Sequence[str] = [*map(str, classes.mapping.ids.tolist()), *[""] * (len(above) + 1)]

    def __len__(self) -> int:
        return len(self.taxa)

    @property
    def nothing(self) -> int:
        """The number of reads that are unclassified."""
        return len(self) - 1

    @property
    def asked(self) -> dict[str, NDArray[np.int64]]:
        """What a net is to be asked for."""
        return {rank.name: rank.of_class for rank in self.classes.ranks}

    def choose(self, answers: Mapping[str, Tensor], threshold: float) -> tuple[Numbers, NDArray[np.float32]]:
        """Of each read the lowest level that is likely enough, and how likely; of none, the likeliest class is."""
        found = {name: values.cpu().numpy() for name, values in answers.items()}
        chance = found[PROBABILITY].astype(np.float32)
        numbers = np.where(chance >= threshold, found[CLASS].astype(np.int64), self.nothing)
        for start, rank in zip(self.starts[:-1], self.classes.ranks, strict=True):
            column = answer_column(rank.name)
            taxon, likely = found[column], found[f"{column}_{PROBABILITY}"]
            here = (numbers == self.nothing) & (likely >= threshold)
            numbers[here], chance[here] = start + taxon[here], likely[here]
        return numbers, chance


def rank_of(classes: Classes, label: int) -> str:
    """The rank of a class: that of the taxon it is. Where only higher ranks are known it is taken for a species."""
    own = classes.taxa[label]
    for rank in classes.ranks:
        number = int(rank.of_class[label])
        if number >= 0 and (rank.taxa[number].tax_id == own.tax_id if own.tax_id else rank.taxa[number] == own):
            return rank.name
    return SPECIES if own.tax_id and classes.rank(SPECIES) is None else NO_RANK
