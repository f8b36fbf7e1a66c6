"""millstream with the interface of the loader benchmark's peers: traces and reads, in process and with workers.

Without workers it is `ms.Loader` with its default threads; with workers the stock DataLoader over `collection.stream`.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import millstream as ms
from loader_data import TENSORS, Record, traces, write_fasta

HEADER = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)\|(?P<readlen>\d+)\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
SCHEMA = {"hidden": "float16[layer, token, dim]", "attention": "float16[layer, head, token, key]"}


class Millstream:
    """A trace store; all checksums are verified."""

    name, shuffle, version = "millstream", "exact", ms.__version__
    note = "checksums verified; 0 workers: ms.Loader; 2: DataLoader over collection.stream"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        with ms.TraceWriter(folder / "store", shard_bytes="64MB", schema=SCHEMA) as writer:
            for record in traces(count, seed):
                writer.append(record)

    @staticmethod
    def opened(folder: Path) -> tuple[Any, Any]:
        return ms.open(folder / "store"), ms.features.fields("question_id", *TENSORS, "label", pad=False)

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        return map(_records, _epoch(Millstream, folder, workers, batch_size, seed))


class MillstreamReads:
    """A FASTA file and its index."""

    name, shuffle, version = "millstream", "exact", ms.__version__
    note = "straight from FASTA; 0 workers: ms.Loader; 2: DataLoader over collection.stream"
    file = "reads.fa"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        write_fasta(folder / "reads.fa", count, seed)
        ms.open(folder / "reads.fa", header_regex=HEADER)

    @classmethod
    def opened(cls, folder: Path) -> tuple[Any, Any]:
        return ms.open(folder / cls.file), ms.features.fields("sequence", "class_id")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[tuple[Any, Any]]:
        for batch in _epoch(type(self), folder, workers, batch_size, seed):
            yield batch["sequence"], batch["class_id"]


class MillstreamPack(MillstreamReads):
    name, note, file = "millstream-pack", "2 bits per base", "reads.pack"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        super().write(folder, count=count, seed=seed)
        from millstream.reads.files.index import IndexSettings
        from millstream.reads.pack.pack import pack

        pack([folder / "reads.fa"], folder / self.file, settings=IndexSettings(header_regex=HEADER))
        (folder / "reads.fa").unlink()


@lru_cache
def _loader(kind: type, folder: Path, batch_size: int) -> ms.Loader:
    """One loader for all epochs, as in training: it reuses its memory."""
    collection, feature = kind.opened(folder)
    return ms.Loader(collection, batch_size=batch_size, features=feature, seed=0, order="exact")


def _epoch(kind: type, folder: Path, workers: int, batch_size: int, seed: int) -> Iterator[dict[str, Any]]:
    if not workers:
        loader = _loader(kind, folder, batch_size)
        loader.set_epoch(seed)
        return iter(loader)
    collection, feature = kind.opened(folder)
    stream = collection.stream(feature, batch_size=batch_size, seed=seed, order="exact")
    return iter(DataLoader(stream, batch_size=None, num_workers=workers))


def _records(batch: dict[str, Any]) -> list[Record]:
    columns = [batch[name] for name in TENSORS]
    names, labels = batch["question_id"], batch["label"].tolist()
    return [
        dict(zip(("question_id", *TENSORS, "label"), row, strict=True))
        for row in zip(names, *columns, labels, strict=True)
    ]
