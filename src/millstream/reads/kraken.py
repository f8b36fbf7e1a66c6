"""The taxa a read can be assigned to, and the number of reads per taxon as a Kraken 2-style report."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.errors import BadSource
from millstream.reads.mapping import CLASS, PROBABILITY, Classes, prediction_column
from millstream.reads.taxonomy import RANKS, ROOT, Taxon

SPECIES, NO_RANK = "species", "no rank"
UNCLASSIFIED = Taxon("unclassified", 0)
Numbers = NDArray[np.int64]
CODES = {rank: rank[0].upper() for rank in RANKS}


class Assignments:
    """What reads can be assigned to, by number: the classes, the taxa above them, unclassified."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        size = len(classes)
        sizes = [size, *(len(rank.taxa) for rank in classes.ranks)]
        self.starts: list[int] = np.cumsum(sizes)[:-1].tolist()  # of each rank
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

    def lineage(self, number: int) -> list[int]:
        """The numbers of the taxa above an assignment, from the highest, and its own."""
        ranks = self.classes.ranks
        label, own = number, [number]
        if number >= len(self.classes):  # a taxon, whose lineage is that of any of its classes
            place = bisect_right(self.starts, number) - 1
            label, own = int(np.argmax(ranks[place].of_class == number - self.starts[place])), []
        of_class = [int(rank.of_class[label]) for rank in ranks]
        above = [start + taxon for start, taxon in zip(self.starts, of_class, strict=True) if taxon >= 0]
        return [*(taxon for taxon in reversed(above) if taxon >= number), *own]

    def choose(
        self, predictions: Mapping[str, NDArray[Any]], threshold: float | Sequence[float]
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """For each read the lowest taxon that reaches the threshold, and its probability; if none, the class's.

        There may be a threshold for classes and one for each rank. The probability of a taxon is the sum over its
        classes. A probability of 0 means that a read cannot be classified, at any threshold.
        """
        found = {name: np.asarray(values) for name, values in predictions.items()}
        of_class, *of_ranks = np.broadcast_to(threshold, 1 + len(self.starts)).tolist()
        probability = found[PROBABILITY].astype(np.float32)
        numbers = np.where(
            (probability > 0) & (probability >= of_class), found[CLASS].astype(np.int64), self.unclassified
        )
        for start, rank, least in zip(self.starts, self.classes.ranks, of_ranks, strict=True):
            column = prediction_column(rank.name)
            taxon, likely = found[column], found[f"{column}_{PROBABILITY}"]
            here = (numbers == self.unclassified) & (likely > 0) & (likely >= least)
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


class Node(NamedTuple):
    """A taxon of the tree, whose key is its tax id, or a negative number; `parent` is a key."""

    name: str
    rank: str
    parent: int


def kraken_report(assignments: Assignments, counts: Sequence[int]) -> str:
    """The report, from the number of reads per assignment.

    A line is `percent, reads of the clade, reads of the taxon itself, rank code, tax id, name`; names are indented by
    two blanks per level. Taxa whose tax id is not known have the tax id 0, as in the mapping.
    """
    tree = {ROOT: Node("root", "root", ROOT)}
    own: Counter[int] = Counter()
    clades: Counter[int] = Counter()
    for number, count in enumerate(counts[: assignments.unclassified]):
        at = ROOT
        for above in assignments.lineage(number):
            taxon = assignments.taxa[above]
            key = taxon.tax_id if taxon.tax_id > 0 else -above
            tree.setdefault(key, Node(taxon.name, assignments.ranks[above], at))
            at = key
        own[at] += count
        clades[at] += count
        while at != ROOT:
            at = tree[at].parent
            clades[at] += count
    unclassified = counts[assignments.unclassified]
    total = clades[ROOT] + unclassified
    lines = [_line(total, unclassified, unclassified, "U", 0, "unclassified")] if unclassified else []
    children: defaultdict[int, list[int]] = defaultdict(list)
    for key, node in tree.items():
        if key != ROOT and clades[key]:
            children[node.parent].append(key)
    left = [(ROOT, "R", 0, 0)] if clades[ROOT] else []  # key, code of the rank at or above it, steps below, depth
    while left:
        key, code, steps, depth = left.pop()
        node = tree[key]
        if node.rank in CODES:
            code, steps = CODES[node.rank], 0
        name = "  " * depth + node.name
        lines.append(_line(total, clades[key], own[key], f"{code}{steps or ''}", max(key, 0), name))
        below = sorted(children[key], key=lambda child: (clades[child], -abs(child)))
        left += [(child, code, steps + 1, depth + 1) for child in below]
    return "".join(lines)


def check_tax_ids(classes: Classes, where: str) -> None:
    """BadSource if a class has no tax id."""
    missing = [taxon.name for taxon in classes.taxa if taxon.tax_id <= 0]
    if missing:
        raise BadSource(
            f"{where}: a Kraken report needs tax ids, and {len(missing)} of {len(classes)} classes have none, "
            f"such as {missing[0]}. Train with a mapping that has a column tax_id"
        )


def ranks_without_tax_ids(classes: Classes) -> list[str]:
    return [rank.name for rank in classes.ranks if any(taxon.tax_id <= 0 for taxon in rank.taxa)]


def _line(total: int, clade: int, own: int, code: str, tax_id: int, name: str) -> str:
    return f"{100 * clade / total:6.2f}\t{clade}\t{own}\t{code}\t{tax_id}\t{name}\n"
