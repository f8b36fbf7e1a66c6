"""Traces with the peers' loaders: one class per peer, with its best settings and its best shuffle.

A batch is a list of records whose tensors are in memory. Views of a mapped file are copied if the loader runs in
process; with workers, the transfer through shared memory is that copy. Records are torch tensors where torch transfers
them: it puts tensors in shared memory but would pickle numpy arrays through a pipe.
"""

import itertools
import json
import os
import pickle
import platform
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from loader_data import (
    BUFFER_RECORDS,
    DTYPES,
    TENSORS,
    LanceRows,
    LastTwo,
    Record,
    Rows,
    ShuffleBuffer,
    arrow_records,
    arrow_row,
    as_torch,
    as_torch_list,
    copied,
    copied_list,
    from_bytes,
    in_shards,
    shuffled,
    take_traces,
    to_bytes,
    trace,
    traces,
)

SHARD_RECORDS = 24  # 65 MB: as many files for 600 records as the old scripts had for 11,000

# Bytes objects are read-only, and nothing writes to the tensors made from them.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")


class Peer(Protocol):
    """A loader under test. Creating one imports its library, so that the memory of other libraries is not counted."""

    name: str
    shuffle: str  # "exact", "window" or "none"
    note: str  # for the reader of the table
    version: str

    def write(self, folder: Path, *, count: int, seed: int) -> None: ...

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[Any]:
        """One epoch. Opens the data; workers start and records are read once it is iterated."""
        ...


class TorchShards:
    """Files of torch.save, streamed by an IterableDataset through a shuffle buffer: the old scripts' second method."""

    name, shuffle, version = "torch-shards", "window", torch.__version__
    note = f"{SHARD_RECORDS} records per file, buffer of {BUFFER_RECORDS} records per worker"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        for number, shard in enumerate(in_shards(traces(count, seed), SHARD_RECORDS)):
            torch.save([as_torch(r) for r in shard], folder / f"{number:05d}.pt")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        return DataLoader(
            ShuffleBuffer(sorted(folder.glob("*.pt")), lambda file: torch.load(file, weights_only=True), seed),
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=list,
        )


class PickleLRU:
    """Pickled lists, the last two files cached, any record by number: the old scripts' first method."""

    name, shuffle, version = "pickle-lru", "exact", platform.python_version()
    note = f"{SHARD_RECORDS} records per file, 2 whole files cached per worker"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        for number, shard in enumerate(in_shards(traces(count, seed), SHARD_RECORDS)):
            (folder / f"{number:05d}.pkl").write_bytes(pickle.dumps(shard, protocol=pickle.HIGHEST_PROTOCOL))
        (folder / "count.json").write_text(json.dumps(count))

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        files = LastTwo(lambda number: pickle.loads((folder / f"{number:05d}.pkl").read_bytes()))

        def read(i: int) -> Record:
            number, row = divmod(i, SHARD_RECORDS)
            return files(number)[row]

        rows = Rows(json.loads((folder / "count.json").read_text()), read)
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=as_torch_list)


class Safetensors:
    """All tensors of a shard in one file under "row/field", read by our own few lines: the format has no loader."""

    name, shuffle = "safetensors", "exact"
    note = f"{SHARD_RECORDS} records per file; the map-style dataset is our own"

    def __init__(self) -> None:
        import safetensors.torch

        self._lib, self.version = safetensors, version("safetensors")

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        for number, shard in enumerate(in_shards(traces(count, seed), SHARD_RECORDS)):
            self._lib.torch.save_file(
                {f"{row}/{f}": torch.from_numpy(r[f]) for row, r in enumerate(shard) for f in TENSORS},
                folder / f"{number:05d}.safetensors",
                metadata={"rows": json.dumps([{f: r[f] for f in ("question_id", "label")} for r in shard])},
            )

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        files = [self._lib.safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        heads = [json.loads(file.metadata()["rows"]) for file in files]
        own = copied if not workers else (lambda tensor: tensor)

        def read(i: int) -> Record:
            number, row = divmod(i, SHARD_RECORDS)
            return heads[number][row] | {f: own(files[number].get_tensor(f"{row}/{f}")) for f in TENSORS}

        rows = Rows(sum(map(len, heads)), read)
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=list)


class Mosaic:
    """mosaicml-streaming with its defaults: shards of 64 MB, py1e, which shuffles shards and spreads their samples."""

    name, shuffle, algorithm = "mosaic-py1e", "window", "py1e"
    note = "each sample is read as a whole by open, seek, read"

    def __init__(self) -> None:
        from store_peers import streaming_base

        self._base, self.version = streaming_base(), version("mosaicml-streaming")
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        arrays = {f: f"ndarray:{np.dtype(dtype).name}" for f, dtype in DTYPES.items()}
        with self._base.MDSWriter(columns={"question_id": "str", "label": "int"} | arrays, out=str(folder)) as writer:
            for record in traces(count, seed):
                writer.write(record)

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        rows = self._base.StreamingDataset(
            local=str(folder), batch_size=batch_size, shuffle=True, shuffle_algo=self.algorithm, shuffle_seed=seed
        )
        return self._base.StreamingDataLoader(
            rows, batch_size=batch_size, num_workers=workers, collate_fn=as_torch_list
        )


class MosaicNaive(Mosaic):
    """The same files in a permutation of all samples."""

    name, shuffle, algorithm = "mosaic-naive", "exact", "naive"


class LitData:
    """litdata: chunks of 64 MB, mapped; shuffles chunks, then all items of a chunk (its default: blocks of 256)."""

    name, shuffle = "litdata", "window"
    note = "tensors are views of the mapped chunk, copied in process; its writer runs in a separate process"

    def __init__(self) -> None:
        os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # otherwise opening a dataset queries pypi.org
        import litdata

        self._lib, self.version = litdata, version("litdata")

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        self._lib.optimize(
            fn=Make(seed),
            inputs=list(range(count)),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
            mode="overwrite",
            verbose=False,
        )

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        rows = self._lib.StreamingDataset(str(folder), shuffle=True, seed=seed, item_shuffle_window="full")
        return self._lib.StreamingDataLoader(
            rows, batch_size=batch_size, num_workers=workers, collate_fn=list if workers else copied_list
        )


class WebDataset:
    """webdataset: tar shards of npy members, shards shuffled, then a buffer of records."""

    name, shuffle = "webdataset", "window"
    note = f"tars of 65 MB, buffer of {BUFFER_RECORDS} records per worker, starting at 100"

    def __init__(self) -> None:
        import webdataset

        self._lib, self.version = webdataset, version("webdataset")

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        with self._lib.ShardWriter(str(folder / "%05d.tar"), maxcount=SHARD_RECORDS, maxsize=1 << 40, verbose=0) as out:
            for r in traces(count, seed):
                out.write({"__key__": r["question_id"], "label.cls": r["label"]} | {f"{f}.npy": r[f] for f in TENSORS})

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        def record(sample: dict[str, Any]) -> Record:
            tensors = {f: torch.from_numpy(sample[f"{f}.npy"]) for f in TENSORS}
            return {"question_id": sample["__key__"], "label": sample["label.cls"]} | tensors

        files = list(map(str, sorted(folder.glob("*.tar"))))
        rows = self._lib.WebDataset(files, shardshuffle=len(files), seed=seed)
        rows = rows.shuffle(BUFFER_RECORDS, seed=seed).decode().map(record).batched(batch_size, collation_fn=list)
        return self._lib.WebLoader(rows, batch_size=None, num_workers=workers)


class HuggingFace:
    """datasets, map-style: one Arrow stream, rows in "arrow" format (its "numpy" and "torch" widen float16)."""

    name, shuffle = "hf-datasets", "exact"
    note = "tensors as large_binary, written by its ArrowWriter; rows are views of the mapped file, copied in process"

    def __init__(self) -> None:
        import datasets.arrow_writer
        import pyarrow

        self._lib, self._pa, self.version = datasets, pyarrow, version("datasets")

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        value = self._lib.Value
        features = self._lib.Features(
            {"question_id": value("string"), "label": value("int64"), **dict.fromkeys(TENSORS, value("large_binary"))}
        )
        with self._lib.arrow_writer.ArrowWriter(path=str(folder / "data.arrow"), features=features) as writer:
            for record in traces(count, seed):
                writer.write_table(self._pa.Table.from_batches([arrow_row(self._pa, record)]))
            writer.finalize()

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        table = self._lib.Dataset.from_file(str(folder / "data.arrow")).with_format("arrow")
        own = np.array if not workers else np.asarray
        rows = Rows(len(table), lambda i: arrow_records(table[i], own)[0])
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=as_torch_list)


class Grain:
    """grain over array_record: its permutation of all indices, its threads in process, its worker processes."""

    name, shuffle = "grain", "exact"
    note = "array_record stores bytes, in our own layout; 2 reading threads per process"

    def __init__(self) -> None:
        import grain
        from array_record.python import array_record_module

        self._lib, self._file = grain, array_record_module
        self.version = f"{version('grain')} + array_record {version('array_record')}"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        # Random floats do not compress: uncompressed is faster.
        writer = self._file.ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1,uncompressed")
        for record in traces(count, seed):
            writer.write(to_bytes(record))
        writer.close()

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        source = self._lib.sources.ArrayRecordDataSource(str(folder / "data.array_record"))
        rows = self._lib.MapDataset.source(source).shuffle(seed=seed).map(from_bytes)
        options = self._lib.ReadOptions(num_threads=2, prefetch_buffer_size=2 * batch_size)
        batches = rows.to_iter_dataset(options).batch(batch_size, batch_fn=list)
        return batches.mp_prefetch(self._lib.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))


class Lance:
    """pylance: `take` of a batch of row numbers; tensors as large_binary in storage version 2.0, its fastest here."""

    name, shuffle = "lance", "exact"
    note = "take under a torch sampler, row by row: 16 rows at once take twice as long; workers are spawned"

    def __init__(self) -> None:
        import lance
        import pyarrow

        self._lib, self._pa, self.version = lance, pyarrow, version("pylance")

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        rows = (arrow_row(self._pa, record) for record in traces(count, seed))
        first = next(rows)
        reader = self._pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], rows))
        self._lib.write_dataset(reader, str(folder / "data.lance"), data_storage_version="2.0")

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        rows = LanceRows(str(folder / "data.lance"), take_traces)
        context = "spawn" if workers else None
        return shuffled(rows, workers=workers, batch_size=batch_size, seed=seed, collate=as_torch_list, context=context)


class Empty:
    """Nothing to read: DataLoader returns copies of one batch. The upper limit of any dataset with DataLoader.

    Copies, because a tensor that was sent once stays in shared memory and costs nothing the second time.
    """

    name, shuffle, version = "empty", "none", torch.__version__
    note = "the same 16 records repeatedly, copied once"

    def write(self, folder: Path, *, count: int, seed: int) -> None:
        (folder / "count.json").write_text(json.dumps([count, seed]))

    def batches(self, folder: Path, *, workers: int, batch_size: int, seed: int) -> Iterable[list[Record]]:
        count, data_seed = json.loads((folder / "count.json").read_text())
        records = [as_torch(r) for r in traces(min(batch_size, count), data_seed)]
        rows = Rows(count, lambda i: records[i % len(records)])
        return DataLoader(rows, batch_size=batch_size, num_workers=workers, collate_fn=copied_list)


TRACE_PEERS: dict[str, Callable[[], Peer]] = {
    peer.name: peer
    for peer in (
        *(TorchShards, PickleLRU, Safetensors, Mosaic, MosaicNaive, LitData),
        *(WebDataset, HuggingFace, Grain, Lance, Empty),
    )
}


class Make:
    """`trace` with a fixed seed, for litdata's worker process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, i: int) -> Record:
        return as_torch(trace(i, self._seed))
