"""How many reads each taxon has, as the report that Kraken 2 writes, which Bracken, Krona and Pavian read."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.errors import BadSource
from millstream.source.classes import ROOT, Classes
from millstream.train.calls import Calls

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


@dataclass(frozen=True)
class Node:
    """A taxon of the tree."""

    name: str
    rank: str
    parent: int


def kraken_report(calls: Calls, counts: Sequence[int]) -> str:
    """The report, of so many reads for each call.

    A line is `percent, reads of the clade, reads of the taxon itself, rank code, tax id, name`, two blanks before the
    name for each level. Taxa whose ids are not known are no part of the tree: their reads are those of the next above.
    """
    tree = _Tree(calls)
    own: defaultdict[int, int] = defaultdict(int)
    for number, count in enumerate(counts[: calls.nothing]):
        own[tree.of_call(number)] += count
    return "".join(tree.lines(own, unclassified=counts[calls.nothing]))


def check_tax_ids(classes: Classes, where: str) -> None:
    """Refuse classes that a report could not name."""
    missing = [taxon.name for taxon in classes.taxa if taxon.tax_id <= 0]
    if missing:
        raise BadSource(
            f"{where}: a Kraken report is made of tax ids, and {len(missing)} of {len(classes)} classes have none, "
            f"{missing[0]} for one. Train with a mapping that has a column tax_id"
        )


class _Tree:
    """The taxa of all classes by tax id, each below the lowest one above it that is known."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._nodes = {ROOT: Node("root", "root", ROOT)}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for label in range(len(calls.classes)):
            self._add(label)

    def _add(self, label: int) -> None:
        at = ROOT
        for number in [*reversed(self._above(label)), label]:
            tax_id = self._calls.taxa[number].tax_id
            if tax_id <= 0:
                continue
            if tax_id not in self._nodes:
                self._nodes[tax_id] = Node(self._calls.taxa[number].name, self._calls.ranks[number], at)
                self._children[at].append(tax_id)
            at = tax_id

    def _above(self, label: int) -> list[int]:
        """The calls of the taxa that a class is of, from the lowest."""
        calls = self._calls
        of = [int(rank.of_class[label]) for rank in calls.classes.ranks]
        return [start + taxon for start, taxon in zip(calls.starts[:-1], of, strict=True) if taxon >= 0]

    def of_call(self, number: int) -> int:
        """The tax id that a call counts for."""
        calls = self._calls
        if number < len(calls.classes):
            return calls.taxa[number].tax_id
        place = next(place for place, start in enumerate(calls.starts[1:]) if number < start)
        members = (calls.classes.ranks[place].of_class == number - calls.starts[place]).nonzero()[0]
        above = [one for one in self._above(int(members[0])) if one >= number]
        return next((calls.taxa[one].tax_id for one in above if calls.taxa[one].tax_id > 0), ROOT)

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
