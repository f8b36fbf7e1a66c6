"""Rows from a file of reads: each is read and tokenised when it is asked for."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.classic.token_rows import Rows
from millstream.dataset.tokens import Numbers, Tokenizer
from millstream.errors import BadSource, NotAStore
from millstream.source.headers import Headers
from millstream.source.mapping import LabelMapping, MappingSource
from millstream.store.header_columns import OnMismatch
from millstream.store.read_batch import ColumnValues
from millstream.store.reads import Reads

CLASS_ID, TAX_ID = "class_id", "tax_id"
NO_LABEL = -100  # what torch's cross entropy leaves out
NO_ID = -1


@dataclass(frozen=True, kw_only=True)
class ReadsSource:
    """Where labelled reads are, and what is made of them."""

    path: Path
    mapping: MappingSource | None
    labels: LabelMapping | None  # the same, loaded
    header_regex: str
    on_mismatch: OnMismatch
    memory: int | str
    tokenizer: Tokenizer
    max_length: int

    def check(self) -> tuple[str, ...]:
        """The id columns of the headers. Says what cannot work before a large file is read for it."""
        no_reads = np.empty(0, np.uint8), np.zeros(1, np.int64)
        self.tokenizer.tokenize(*no_reads, max_length=self.max_length, pad="max_length", dtype=np.int64)
        kinds = {column.name: column.kind for column in Headers(self.header_regex).columns}
        for name in (CLASS_ID, TAX_ID):
            if kinds.get(name) == "text":
                raise BadSource(
                    f"header_regex {self.header_regex!r}: the group {name} may match other things than digits, "
                    rf"and ids are whole numbers; write (?P<{name}>\d+)"
                )
        if self.mapping is None and CLASS_ID not in kinds:
            raise BadSource(
                f"header_regex {self.header_regex!r} has no group class_id, which is the label when there is no "
                r"mapping_df; name one, as (?P<class_id>\d+)"
            )
        return tuple(name for name in (CLASS_ID, TAX_ID) if name in kinds)

    def open(self, index_dir: Path | None) -> Reads:
        try:
            reads = ms.open(
                self.path,
                header_regex=self.header_regex,
                on_mismatch=self.on_mismatch,
                mapping=self.mapping,
                memory=self.memory,
                index_dir=index_dir,
            )
        except NotAStore:
            found = "no FASTA or FASTQ files there" if self.path.exists() else "no such file"
            raise BadSource(f"{self.path}: {found}; fasta_path is a FASTA or FASTQ file") from None
        if not isinstance(reads, Reads):
            raise BadSource(f"{self.path}: a store of traces; fasta_path is a FASTA or FASTQ file")
        return reads


class StreamedRows:
    """Rows read and tokenised when they are asked for. Pickled, it is opened again by its path.

    Without `keep_index` the index lies in a temporary folder that goes when this object does.
    """

    def __init__(self, source: ReadsSource, *, keep_index: bool) -> None:
        self._source = source
        self._ids = source.check()
        self._folder = None if keep_index else self._new_folder()
        self._reads = source.open(self._folder)

    @property
    def names(self) -> tuple[str, ...]:
        return "labels", *self._ids

    def __len__(self) -> int:
        return len(self._reads)

    def fetch(self, numbers: Numbers) -> Rows:
        key = self._source.labels.key if self._source.labels else CLASS_ID
        batch = self._reads.fetch(numbers, list(dict.fromkeys(["sequence", key, *self._ids])))
        ids, mask = self._source.tokenizer.tokenize(
            batch.flat, batch.offsets, max_length=self._source.max_length, pad="max_length", dtype=np.int64
        )
        columns = np.empty((len(batch), len(self.names)), np.int64)
        columns[:, 0] = _labels(batch.columns[key], self._source.labels)
        for place, name in enumerate(self._ids, start=1):
            columns[:, place] = _integers(batch.columns[name], NO_ID)
        return Rows(ids, mask.sum(axis=1), columns)

    def __getstate__(self) -> Mapping[str, object]:
        return {"_source": self._source, "_ids": self._ids, "_folder": self._folder}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        if self._folder is not None and not self._folder.exists():  # the process that made it is gone
            self._folder = self._new_folder()
        self._reads = self._source.open(self._folder)

    def _new_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="millstream-index-"))
        weakref.finalize(self, _remove, folder, os.getpid())
        return folder


def _labels(keys: ColumnValues, mapping: LabelMapping | None) -> Numbers:
    """What the column `label` of the reads says, by a shorter way: it counts when a batch is one read."""
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


def _remove(folder: Path, owner: int) -> None:
    """A forked worker that ends leaves the folder to the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
