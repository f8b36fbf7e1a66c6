"""The old scripts' datasets of labelled reads, for torch's DataLoader: in memory, streaming, streaming with a cache.

All three give the same items: a dict of `input_ids` and `attention_mask` (max_length each), `labels`, and the integers
`class_id` and `tax_id` if header_regex has such groups. A label is the index of the class in the mapping, sorted by
class id, or without a mapping the class id itself. A read without a class id has the label -100; a missing id is -1.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from millstream.classic.preprocessed_folder import Scratch
from millstream.classic.read_items import Compact, ReadItem, ReadItems, Rows, as_tensor, mask_of
from millstream.core.console import progress, say
from millstream.core.registry import kind_at
from millstream.core.torch_data import checked_indices
from millstream.errors import BadSetting, BadSource
from millstream.reads.batch import ColumnValues
from millstream.reads.files.columns import OnMismatch
from millstream.reads.files.headers import Headers
from millstream.reads.files.index import SUFFIX
from millstream.reads.kind import open as open_reads
from millstream.reads.mapping import LabelMapping, MappingSource, load_mapping
from millstream.reads.reads import Reads
from millstream.reads.tokenizers import tokenizer as tokenizer_named
from millstream.reads.tokenizers.kmers import Numbers, Tokenizer

CHUNK_READS = 8192  # tokenised at a time
MEMORY = "1GB"
CLASS_ID, TAX_ID = "class_id", "tax_id"
NO_LABEL = -100  # ignored by torch's cross entropy
NO_ID = -1
OLD_SUFFIX = ".index.pkl"

CompactType = type[np.int16 | np.int32 | np.int64]


class ReadDataset(Dataset[ReadItem]):
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

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ReadItem:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> ReadItems:
        return ReadItems(self._rows.fetch(checked_indices(indices, len(self))), self._rows.names)

    def _source(self, streamed: "StreamedRows") -> "StreamedRows | HeldRows | CachedRows":
        """Where the dataset takes its rows from."""
        return streamed


class SequenceDataset(ReadDataset):
    """Every read of a file, tokenised once and held in memory: 2 bytes per token (vocabularies below 32,768), 8 per id.

    Use it if that fits: once loaded, the file is not read again.

    >>> dataset = SequenceDataset("reads.fa", "mapping.tsv", "kmer(6)", r"lbl\\|(?P<class_id>\\d+)", max_length=128)
    >>> loader = DataLoader(dataset, batch_size=32, shuffle=True)
    """

    def _source(self, streamed: "StreamedRows") -> "HeldRows":
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

    def _source(self, streamed: "StreamedRows") -> "CachedRows":
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


# -- rows of tokens, labels and ids


class StreamedRows:
    """Rows read and tokenised on demand. `open_again` opens the reads, also when this object is unpickled.

    `names` are the columns: `labels`, and the ids in the headers. `scratch` is the folder of an index that is not kept.
    """

    def __init__(
        self,
        open_again: Callable[..., Reads],
        *,
        ids: tuple[str, ...],
        labels: LabelMapping | None,
        tokenizer: Tokenizer,
        max_length: int,
        scratch: Scratch | None,
    ) -> None:
        self.names = ("labels", *ids)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._labels = labels
        self._key = labels.key if labels else CLASS_ID
        self._scratch = scratch
        self._open_again = open_again
        self._open()

    def __len__(self) -> int:
        return len(self._reads)

    def fetch(self, numbers: Numbers) -> Rows:
        batch = self._reads.fetch(numbers, list(dict.fromkeys(["sequence", self._key, *self.names[1:]])))
        ids, mask = self.tokenizer.tokenize(
            batch.flat, batch.offsets, max_length=self.max_length, pad="max_length", dtype=np.int64
        )
        columns = np.empty((len(batch), len(self.names)), np.int64)
        columns[:, 0] = _label_numbers(batch.columns[self._key], self._labels)
        for place, name in enumerate(self.names[1:], start=1):
            columns[:, place] = _integers(batch.columns[name], NO_ID)
        return Rows(ids, mask.sum(axis=1), columns)

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_reads"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        if self._scratch is not None and not self._scratch.path.exists():  # the process that created it has ended
            self._scratch = Scratch()
        self._open()

    def _open(self) -> None:
        self._reads = self._open_again(index_dir=None if self._scratch is None else self._scratch.path)


class HeldRows:
    """All rows of a source in memory: tokens concatenated without padding, in the smallest dtype that fits.

    They are torch tensors, so spawned DataLoader workers share them instead of copying.
    """

    def __init__(self, rows: StreamedRows) -> None:
        self.names = rows.names
        self._width = rows.max_length
        self._pad_id = rows.tokenizer.pad_id
        kind = _smallest(rows.tokenizer.vocab_size - 1)
        tokens: list[Compact] = []
        counts, columns = np.empty(len(rows), np.int64), np.empty((len(rows), len(rows.names)), np.int64)
        with progress("tokenize", len(rows)) as update:
            for start in range(0, len(rows), CHUNK_READS):
                chunk = slice(start, min(start + CHUNK_READS, len(rows)))
                found = rows.fetch(np.arange(chunk.start, chunk.stop))
                counts[chunk], columns[chunk] = found.counts, found.columns
                tokens.append(found.ids[mask_of(found) == 1].astype(kind))
                update(chunk.stop)
        self._tokens = as_tensor(_joined(tokens, kind))
        self._ends = as_tensor(np.cumsum(counts))
        self._columns = as_tensor(columns)

    @property
    def held_bytes(self) -> int:
        return self._tokens.nbytes + self._ends.nbytes + self._columns.nbytes

    def __len__(self) -> int:
        return len(self._ends)

    def fetch(self, numbers: Numbers) -> Rows:
        tokens, ends = self._tokens.numpy(), self._ends.numpy()
        if len(numbers) == 1:  # a batch of one read
            number = int(numbers[0])
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            ids = np.full((1, self._width), self._pad_id, np.int64)
            ids[0, : end - start] = tokens[start:end]
            return Rows(ids, np.array([end - start]), self._columns.numpy()[number : number + 1].copy())
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        counts = ends[numbers] - starts
        rows = Rows(
            np.full((len(numbers), self._width), self._pad_id, np.int64), counts, self._columns.numpy()[numbers]
        )
        total = np.cumsum(counts)
        rows.ids[mask_of(rows) == 1] = tokens[np.arange(counts.sum()) + np.repeat(starts - total + counts, counts)]
        return rows


class CachedRows:
    """An LRU cache of `size` rows in front of a source. Unpickled, it starts empty."""

    def __init__(self, rows: StreamedRows, *, size: int) -> None:
        self.names = rows.names
        self._rows = rows
        self._size = min(size, len(rows))
        self._width = rows.max_length
        self._kind = _smallest(max(rows.tokenizer.vocab_size - 1, rows.tokenizer.pad_id))
        self._clear()

    def _clear(self) -> None:
        # record number -> row of the cache, least recently used first
        self._places: OrderedDict[int, int] = OrderedDict()
        self._cache = self._empty_rows(self._size, self._kind)  # memory is allocated on first write

    @property
    def num_cached(self) -> int:
        return len(self._places)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows now in the cache."""
        return sum(part[: self.num_cached].nbytes for part in self._cache)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, numbers: Numbers) -> Rows:
        places = np.array([self._find(number) for number in numbers.tolist()], np.int64)
        cached = places >= 0
        rows = self._empty_rows(len(numbers), np.int64)
        _put(rows, cached, self._cache.take(places[cached]))
        if not cached.all():
            missing, which = np.unique(numbers[~cached], return_inverse=True)
            found = self._rows.fetch(missing)
            _put(rows, ~cached, found.take(which))
            self._keep(missing, found)
        return rows

    def __getstate__(self) -> Mapping[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_places", "_cache")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._clear()

    def _empty_rows(self, count: int, kind: CompactType) -> Rows:
        ids = np.empty((count, self._width), kind)
        return Rows(ids, np.empty(count, np.int64), np.empty((count, len(self.names)), np.int64))

    def _find(self, number: int) -> int:
        place = self._places.get(number, -1)
        if place >= 0:
            self._places.move_to_end(number)
        return place

    def _keep(self, numbers: Numbers, rows: Rows) -> None:
        if not self._size:
            return
        newest = np.arange(max(len(numbers) - self._size, 0), len(numbers))
        places = np.empty(len(newest), np.int64)
        for at, number in enumerate(numbers[newest].tolist()):
            full = len(self._places) == self._size
            places[at] = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[number] = int(places[at])
        _put(self._cache, places, rows.take(newest))


def _smallest(largest_id: int) -> CompactType:
    """The smallest dtype for ids up to this one."""
    return next(kind for kind in (np.int16, np.int32, np.int64) if largest_id <= np.iinfo(kind).max)


def _joined(parts: list[Compact], kind: CompactType) -> Compact:
    """All parts in one array. Each part is freed once it is copied, so the peak stays below twice their size."""
    out = np.empty(sum(map(len, parts)), kind)
    at = len(out)
    while parts:
        part = parts.pop()
        at -= len(part)
        out[at : at + len(part)] = part
    return out


def _put(rows: Rows, places: Numbers | NDArray[np.bool_], other: Rows) -> None:
    for part, values in zip(rows, other, strict=True):
        part[places] = values


def _label_numbers(keys: ColumnValues, mapping: LabelMapping | None) -> Numbers:
    """The same as the column `label` of the reads, but faster, which matters for batches of one read."""
    if mapping is None:
        return _integers(keys, NO_LABEL)
    if not isinstance(keys, list):
        return mapping.rows(keys)
    known = np.array([key is not None for key in keys], np.bool_)
    labels = np.full(len(keys), NO_LABEL, np.int64)
    labels[known] = mapping.rows(_integers(keys, NO_ID)[known])
    return labels


def _integers(values: ColumnValues, missing: int) -> Numbers:
    if isinstance(values, list):
        return np.array([missing if value is None else value for value in values], np.int64)
    return values


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
