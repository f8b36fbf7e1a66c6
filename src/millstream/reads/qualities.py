"""Base qualities: bases that are too uncertain as N, and the qualities of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millstream.core.batches import Batch
from millstream.core.features import Feature
from millstream.core.kernels import kernel
from millstream.core.record import Bytes
from millstream.errors import BadSetting, BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.files import QUALITY
from millstream.reads.reads import Part
from millstream.reads.tokenizers.kmers import Bases, Numbers

PHRED = 33  # of the character of a Phred value of 0
N = ord("N")


@dataclass(frozen=True)
class Masked:
    """`feature` of reads whose bases of a lower Phred value than `least` are N."""

    feature: Feature
    least: int

    @property
    def fields(self) -> Sequence[str]:
        return [*(self.feature.fields or ()), QUALITY]

    @property
    def growth(self) -> int:
        return getattr(self.feature, "growth", 1)

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        assert isinstance(batch, ReadBatch)
        flat = np.where(qualities_of(batch) < PHRED + self.least, np.uint8(N), batch.flat)
        return self.feature(replace(batch, flat=flat), seed=seed, epoch=epoch)


def qualities_of(batch: ReadBatch) -> Bytes:
    """The quality characters of all reads, one after another."""
    if batch.quality is None:
        raise BadSource(
            f"record {batch.numbers[:1]} has no base qualities: it is from FASTA, or from a pack without qualities"
        )
    return batch.quality


def check_qualities(parts: Sequence[Part], setting: str) -> None:
    """BadSetting if a setting needs base qualities that one of these files does not have."""
    without = next((part for part in parts if not part.has_quality), None) if setting else None
    if without is not None:
        raise BadSetting(
            f"{setting}: {without.path} has no base qualities (its format: {without.format}). Use FASTQ, or train "
            f"without {setting.partition('=')[0]}="
        )


def token_qualities(quality: Bases, offsets: Numbers, *, width: int, k: int = 1, stride: int = 1) -> Bases:
    """[read, token]: the lowest Phred value of the bases of each token; 0 beyond the last."""
    out = np.zeros((offsets.size - 1, width), np.uint8)
    _lowest(quality, offsets, k, stride, out)
    return out


@kernel
def _lowest(quality: Bases, offsets: Numbers, k: int, stride: int, out: Bases) -> None:
    for read in range(out.shape[0]):
        own = quality[offsets[read] : offsets[read + 1]]
        for column in range(min(out.shape[1], max((own.size - k) // stride + 1, 0))):
            least = 255
            for i in range(column * stride, column * stride + k):
                least = min(least, int(own[i]))
            out[read, column] = max(least - PHRED, 0)
