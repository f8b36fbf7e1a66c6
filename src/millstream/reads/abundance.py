"""Evidence of a sample -> how abundant each class is, by expectation maximisation, with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.reads.evidence import LEVELS, UNIT, Evidence
from millstream.reads.kraken import Assignments

HEAD = "class\ttax_id\ttaxon\trank\tgenome_length\treads\testimated_reads\tread_share\tabundance\tlow\thigh"
DRAWS = 100  # of the bootstrap
LEVEL = 0.95
MOST_STEPS = 2000  # of expectation maximisation
DRAW_STEPS = 200  # from the estimate on
SMALLEST_CHANGE = 1e-7  # of a share per step

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Abundance:
    """Per class: `reads` that EM gives it, and its `share` of the genomes, or of the reads without their lengths."""

    reads: Floats
    share: Floats
    low: Floats
    high: Floats


def estimate(evidence: Evidence, lengths: Floats | None = None, *, draws: int = DRAWS) -> Abundance:
    """The most likely mixture of classes, and 95 % intervals of what drawing other reads would change.

    The probabilities of reads are taken for likelihoods: those of a model for which all classes are equally frequent.
    With the `lengths` of genomes, a share is that of genomes: reads per base.

    >>> estimate(Evidence.of(np.array([[0, 1]]), np.array([[0.9, 0.1]]), 2)).share
    """
    mixture = _Mixture(evidence)
    counts = np.concatenate([evidence.alone, evidence.reads])
    reads = mixture.fit(counts, mixture.start(counts), MOST_STEPS)
    share = _shares(reads, lengths)
    total, rng = int(counts.sum()), np.random.default_rng(0)
    if not total:
        return Abundance(reads, share, share, share)
    drawn = rng.multinomial(total, counts / total, size=draws)
    shares = [_shares(mixture.fit(some, (reads + mixture.start(some)) / 2, DRAW_STEPS), lengths) for some in drawn]
    low, high = np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return Abundance(reads, share, np.minimum(low, share), np.maximum(high, share))


def abundance_table(assignments: Assignments, counts: Sequence[int], found: Abundance, lengths: Floats | None) -> str:
    """A TSV with a row per class, the most abundant first, and one for unclassified reads."""
    total = max(sum(counts), 1)
    rows = [HEAD]
    order: list[int] = np.argsort(-found.share, kind="stable").tolist()
    for label in order:
        taxon = assignments.taxa[label]
        name = " ".join(taxon.name.split())
        length = "" if lengths is None else f"{lengths[label]:.0f}"
        taxon_cells = f"{assignments.class_ids[label]}\t{taxon.tax_id}\t{name}\t{assignments.ranks[label]}\t{length}"
        values = (found.reads[label] / total, found.share[label], found.low[label], found.high[label])
        shares = "\t".join(f"{value:.6g}" for value in values)
        rows.append(f"{taxon_cells}\t{counts[label]}\t{found.reads[label]:.1f}\t{shares}")
    unclassified = counts[assignments.unclassified]
    rows.append(f"\t0\tunclassified\t\t\t{unclassified}\t{unclassified}\t{unclassified / total:.6g}\t\t\t")
    return "\n".join(rows) + "\n"


class _Mixture:
    """Reads by the sets of classes they may be of, in flat arrays: entry e is of a class in a set."""

    def __init__(self, evidence: Evidence) -> None:
        self._num_classes = len(evidence.alone)
        is_entry = evidence.codes >= 0
        self._class = (evidence.codes[is_entry] // LEVELS).astype(np.int64)
        self._set = np.nonzero(is_entry)[0]
        self._weight = evidence.units[is_entry] / UNIT / evidence.reads[self._set]
        self._num_sets = len(evidence.reads)

    def start(self, counts: NDArray[np.integer]) -> Floats:
        """Reads per class if each is divided by its own probabilities."""
        return self._with(counts, self._weight)

    def fit(self, counts: NDArray[np.integer], reads: Floats, most: int) -> Floats:
        """Reads per class when they are divided by their probabilities and by how frequent the classes are."""
        total = float(counts.sum())
        for _ in range(most if self._num_sets else 0):
            weight = self._weight * reads[self._class]
            sums = np.bincount(self._set, weight, self._num_sets)
            before, reads = reads, self._with(counts, weight / np.maximum(sums, 1e-300)[self._set])
            if np.abs(reads - before).max() <= SMALLEST_CHANGE * total:
                break
        return reads

    def _with(self, counts: NDArray[np.integer], weight: Floats) -> Floats:
        alone, sets = counts[: self._num_classes], counts[self._num_classes :]
        return alone + np.bincount(self._class, weight * sets[self._set], self._num_classes).astype(np.float64)


def _shares(reads: Floats, lengths: Floats | None) -> Floats:
    depth = reads if lengths is None else reads / lengths
    return depth / max(float(depth.sum()), 1e-300)
