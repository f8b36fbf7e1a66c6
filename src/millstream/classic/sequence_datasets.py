"""The old scripts' datasets of labelled reads, for torch's DataLoader: in memory, streaming, streaming with a cache.

All three give the same items: a dict of `input_ids` and `attention_mask` (max_length each), `labels`, and the integers
`class_id` and `tax_id` if header_regex has such groups. A label is the index of the class in the mapping, sorted by
class id, or without a mapping the class id itself. A read without a class id has the label -100; a missing id is -1.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from millstream.classic.preprocessed_folder import Scratch
from millstream.classic.read_items import Item, ReadItems
from millstream.classic.read_rows import CLASS_ID, CachedRows, HeldRows, StreamedRows
from millstream.core.console import say
from millstream.core.registry import kind_at
from millstream.core.torch_data import checked_indices
from millstream.errors import BadSetting, BadSource
from millstream.reads.files.columns import OnMismatch
from millstream.reads.files.headers import Headers
from millstream.reads.files.index import SUFFIX
from millstream.reads.kind import open as open_reads
from millstream.reads.mapping import MappingSource, load_mapping
from millstream.reads.tokenizers import tokenizer as tokenizer_named
from millstream.reads.tokenizers.kmers import Tokenizer

MEMORY = "1GB"
TAX_ID = "tax_id"
OLD_SUFFIX = ".index.pkl"


class ReadDataset(Dataset[Item]):
    """Base of the three datasets. DataLoader calls `__getitems__` once per batch: one fetch, one call to tokenize."""

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
        path = Path(fasta_path)
        if kind_at(path) != "reads":
            found = "no FASTA or FASTQ files found" if path.exists() else "no such file"
            raise BadSource(f"{path}: {found}; fasta_path must be a FASTA or FASTQ file")
        if Path(f"{path}{OLD_SUFFIX}").exists():
            say(f"{path}{OLD_SUFFIX}: an old index, replaced by {path}{SUFFIX}; you can delete it")
        labels = None if mapping_df is None else load_mapping(mapping_df)
        if labels is not None and not isinstance(mapping_df, str | Path):
            mapping_df = labels.table  # the caller may change a data frame, and it may be slow to pickle
        streamed = StreamedRows(
            partial(
                open_reads,
                path,
                header_regex=header_regex,
                on_mismatch=on_mismatch,
                mapping=mapping_df,
                memory=memory,
            ),
            ids=_id_columns(header_regex, need_class=labels is None),
            labels=labels,
            tokenizer=_checked(tokenizer, max_length),
            max_length=max_length,
            scratch=None if cache_index else Scratch(),
        )
        self.num_classes = None if labels is None else labels.num_classes
        """Number of classes in the mapping; None without one."""
        self._rows = self._source(streamed)
        self._length = len(self._rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index]).item(0)

    def __getitems__(self, indices: Sequence[int]) -> ReadItems:
        if len(indices) == 1:
            rows = self._rows.one(self._checked_index(int(indices[0])))
        else:
            rows = self._rows.fetch(checked_indices(indices, self._length))
        return ReadItems(rows, self._rows.names)

    def _checked_index(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} of {self._length}")
        return index if index >= 0 else index + self._length

    def _source(self, streamed: StreamedRows) -> StreamedRows | HeldRows | CachedRows:
        """Where the dataset takes its rows from."""
        return streamed


class SequenceDataset(ReadDataset):
    """Every read of a file, tokenised once and held in memory: 2 bytes per token (vocabularies below 32,768), 8 per id.

    Use it if that fits: once loaded, the file is not read again.

    >>> dataset = SequenceDataset("reads.fa", "mapping.tsv", "kmer(6)", r"lbl\\|(?P<class_id>\\d+)", max_length=128)
    >>> loader = DataLoader(dataset, batch_size=32, shuffle=True)
    """

    def _source(self, streamed: StreamedRows) -> HeldRows:
        self._held = HeldRows(streamed)
        return self._held

    @property
    def held_bytes(self) -> int:
        """Bytes of the tokens and labels."""
        return self._held.held_bytes


class StreamingSequenceDataset(ReadDataset):
    """The reads of a file (plain, gzip, BGZF or zstd), loaded and tokenised on demand.

    The index is FILE.millstream next to the file; with `cache_index=False` it is in a temporary folder that is removed
    with the dataset. `memory` is the limit of each process (each worker) for decoded blocks and mapped files. A plain
    file needs little. For a compressed file, a shuffled epoch decodes blocks repeatedly (hundreds of reads per second,
    not tens of thousands) unless its text fits: raise `memory`, or decompress the file.

    >>> dataset = StreamingSequenceDataset("reads.fa.gz", None, "base", r"lbl\\|(?P<class_id>\\d+)", max_length=128)
    >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    """


class CachedStreamingDataset(ReadDataset):
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
        if cache_size < 0:
            raise ValueError(f"cache_size={cache_size}: must be 0 or more reads")
        self._cache_size = cache_size
        reads = fasta_path, mapping_df, tokenizer, header_regex, max_length, cache_index
        super().__init__(*reads, on_mismatch=on_mismatch, memory=memory)

    def _source(self, streamed: StreamedRows) -> CachedRows:
        self._cached = CachedRows(streamed, size=self._cache_size)
        return self._cached

    @property
    def num_cached(self) -> int:
        """Number of reads now in this process's cache; at most `cache_size`."""
        return self._cached.num_cached

    @property
    def held_bytes(self) -> int:
        """Bytes of the reads in this process's cache."""
        return self._cached.held_bytes


def _id_columns(header_regex: str, *, need_class: bool) -> tuple[str, ...]:
    """The ids among the groups of a regex."""
    if not isinstance(header_regex, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadSetting(f"header_regex={header_regex!r}: must be a regex with a group (?P<{CLASS_ID}>...)")
    kinds = {column.name: column.kind for column in Headers(header_regex).columns}
    for name in (CLASS_ID, TAX_ID):
        if kinds.get(name) == "text":
            raise BadSource(rf"header_regex {header_regex!r}: ids are integers; write the group as (?P<{name}>\d+)")
    if need_class and CLASS_ID not in kinds:
        raise BadSource(
            f"header_regex {header_regex!r} has no group class_id, which is the label without a mapping_df; "
            r"add one, such as (?P<class_id>\d+)"
        )
    return tuple(name for name in (CLASS_ID, TAX_ID) if name in kinds)


def _checked(tokenizer: str | Tokenizer, max_length: int) -> Tokenizer:
    """The tokenizer, tried on no reads: mistakes are reported before a large file is read."""
    if isinstance(tokenizer, str):
        tokenizer = tokenizer_named(tokenizer)
    elif not hasattr(tokenizer, "pad_id"):  # those of transformers have a `tokenize` too, with other arguments
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; pass MetaGeneTokenizer(folder of its tokenizer.json), or a "
            'name such as "base", "kmer(6)" or "hf(folder)"'
        )
    no_reads = np.empty(0, np.uint8), np.zeros(1, np.int64)
    tokenizer.tokenize(*no_reads, max_length=max_length, pad="max_length", dtype=np.int64)
    return tokenizer
