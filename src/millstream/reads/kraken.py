"""The taxa a read can be assigned to, and the number of reads per taxon as a Kraken 2-style report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from millstream.errors import BadSource
from millstream.reads.classifiers.nets import CLASS, PROBABILITY
from millstream.reads.mapping import ROOT, Classes, Taxon, prediction_column

SPECIES, NO_RANK = "species", "no rank"
UNCLASSIFIED = Taxon("unclassified", 0)
Numbers = NDArray[np.int64]
CODES = {
    "domain": "D",
    "kingdom": "K",
    "phylum": "P",
    "class": "C",
    "order": "O",
    "family": "F",
    "genus": "G",
    "species": "S",
}


class Assignments:
    """What reads can be assigned to, by number: the classes, the taxa above them, unclassified."""

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
    def unclassified(self) -> int:
        """The number for unclassified reads."""
        return len(self) - 1

    def choose(self, predictions: Mapping[str, Tensor], threshold: float) -> tuple[Numbers, NDArray[np.float32]]:
        """For each read the lowest taxon that reaches the threshold, and its probability; if none, the class's."""
        found = {name: values.cpu().numpy() for name, values in predictions.items()}
        probability = found[PROBABILITY].astype(np.float32)
        numbers = np.where(probability >= threshold, found[CLASS].astype(np.int64), self.unclassified)
        for start, rank in zip(self.starts[:-1], self.classes.ranks, strict=True):
            column = prediction_column(rank.name)
            taxon, likely = found[column], found[f"{column}_{PROBABILITY}"]
            here = (numbers == self.unclassified) & (likely >= threshold)
            numbers[here], probability[here] = start + taxon[here], likely[here]
        return numbers, probability


def rank_of(classes: Classes, label: int) -> str:
    """The rank of a class: that of its taxon. If only higher ranks are known, it is taken for a species."""
    own = classes.taxa[label]
    for rank in classes.ranks:
        number = int(rank.of_class[label])
        if number >= 0 and (rank.taxa[number].tax_id == own.tax_id if own.tax_id else rank.taxa[number] == own):
            return rank.name
    return SPECIES if own.tax_id and classes.rank(SPECIES) is None else NO_RANK


@dataclass(frozen=True)
class Node:
    """A taxon of the tree."""

    name: str
    rank: str
    parent: int


def kraken_report(assignments: Assignments, counts: Sequence[int]) -> str:
    """The report, from the number of reads per assignment.

    A line is `percent, reads of the clade, reads of the taxon itself, rank code, tax id, name`; names are indented by
    two blanks per level. Taxa without a tax id are not in the tree: their reads count for the next taxon above.
    """
    tree = _Tree(assignments)
    own: defaultdict[int, int] = defaultdict(int)
    for number, count in enumerate(counts[: assignments.unclassified]):
        own[tree.tax_id_of(number)] += count
    return "".join(tree.lines(own, unclassified=counts[assignments.unclassified]))


def check_tax_ids(classes: Classes, where: str) -> None:
    """BadSource if a class has no tax id."""
    missing = [taxon.name for taxon in classes.taxa if taxon.tax_id <= 0]
    if missing:
        raise BadSource(
            f"{where}: a Kraken report needs tax ids, and {len(missing)} of {len(classes)} classes have none, "
            f"such as {missing[0]}. Train with a mapping that has a column tax_id"
        )


class _Tree:
    """The taxa of all classes by tax id, each below its lowest known ancestor."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._nodes = {ROOT: Node("root", "root", ROOT)}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for label in range(len(assignments.classes)):
            self._add(label)

    def _add(self, label: int) -> None:
        at = ROOT
        for number in [*reversed(self._above(label)), label]:
            tax_id = self._assignments.taxa[number].tax_id
            if tax_id <= 0:
                continue
            if tax_id not in self._nodes:
                self._nodes[tax_id] = Node(self._assignments.taxa[number].name, self._assignments.ranks[number], at)
                self._children[at].append(tax_id)
            at = tax_id

    def _above(self, label: int) -> list[int]:
        """The numbers of the taxa above a class, from the lowest."""
        assignments = self._assignments
        of = [int(rank.of_class[label]) for rank in assignments.classes.ranks]
        return [start + taxon for start, taxon in zip(assignments.starts[:-1], of, strict=True) if taxon >= 0]

    def tax_id_of(self, number: int) -> int:
        """The tax id that reads with this assignment count for."""
        assignments = self._assignments
        if number < len(assignments.classes):
            return assignments.taxa[number].tax_id
        place = next(place for place, start in enumerate(assignments.starts[1:]) if number < start)
        members = (assignments.classes.ranks[place].of_class == number - assignments.starts[place]).nonzero()[0]
        above = [one for one in self._above(int(members[0])) if one >= number]
        return next((assignments.taxa[one].tax_id for one in above if assignments.taxa[one].tax_id > 0), ROOT)

    def lines(self, own: dict[int, int], unclassified: int) -> list[str]:
        clades: defaultdict[int, int] = defaultdict(int)
        for tax_id, count in own.items():
            at = tax_id
            clades[at] += count
            while at != ROOT:
                at = self._nodes[at].parent
                clades[at] += count
        total = clades[ROOT] + unclassified
        lines = [_line(total, unclassified, unclassified, "U", 0, "unclassified")] if unclassified else []
        left = [(ROOT, "R", 0, 0)]  # tax id, code of the rank at or above it, steps from that, depth
        while left:
            tax_id, code, steps, depth = left.pop()
            if not clades[tax_id]:
                continue
            node = self._nodes[tax_id]
            if node.rank in CODES:
                code, steps = CODES[node.rank], 0
            name = "  " * depth + node.name
            lines.append(_line(total, clades[tax_id], own.get(tax_id, 0), f"{code}{steps or ''}", tax_id, name))
            below = sorted(self._children[tax_id], key=lambda child: (clades[child], -child))
            left += [(child, code, steps + 1, depth + 1) for child in below]
        return lines


def _line(total: int, clade: int, own: int, code: str, tax_id: int, name: str) -> str:
    return f"{100 * clade / total:6.2f}\t{clade}\t{own}\t{code}\t{tax_id}\t{name}\n"
