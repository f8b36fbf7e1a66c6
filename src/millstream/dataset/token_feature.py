"""Reads as token ids."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from millstream.dataset.augment import Augment
from millstream.dataset.batch import Batch
from millstream.dataset.permutation import mix
from millstream.dataset.tokens import IdType, Pad, Tokenizer
from millstream.store.read_batch import ReadBatch


@dataclass(frozen=True)
class TokenFeature:
    """Reads as token ids. `fields` is what has to be fetched for it. Made by `ms.features.tokens`.

    feature = ms.features.tokens("kmer(6)", max_length=128, reverse_complement=0.5)
    batch = feature(reads.fetch(numbers, feature.fields))  # {"input_ids": ..., "attention_mask": ..., "class_id": ...}
    """

    tokenizer: Tokenizer
    augment: Augment
    columns: tuple[str, ...]
    max_length: int | None
    pad: Pad
    dtype: IdType

    @property
    def fields(self) -> list[str]:
        return ["sequence", *self.columns]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """The same for a record in whatever batch, order, thread or process it comes."""
        if not isinstance(batch, ReadBatch):
            raise ValueError("features.tokens makes tokens of reads; these records are traces")
        augment = replace(self.augment, seed=mix(self.augment.seed, seed)) if seed else self.augment
        reads = augment.apply(batch.flat, batch.offsets, batch.numbers, epoch=epoch)
        ids, mask = self.tokenizer.tokenize(
            reads.flat, reads.offsets, max_length=self.max_length, pad=self.pad, dtype=self.dtype
        )
        return {"input_ids": ids, "attention_mask": mask, **{name: batch.columns[name] for name in self.columns}}
