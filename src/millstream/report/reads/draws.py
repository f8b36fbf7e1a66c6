"""How sure a number is: the reads of a part, drawn again and again, in groups. All models see the same draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.report.bootstrap import SEED, Resampled
from millstream.report.reads.measures import Codes, Floats, Tally, tally

MAX_GROUPS = 1000
"""Up to so many reads, each is drawn for itself. More of them are dealt into so many groups at random, and groups are
drawn: the same spread, to 2 % of it (1 / sqrt(2 x 1000)), at a cost that no longer grows with the reads."""


@dataclass(frozen=True)
class Draws:
    """The group of each read of a part, and how often each group is drawn: first once each, then at random."""

    groups: NDArray[np.int64]
    counts_RG: Floats

    def accuracy_and_f1(self, labels: Codes, found: Codes, num_classes: int) -> tuple[Resampled, Resampled]:
        """Accuracy and macro F1 of answers, on all reads and on every draw."""
        once = self.tally(labels, found, num_classes)
        drawn = once.drawn(self.counts_RG)
        return _resampled(drawn.accuracy), _resampled(drawn.macro_f1)

    def macro_f1_over(self, classes: NDArray[np.bool_], labels: Codes, found: Codes) -> Resampled:
        """Macro F1 over these of the classes."""
        return _resampled(self.tally(labels, found, len(classes)).over(classes).drawn(self.counts_RG).macro_f1)

    def tally(self, labels: Codes, found: Codes, num_classes: int) -> Tally:
        return tally(labels, found, num_classes, groups=self.groups, num_groups=self.counts_RG.shape[1])


def draws_of(num_reads: int, *, resamples: int, part: int = 0, max_groups: int = MAX_GROUPS) -> Draws:
    """Draws of the reads of a part; those of parts with other numbers have nothing to do with each other."""
    rng = np.random.default_rng([SEED, part])
    num_groups = max(min(num_reads, max_groups), 1)
    groups = np.arange(num_reads) % num_groups
    if num_reads > num_groups:
        groups = rng.permutation(groups)
    drawn_RG = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=resamples)
    return Draws(groups, np.concatenate([np.ones((1, num_groups)), drawn_RG.astype(np.float64)]))


def mean(some: Sequence[Resampled]) -> Resampled:
    """Of the seeds of a model: the mean on all reads, and on each draw."""
    return Resampled(float(np.mean([one.value for one in some])), np.mean([one.drawn for one in some], axis=0))


def _resampled(numbers_R: Floats) -> Resampled:
    return Resampled(float(numbers_R[0]), numbers_R[1:])
