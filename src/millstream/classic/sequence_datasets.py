"""The old scripts' datasets of labelled reads, for torch's DataLoader: in memory, streaming, streaming with a cache.

All three give the same items: a dict of `input_ids` and `attention_mask` (max_length each), `labels`, and the integers
`class_id` and `tax_id` if header_regex has such groups. A label is the index of the class in the mapping, sorted by
class id, or without a mapping the class id itself. A read without a class id has the label -100; a missing id is -1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from millstream.classic.rows import CachedRows, HeldRows, ReadsSource, Rows, RowSource, StreamedRows, mask_of
from millstream.core.console import say
from millstream.reads.files.columns import OnMismatch
from millstream.reads.files.index import SUFFIX
from millstream.reads.mapping import MappingSource, load_mapping
from millstream.reads.tokenizers.hf import Tokenizer
from millstream.reads.tokenizers.hf import tokenizer as tokenizer_named

OLD_SUFFIX = ".index.pkl"
MEMORY = "1GB"

Item = dict[str, torch.Tensor | int]


class ItemDataset(Dataset[Item]):
    """Rows as items for a DataLoader, which calls `__getitems__` once per batch: one fetch, one call to tokenize."""

    def __init__(self, rows: RowSource, num_classes: int | None) -> None:
        self._rows = rows
        self.num_classes = num_classes
        """Number of classes in the mapping; None without one."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        numbers = np.array([int(index) for index in indices], np.int64)
        wrong = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"read {wrong[0]} of a dataset of {len(self)}")
        return _items(self._rows.fetch(numbers % max(len(self), 1)), self._rows.names)


class SequenceDataset(ItemDataset):
    """Every read of a file, tokenised once and held in memory: 2 bytes per token (vocabularies below 32,768), 8 per id.

    Use it if that fits: once loaded, the file is not read again.

    >>> dataset = SequenceDataset("reads.fa", "mapping.tsv", "kmer(6)", r"lbl\\|(?P<class_id>\\d+)", max_length=128)
    >>> loader = DataLoader(dataset, batch_size=32, shuffle=True)
    """

    def __init__(
        self,
        fasta_path: str | Path,
        mapping_df: MappingSource | None,
        tokenizer: str | Tokenizer,
        header_regex: str,
        max_length: int,
        cache_index: bool = True,
        *,
        on_mismatch: OnMismatch = "error",
        memory: int | str = MEMORY,
    ) -> None:
        source, num_classes = _source(
            fasta_path, mapping_df, tokenizer, header_regex, max_length, on_mismatch=on_mismatch, memory=memory
        )
        streamed = StreamedRows(source, keep_index=cache_index)
        self._held = HeldRows(streamed, tokenizer=source.tokenizer, max_length=max_length)
        super().__init__(self._held, num_classes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the tokens and labels."""
        return self._held.held_bytes


class StreamingSequenceDataset(ItemDataset):
    """The reads of a file (plain, gzip, BGZF or zstd), loaded and tokenised on demand.

    The index is FILE.millstream next to the file; with `cache_index=False` it is in a temporary folder that is removed
    with the dataset. `memory` is the limit of each process (each worker) for decoded blocks and mapped files. A plain
    file needs little. For a compressed file, a shuffled epoch decodes blocks repeatedly (hundreds of reads per second,
    not tens of thousands) unless its text fits: raise `memory`, or decompress the file.

    >>> dataset = StreamingSequenceDataset("reads.fa.gz", None, "base", r"lbl\\|(?P<class_id>\\d+)", max_length=128)
    >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    """

    def __init__(
        self,
        fasta_path: str | Path,
        mapping_df: MappingSource | None,
        tokenizer: str | Tokenizer,
        header_regex: str,
        max_length: int,
        cache_index: bool = True,
        *,
        on_mismatch: OnMismatch = "error",
        memory: int | str = MEMORY,
    ) -> None:
        source, num_classes = _source(
            fasta_path, mapping_df, tokenizer, header_regex, max_length, on_mismatch=on_mismatch, memory=memory
        )
        super().__init__(StreamedRows(source, keep_index=cache_index), num_classes)


class CachedStreamingDataset(ItemDataset):
    """A StreamingSequenceDataset that caches the `cache_size` most recently used reads, tokenised.

    A cached read is a few times as fast. A shuffled epoch uses every read once, so the cache helps in later epochs, in
    proportion to the fraction of the file it holds: a validation set, or a file that nearly fits. Every worker has its
    own cache and DataLoader ends its workers after an epoch: pass `persistent_workers=True`. A large plain file no
    longer needs a cache; a large compressed one needs `memory` (see StreamingSequenceDataset) more than this. A read
    takes 2 bytes for each of its max_length ids (vocabularies below 32,768), not the 100 kB of the old class.

    >>> dataset = CachedStreamingDataset(
    ...     fasta_path="reads.fa", mapping_df=pd.read_csv("mapping.tsv", sep="\\t"), tokenizer=tokenizer,
    ...     header_regex=header_regex, max_length=128, cache_index=True, cache_size=10000,
    ... )
    """

    def __init__(
        self,
        fasta_path: str | Path,
        mapping_df: MappingSource | None,
        tokenizer: str | Tokenizer,
        header_regex: str,
        max_length: int,
        cache_index: bool = True,
        cache_size: int = 10_000,
        *,
        on_mismatch: OnMismatch = "error",
        memory: int | str = MEMORY,
    ) -> None:
        source, num_classes = _source(
            fasta_path, mapping_df, tokenizer, header_regex, max_length, on_mismatch=on_mismatch, memory=memory
        )
        streamed = StreamedRows(source, keep_index=cache_index)
        self._cached = CachedRows(streamed, size=cache_size, tokenizer=source.tokenizer, max_length=max_length)
        super().__init__(self._cached, num_classes)

    @property
    def num_cached(self) -> int:
        """Number of reads now in this process's cache; at most `cache_size`."""
        return self._cached.num_cached

    @property
    def held_bytes(self) -> int:
        """Bytes of the reads in this process's cache."""
        return self._cached.held_bytes


def _source(
    fasta_path: str | Path,
    mapping_df: MappingSource | None,
    tokenizer: str | Tokenizer,
    header_regex: str,
    max_length: int,
    *,
    on_mismatch: OnMismatch,
    memory: int | str,
) -> tuple[ReadsSource, int | None]:
    """The arguments of the datasets as a ReadsSource, and the number of classes."""
    path = Path(fasta_path)
    if Path(f"{path}{OLD_SUFFIX}").exists():
        say(f"{path}{OLD_SUFFIX}: an index of the old scripts, no longer used ({path}{SUFFIX} is); you can delete it")
    mapping = None if mapping_df is None else load_mapping(mapping_df)
    if mapping is not None and not isinstance(mapping_df, str | Path):
        mapping_df = mapping.table  # the caller may change a data frame, and it may be slow to pickle
    source = ReadsSource(
        path=path,
        mapping=mapping_df,
        labels=mapping,
        header_regex=header_regex,
        on_mismatch=on_mismatch,
        memory=memory,
        tokenizer=tokenizer_named(tokenizer) if isinstance(tokenizer, str) else _checked(tokenizer),
        max_length=max_length,
    )
    return source, None if mapping is None else mapping.num_classes


def _checked(tokenizer: Tokenizer) -> Tokenizer:
    """Tokenizers of transformers have a `tokenize` too, with other arguments."""
    if not hasattr(tokenizer, "pad_id"):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; pass MetaGeneTokenizer(folder of its tokenizer.json), or a "
            'name such as "base", "kmer(6)" or "hf(folder)"'
        )
    return tokenizer


def _items(rows: Rows, names: Sequence[str]) -> list[Item]:
    """One dict per read. Its tensors are rows of the batch's tensors."""
    ids = torch.from_numpy(rows.ids).unbind()  # pyright: ignore
    masks = torch.from_numpy(mask_of(rows).astype(np.int64)).unbind()  # pyright: ignore
    labels = torch.from_numpy(rows.columns[:, 0].copy()).unbind()  # pyright: ignore
    others = cast(list[list[int]], rows.columns[:, 1:].tolist())
    return [
        {"input_ids": row, "attention_mask": mask, "labels": label, **dict(zip(names[1:], numbers, strict=True))}
        for row, mask, label, numbers in zip(ids, masks, labels, others, strict=True)
    ]
