"""A feature of reads, and beside it the same of their reverse complements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from millstream.dataset.batch import Batch
from millstream.dataset.token_feature import TokenFeature

OTHER = "other_"


@dataclass(frozen=True)
class BothStrands:
    """What `feature` makes of each read as it is, and with names that begin with `other_` of its other strand."""

    feature: TokenFeature

    @property
    def fields(self) -> Sequence[str]:
        return self.feature.fields

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        made: dict[str, object] = {}
        for prefix, share in (("", 0.0), (OTHER, 1.0)):
            feature = replace(self.feature, augment=replace(self.feature.augment, reverse_complement=share))
            found = feature(batch, seed=seed, epoch=epoch)
            made |= {prefix + name: value for name, value in found.items()}
        return made
