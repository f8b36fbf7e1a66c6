"""Reads with the peers' loaders: the same peers as for traces, with settings that suit records of 150 bytes.

A batch is bases uint8 [B, 150] and labels int64 [B], torch or numpy, copied. Formats whose record is a byte string
store a read as 158 bytes, bases and label; batches are decoded as one array.
"""

import itertools
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import loader_peers_traces as traces
from loader_data import (
    BUFFER_RECORDS,
    LanceRows,
    LastTwo,
    Rows,
    ShuffleBuffer,
    copied,
    packed,
    reads,
    shuffled,
    unpacked,
)

SHARD_READS = 20_000
BUFFER_READS = 100_000  # webdataset: 16 MB of reads, for a better shuffle than with 1000
BLOCK_READS = 1000

Batch = tuple[Any, Any]


class TorchShards(traces.TorchShards):
    note = f"{SHARD_READS} reads per file as two tensors, then read by read: buffer of {BUFFER_RECORDS}, stacked"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        for number, rows in enumerate(_blocks(count, seed, SHARD_READS)):
            bases, labels = unpacked(rows)
            torch.save(
                {"bases": torch.from_numpy(bases), "labels": torch.from_numpy(labels)}, folder / f"{number:05d}.pt"
            )

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        def load(file: Path) -> Iterator[tuple[np.ndarray, int]]:
            shard = torch.load(file, weights_only=True)
            return zip(shard["bases"].numpy(), shard["labels"].tolist(), strict=True)

        rows = ShuffleBuffer(sorted(folder.glob("*.pt")), load, seed)
        return DataLoader(rows, batch_size=batch_size, num_workers=workers, collate_fn=_stacked)


class PickleLRU(traces.PickleLRU):
    note = f"{SHARD_READS} reads per file, 2 whole files cached per worker, read by read"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        for number, rows in enumerate(_blocks(count, seed, SHARD_READS)):
            (folder / f"{number:05d}.pkl").write_bytes(pickle.dumps(unpacked(rows), protocol=pickle.HIGHEST_PROTOCOL))
        (folder / "count.json").write_text(json.dumps(count))

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        files = LastTwo(lambda number: pickle.loads((folder / f"{number:05d}.pkl").read_bytes()))

        def read(i: int) -> tuple[np.ndarray, int]:
            number, row = divmod(i, SHARD_READS)
            bases, labels = files(number)
            return bases[row].copy(), int(labels[row])  # a view would keep the whole file alive

        rows = Rows(json.loads((folder / "count.json").read_text()), read)
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=_stacked)


class Safetensors(traces.Safetensors):
    note = "one file of two tensors, mapped; rows gathered per batch by our own few lines"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        bases, labels = reads(count, seed)
        tensors = {"bases": torch.from_numpy(bases), "labels": torch.from_numpy(labels)}
        self._lib.torch.save_file(tensors, folder / "data.safetensors")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        file = self._lib.safe_open(folder / "data.safetensors", framework="pt")
        bases, labels = file.get_tensor("bases").numpy(), file.get_tensor("labels").numpy()

        def take(numbers: list[int]) -> Batch:  # with numpy, in one thread, as in `copied`
            return torch.from_numpy(bases.take(numbers, axis=0)), torch.from_numpy(labels.take(numbers))

        rows = Rows(len(labels), _one_by_one, take)
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=_as_is)


class Mosaic(traces.Mosaic):
    def write(self, folder: Path, *, count: int, seed: int) -> None:
        with self._base.MDSWriter(columns={"row": "bytes"}, out=str(folder)) as writer:
            for row in _rows(count, seed):
                writer.write({"row": row})

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        rows = self._base.StreamingDataset(
            local=str(folder), batch_size=batch_size, shuffle=True, shuffle_algo=self.algorithm, shuffle_seed=seed
        )
        return self._base.StreamingDataLoader(
            rows, batch_size=batch_size, num_workers=workers, collate_fn=_joined_samples
        )


class MosaicNaive(Mosaic, traces.MosaicNaive):
    pass


class LitData(traces.LitData):
    note = "chunks of 64 MB, decoded and shuffled whole; its writer runs in a separate process"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        self._lib.optimize(
            fn=MakeReads(count, seed),
            inputs=list(range(0, count, SHARD_READS)),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
            mode="overwrite",
            verbose=False,
        )

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        rows = self._lib.StreamingDataset(
            str(folder), shuffle=True, seed=seed, item_shuffle_window="full", batch_decode="all"
        )
        return self._lib.StreamingDataLoader(rows, batch_size=batch_size, num_workers=workers, collate_fn=_joined)


class WebDataset(traces.WebDataset):
    note = f"{BLOCK_READS} reads per tar member (with one: 4 k reads/s); buffer of {BUFFER_READS} reads per worker"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        with self._lib.ShardWriter(str(folder / "%05d.tar"), maxcount=SHARD_READS // BLOCK_READS, verbose=0) as out:
            for number, rows in enumerate(_blocks(count, seed, BLOCK_READS)):
                out.write({"__key__": f"{number:06d}", "rows.npy": rows})

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        def single(samples: Iterable[dict[str, Any]]) -> Iterator[bytes]:
            return itertools.chain.from_iterable(map(bytes, sample["rows.npy"]) for sample in samples)

        files = list(map(str, sorted(folder.glob("*.tar"))))
        rows = self._lib.WebDataset(files, shardshuffle=len(files), seed=seed).decode().compose(single)
        rows = rows.shuffle(BUFFER_READS, initial=BUFFER_READS // 10, seed=seed)
        return self._lib.WebLoader(rows.batched(batch_size, collation_fn=_joined), batch_size=None, num_workers=workers)


class HuggingFace(traces.HuggingFace):
    note = 'a binary column; a batch of rows taken at once in "arrow" format'

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        features = self._lib.Features({"row": self._lib.Value("binary")})
        with self._lib.arrow_writer.ArrowWriter(path=str(folder / "data.arrow"), features=features) as writer:
            for rows in _blocks(count, seed, SHARD_READS):
                offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
                buffers = [None, self._pa.py_buffer(offsets), self._pa.py_buffer(rows)]
                column = self._pa.BinaryArray.from_buffers(self._pa.binary(), len(rows), buffers)
                writer.write_table(self._pa.table({"row": column}))
            writer.finalize()

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        table = self._lib.Dataset.from_file(str(folder / "data.arrow")).with_format("arrow")
        rows = Rows(len(table), _one_by_one, lambda numbers: arrow_batch(table[numbers]))
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=_as_is)


class Grain(traces.Grain):
    """Row numbers are shuffled and batched, then read at once: 8 times as fast as reading and batching records."""

    note = (
        "one read per group, as grain requires; a batch of numbers is read at once, without threads (they are slower)"
    )

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        writer = self._file.ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1,uncompressed")
        for row in _rows(count, seed):
            writer.write(row)
        writer.close()

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        source = self._lib.sources.ArrayRecordDataSource(str(folder / "data.array_record"))
        numbers = self._lib.MapDataset.range(len(source)).shuffle(seed=seed).batch(batch_size)
        options = self._lib.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        batches = numbers.map(ReadMany(source)).to_iter_dataset(options)
        return batches.mp_prefetch(self._lib.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))


class Lance(traces.Lance):
    note = "take of 4096 rows under a torch sampler; workers are spawned, as it requires"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        pa = self._pa

        def table(rows: np.ndarray) -> Any:
            kind = pa.binary(rows.shape[1])
            return pa.record_batch(
                {"row": pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])}
            )

        batches = map(table, _blocks(count, seed, SHARD_READS))
        first = next(batches)
        reader = pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], batches))
        self._lib.write_dataset(reader, str(folder / "data.lance"), data_storage_version="2.2")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        rows = LanceRows(str(folder / "data.lance"), take_reads)
        context = "spawn" if workers else None
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=_as_is, context=context)


class Empty(traces.Empty):
    note = "the same batch repeatedly, copied once"

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Batch]:
        count, data_seed = json.loads((folder / "count.json").read_text())
        bases, labels = map(torch.from_numpy, reads(min(batch_size, count), data_seed))
        rows = Rows(count, _one_by_one, lambda n: (copied(bases[: len(n)]), copied(labels[: len(n)])))
        return DataLoader(rows, batch_size=batch_size, num_workers=workers, collate_fn=_as_is)


READ_PEERS: dict[str, Callable[[], traces.Peer]] = {
    peer.name: peer
    for peer in (
        *(TorchShards, PickleLRU, Safetensors, Mosaic, MosaicNaive, LitData),
        *(WebDataset, HuggingFace, Grain, Lance, Empty),
    )
}


class MakeReads:
    """Reads starting at a number, for litdata's worker process."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed, self._rows = count, seed, None

    def __call__(self, start: int) -> Iterator[bytes]:
        if self._rows is None:
            self._rows = packed(*reads(self._count, self._seed))
        yield from map(bytes, self._rows[start : start + SHARD_READS])


class ReadMany:
    """A batch of row numbers -> a batch of reads, in grain's worker processes too."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self, numbers: np.ndarray) -> Batch:
        rows = self._source.__getitems__(numbers.tolist())
        return unpacked(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1))


def take_reads(rows: Any, numbers: list[int]) -> Batch:
    return arrow_batch(rows.take(numbers))


def arrow_batch(table: Any) -> Batch:
    """Rows of a table of one column, binary or fixed-size binary, in chunks or not."""
    column = table["row"].combine_chunks()
    data, width = column.buffers()[-1], len(column[0].as_py())
    if len(column.buffers()) == 3:
        first = np.frombuffer(column.buffers()[1], np.int32)[column.offset]
    else:
        first = column.offset * width
    return _tensors(np.frombuffer(data, np.uint8, len(column) * width, first).reshape(-1, width))


def _blocks(count: int, seed: int, size: int) -> Iterator[np.ndarray]:
    rows = packed(*reads(count, seed))
    return (rows[start : start + size] for start in range(0, count, size))


def _rows(count: int, seed: int) -> Iterator[bytes]:
    return itertools.chain.from_iterable(map(bytes, block) for block in _blocks(count, seed, SHARD_READS))


def _tensors(rows: np.ndarray) -> Batch:
    bases, labels = unpacked(rows)
    return torch.from_numpy(bases), torch.from_numpy(labels)


def _joined(rows: list[bytes]) -> Batch:
    return _tensors(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1))


def _joined_samples(samples: list[dict[str, bytes]]) -> Batch:
    return _joined([sample["row"] for sample in samples])


def _stacked(records: list[tuple[np.ndarray, int]]) -> Batch:
    bases, labels = zip(*records, strict=True)
    return torch.from_numpy(np.stack(bases)), torch.tensor(labels)


def _as_is(batch: Batch) -> Batch:
    return batch


def _one_by_one(i: int) -> Any:
    raise NotImplementedError(f"row {i}: batches are read at once")
