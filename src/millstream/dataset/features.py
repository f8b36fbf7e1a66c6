"""What a model sees of a record, computed on the fly: `features.tokens` for reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millstream.dataset.augment import Augment
from millstream.dataset.tokenizers import Tokenizer, tokenizer
from millstream.dataset.tokens import IdType, Pad
from millstream.records import Array
from millstream.store.read_batch import ReadBatch


@dataclass(frozen=True)
class TokenFeature:
    """Reads as token ids. `fields` is what has to be fetched for it. Made by `tokens`.

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

    def __call__(self, batch: ReadBatch, *, epoch: int = 0) -> Mapping[str, Array | list[object]]:
        """The same for a record in whatever batch, order, thread or process it comes."""
        reads = self.augment.apply(batch.flat, batch.offsets, batch.numbers, epoch=epoch)
        ids, mask = self.tokenizer.tokenize(
            reads.flat, reads.offsets, max_length=self.max_length, pad=self.pad, dtype=self.dtype
        )
        return {"input_ids": ids, "attention_mask": mask, **{name: batch.columns[name] for name in self.columns}}


def tokens(
    spec: str | Tokenizer,
    *,
    columns: tuple[str, ...] | list[str] = (),
    max_length: int | None = None,
    pad: Pad = "longest",
    dtype: IdType = np.int64,
    crop_length: int | None = None,
    crop: Literal["random", "start"] = "random",
    reverse_complement: bool | float = 0.0,
    mask: float = 0.0,
    n: Literal["keep", "random", "drop"] = "keep",
    seed: int = 0,
) -> TokenFeature:
    """Token ids of reads by a tokenizer (`"base"`, `"kmer(6)"`, `"hf(folder)"`), and the columns named.

    `max_length` counts tokens. Before that a read longer than `crop_length` letters is cropped; `reverse_complement`,
    `mask` (a share of letters becomes N) and `n` (what becomes of an N) are drawn from (seed, epoch, record number).
    """
    augment = Augment(
        max_length=crop_length, crop=crop, reverse_complement=reverse_complement, mask=mask, n=n, seed=seed
    )
    chosen = tokenizer(spec) if isinstance(spec, str) else spec
    return TokenFeature(chosen, augment, tuple(columns), max_length, pad, dtype)
