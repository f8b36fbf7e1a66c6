"""The same records in nine other formats, each library used as its documentation recommends for random access.

Knows nothing of millstream: `store.py` runs both. `python benchmarks/store_peers.py` checks every round trip.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from store_data import ARRAYS, SHARD_RECORDS, TENSORS, TEXTS, VECTORS, D, L, Record, records

pa.array([0])  # pyarrow imports pandas, if installed, with its first array: 50 MB that no writer should be charged for


class Peer(Protocol):
    """A format under test. Creating one imports its library, so that a process has only the library it measures."""

    name: str
    note: str  # for the reader of the table

    def write(self, records: Iterable[Record], path: Path) -> None:
        """Write into the folder `path`, which is created here and must be empty."""
        ...

    def open(self, path: Path) -> None: ...

    def read(self, i: int) -> Record:
        """Record `i`; its arrays are numpy or torch, and may be views of mapped pages not read from disk yet."""
        ...

    def layer(self, i: int, layer: int) -> np.ndarray:
        """`hidden[layer]` of record `i` in the cheapest way the format offers; may be a view too."""
        ...


class TorchSave:
    """A list of dicts of tensors per file, as in the old scripts."""

    name = "torch.save"
    note = f"must load a whole shard ({SHARD_RECORDS} records) to read one; caches the last shard"

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def write(self, records: Iterable[Record], path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(_shards(records, SHARD_RECORDS)):
            tensors = [r | {f: self._torch.from_numpy(r[f]) for f in ARRAYS} for r in shard]
            self._torch.save(tensors, path / f"{number:05d}.pt")
            del tensors  # they share the arrays of the shard: the next one is collected before this name is reused

    def open(self, path: Path) -> None:
        self._shard = _LastShard(lambda number: self._torch.load(path / f"{number:05d}.pt", weights_only=True))

    def read(self, i: int) -> Record:
        number, row = divmod(i, SHARD_RECORDS)
        return self._shard(number)[row]

    def layer(self, i: int, layer: int) -> np.ndarray:
        return self.read(i)["hidden"][layer].numpy()


class TorchSaveMmap(TorchSave):
    """The same files, mapped: only the pickled outline of a shard is parsed, tensors are views of the file."""

    name = "torch.save, mmap"
    note = "the writer holds a whole shard; open parses the outline of every shard"

    def open(self, path: Path) -> None:
        shards = [self._torch.load(p, mmap=True, weights_only=True) for p in sorted(path.glob("*.pt"))]
        self._shard = shards.__getitem__


class Pickle:
    """A list of dicts of numpy arrays per file."""

    name = "pickle"
    note = f"must load a whole shard ({SHARD_RECORDS} records) to read one; caches the last shard"

    def write(self, records: Iterable[Record], path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(_shards(records, SHARD_RECORDS)):
            with (path / f"{number:05d}.pkl").open("wb") as file:
                pickle.dump(shard, file, protocol=pickle.HIGHEST_PROTOCOL)

    def open(self, path: Path) -> None:
        def load(number: int) -> list[Record]:
            with (path / f"{number:05d}.pkl").open("rb") as file:
                return pickle.load(file)

        self._shard = _LastShard(load)

    def read(self, i: int) -> Record:
        number, row = divmod(i, SHARD_RECORDS)
        return self._shard(number)[row]

    def layer(self, i: int, layer: int) -> np.ndarray:
        return self.read(i)["hidden"][layer]


class Safetensors:
    """All arrays of a shard in one file under "row/field"; texts and labels as JSON in its metadata."""

    name = "safetensors"
    note = "the writer holds a whole shard; text is in the header of the shard"

    def __init__(self) -> None:
        import safetensors
        import safetensors.numpy
        import torch  # noqa: F401  (framework="pt" below needs it, and open() is timed)

        self._safetensors = safetensors

    def write(self, records: Iterable[Record], path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(_shards(records, SHARD_RECORDS)):
            self._safetensors.numpy.save_file(
                {f"{row}/{f}": r[f] for row, r in enumerate(shard) for f in ARRAYS},
                path / f"{number:05d}.safetensors",
                metadata={"rows": json.dumps([{f: r[f] for f in (*TEXTS, "label")} for r in shard])},
            )

    def open(self, path: Path) -> None:
        # "pt" returns whole tensors as views of the mapped file, "np" copies; copied into one buffer, both are equally
        # fast. A slice through "np" takes half the time (medians 74 and 174 us, interleaved on a busy machine).
        files = sorted(path.glob("*.safetensors"))
        self._whole = [self._safetensors.safe_open(p, framework="pt") for p in files]
        self._slices = [self._safetensors.safe_open(p, framework="np") for p in files]
        self._rows = [json.loads(file.metadata()["rows"]) for file in self._whole]

    def read(self, i: int) -> Record:
        number, row = divmod(i, SHARD_RECORDS)
        file = self._whole[number]
        return self._rows[number][row] | {f: file.get_tensor(f"{row}/{f}") for f in ARRAYS}

    def layer(self, i: int, layer: int) -> np.ndarray:
        number, row = divmod(i, SHARD_RECORDS)
        return self._slices[number].get_slice(f"{row}/hidden")[layer]


class HuggingFace:
    """datasets: one Arrow stream of flat float16 lists, rows taken in "arrow" format.

    Array3D and Array4D allow only the first dimension to vary, so they cannot store these shapes. `from_generator`
    writes the same file, but through Python lists: 43 s for 100 records against 0.4 s with its ArrowWriter (measured).
    """

    name = "HF datasets"
    note = 'float16 kept in "arrow" format only ("numpy" and "torch" formats widen to float32); open scans the file'

    def __init__(self) -> None:
        import datasets
        import datasets.arrow_writer

        self._datasets = datasets
        value, series = datasets.Value, datasets.List
        self._features = datasets.Features(
            {f: value("string") for f in TEXTS}
            | {"label": value("int64")}
            | {f: series(value(dtype)) for f, dtype in VECTORS.items()}
            | {f"{f}_shape": series(value("int32")) for f in TENSORS}
            | {f: series(value("float16")) for f in TENSORS}
        )

    def write(self, records: Iterable[Record], path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        writer = self._datasets.arrow_writer.ArrowWriter(path=str(path / "data.arrow"), features=self._features)
        with writer:
            for r in records:
                columns = [*_small(r), *(_one_list(r[f]) for f in TENSORS)]
                writer.write_table(pa.Table.from_arrays(columns, schema=self._features.arrow_schema))
            writer.finalize()

    def open(self, path: Path) -> None:
        self._rows = self._datasets.Dataset.from_file(str(path / "data.arrow")).with_format("arrow")
        self._hidden = self._rows.select_columns(["hidden", "hidden_shape"])

    def read(self, i: int) -> Record:
        batch = self._rows[i].to_batches()[0]
        return _unpack(batch) | {f: _shaped(_values(batch[f]), batch, f) for f in TENSORS}

    def layer(self, i: int, layer: int) -> np.ndarray:
        batch = self._hidden[i].to_batches()[0]
        return _shaped(_values(batch["hidden"]), batch, "hidden")[layer]


class Mosaic:
    """mosaicml-streaming: MDS shards of its default 64 MB, read through LocalDataset."""

    name = "mosaicml MDS"
    note = "reads and decodes the whole record for one layer"

    def __init__(self) -> None:
        self._base = streaming_base()
        self._columns = dict.fromkeys(TEXTS, "str") | {"label": "int"} | {f: f"ndarray:{d}" for f, d in ARRAYS.items()}

    def write(self, records: Iterable[Record], path: Path) -> None:
        with self._base.MDSWriter(columns=self._columns, out=str(path)) as writer:
            for r in records:
                writer.write(r)

    def open(self, path: Path) -> None:
        self._rows = self._base.LocalDataset(str(path))

    def read(self, i: int) -> Record:
        return self._rows[i]

    def layer(self, i: int, layer: int) -> np.ndarray:
        return self._rows[i]["hidden"][layer]


class Lance:
    """pylance: tensors as blob columns, its type for megabyte values, which reads byte ranges.

    No layout is best at both, hence two peers. Medians of 9 interleaved rounds on a busy machine, for whole records and
    one layer: blobs 0.9 GB/s and 0.9 ms; large_binary in storage version 2.0 1.6 and 1.1, in the default 2.2 0.5 and
    3.9 (it compresses), in 2.2 uncompressed 1.3 and 1.4.
    """

    name = "Lance, blobs"
    note = "a layer is a byte range of a blob; a whole record takes three calls"

    def __init__(self) -> None:
        import lance

        self._lance = lance
        self._schema = pa.schema([*_SMALL, *(lance.blob_field(f) for f in TENSORS)])

    def write(self, records: Iterable[Record], path: Path) -> None:
        blob = self._lance.blob_array
        columns = ([*_small(r), *(blob([memoryview(r[f])]) for f in TENSORS)] for r in records)
        batches = (pa.record_batch(c, schema=self._schema) for c in columns)
        self._lance.write_dataset(
            pa.RecordBatchReader.from_batches(self._schema, batches), str(path), data_storage_version="2.2"
        )

    def open(self, path: Path) -> None:
        self._rows = self._lance.dataset(str(path))

    def read(self, i: int) -> Record:
        batch = self._rows.take([i], columns=_SMALL.names).to_batches()[0]
        blobs = {f: self._rows.read_blobs(f, indices=[i])[0][1] for f in TENSORS}
        return _unpack(batch) | {f: _shaped(np.frombuffer(b, np.float16), batch, f) for f, b in blobs.items()}

    def layer(self, i: int, layer: int) -> np.ndarray:
        blob = self._rows.take_blobs("hidden", indices=[i], buffer_size=0)[0]
        layer_bytes = blob.size() // L
        return np.frombuffer(blob.read_range(layer * layer_bytes, layer_bytes), np.float16).reshape(-1, D)


class LanceBinary:
    """pylance: tensors as large_binary in storage version 2.0, the fastest of its layouts for whole records."""

    name = "Lance, large_binary"
    note = "reads the hidden states of all layers for one"

    def __init__(self) -> None:
        import lance

        self._lance = lance

    def write(self, records: Iterable[Record], path: Path) -> None:
        batches = pa.RecordBatchReader.from_batches(_BINARY, map(_binary_row, records))
        self._lance.write_dataset(batches, str(path), data_storage_version="2.0")

    def open(self, path: Path) -> None:
        self._rows = self._lance.dataset(str(path))

    def read(self, i: int) -> Record:
        return _binary_record(self._rows.take([i]).to_batches()[0])

    def layer(self, i: int, layer: int) -> np.ndarray:
        batch = self._rows.take([i], columns=["hidden", "hidden_shape"]).to_batches()[0]
        return _binary_tensor(batch, "hidden")[layer]


class ArrowIPC:
    """pyarrow alone: an IPC file, one batch per record, tensors as large_binary, mapped."""

    name = "Arrow IPC"
    note = "one file; get_batch advises the kernel to read the whole record"

    def write(self, records: Iterable[Record], path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path / "data.arrow"), "wb") as file, pa.ipc.new_file(file, _BINARY) as writer:
            for r in records:
                writer.write_batch(_binary_row(r))

    def open(self, path: Path) -> None:
        self._file = pa.ipc.open_file(pa.memory_map(str(path / "data.arrow")))

    def read(self, i: int) -> Record:
        return _binary_record(self._file.get_batch(i))

    def layer(self, i: int, layer: int) -> np.ndarray:
        return _binary_tensor(self._file.get_batch(i), "hidden")[layer]


PEERS: dict[str, Callable[[], Peer]] = {
    peer.name: peer
    for peer in (
        *(TorchSave, TorchSaveMmap, Pickle, Safetensors, HuggingFace),
        *(Mosaic, Lance, LanceBinary, ArrowIPC),
    )
}


def check(peer: Peer, path: Path, num: int = 20) -> None:
    """Write `num` records into `path` and check that they read back bit-identical, whole and by layer, in any order."""
    peer.write(records(num), path)
    peer.open(path)
    expected = list(records(num))
    for i in np.random.default_rng(0).permutation(num).tolist():
        got = peer.read(i)
        assert set(got) >= set(expected[i]), f"{peer.name}: record {i} lacks {set(expected[i]) - set(got)}"
        for f, want in expected[i].items():
            have = np.asarray(got[f]) if f in ARRAYS else got[f]
            same = (have.dtype, have.shape) == (want.dtype, want.shape) if f in ARRAYS else type(have) is type(want)
            equal = have.tobytes() == want.tobytes() if f in ARRAYS else have == want
            assert same and equal, f"{peer.name}: record {i}, {f}: differs from the original"
        for layer in (0, L // 2, L - 1):
            have, want = peer.layer(i, layer), expected[i]["hidden"][layer]
            assert (have.dtype, have.shape) == (want.dtype, want.shape), f"{peer.name}: record {i}, layer {layer}"
            assert have.tobytes() == want.tobytes(), (
                f"{peer.name}: record {i}, layer {layer}: differs from the original"
            )


def _shards(records: Iterable[Record], num: int) -> Iterator[list[Record]]:
    source = iter(records)
    while shard := list(islice(source, num)):
        yield shard
        shard.clear()  # otherwise the next shard would be collected while this one is still in memory


class _LastShard:
    """Caches the last shard and drops it before loading another: one in memory at a time."""

    def __init__(self, load: Callable[[int], list[Record]]) -> None:
        self._load = load
        self._number, self._records = -1, []

    def __call__(self, number: int) -> list[Record]:
        if number != self._number:
            self._number, self._records = -1, []
            self._records = self._load(number)
            self._number = number
        return self._records


# Shared by the Arrow formats: everything but the two tensors.
_SMALL = pa.schema(
    [*((f, pa.string()) for f in TEXTS), ("label", pa.int64())]
    + [(f, pa.list_(pa.type_for_alias(dtype))) for f, dtype in VECTORS.items()]
    + [(f"{f}_shape", pa.list_(pa.int32())) for f in TENSORS]
)
_BINARY = pa.schema([*_SMALL, *(pa.field(f, pa.large_binary()) for f in TENSORS)])


def _small(r: Record) -> list[pa.Array]:
    """One-row columns in the order of `_SMALL`."""
    texts = [pa.array([r[f]]) for f in (*TEXTS, "label")]
    return [*texts, *(_one_list(r[f]) for f in VECTORS), *(_one_list(np.array(r[f].shape, np.int32)) for f in TENSORS)]


def _one_list(array: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, array.size], pa.int32()), pa.array(array.reshape(-1)))


def _binary_row(r: Record) -> pa.RecordBatch:
    return pa.record_batch([*_small(r), *(_one_binary(r[f]) for f in TENSORS)], schema=_BINARY)


def _binary_record(batch: pa.RecordBatch) -> Record:
    return _unpack(batch) | {f: _binary_tensor(batch, f) for f in TENSORS}


def _one_binary(array: np.ndarray) -> pa.LargeBinaryArray:
    offsets = pa.py_buffer(np.array([0, array.nbytes], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(array)])


def _unpack(batch: pa.RecordBatch) -> Record:
    return {f: batch[f][0].as_py() for f in (*TEXTS, "label")} | {f: _values(batch[f]) for f in VECTORS}


def _values(column: pa.ListArray) -> np.ndarray:
    return column.flatten().to_numpy(zero_copy_only=True)


def _shaped(flat: np.ndarray, batch: pa.RecordBatch, field: str) -> np.ndarray:
    return flat.reshape(_values(batch[f"{field}_shape"]))


def _binary_tensor(batch: pa.RecordBatch, field: str) -> np.ndarray:
    # The data buffer itself: batch[field][0].as_buffer() would copy it: two to four times as long per layer.
    column = batch[field]
    _, offsets, data = column.buffers()
    start, stop = np.frombuffer(offsets, np.int64)[column.offset : column.offset + 2].tolist()
    return _shaped(np.frombuffer(data.slice(start, stop - start), np.float16), batch, field)


def streaming_base() -> types.ModuleType:
    """`streaming.base`, with all of MDS, without running `streaming/__init__.py`.

    That file only adds predefined vision and text datasets, and imports torchvision, which has no CPU build for our
    torch on PyPI. An empty parent package replaces it; every module in use is mosaicml's own.
    """
    if "streaming" not in sys.modules:
        spec = importlib.util.find_spec("streaming")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("mosaicml-streaming is missing: pip install --no-deps -r benchmarks/requirements.txt")
        parent = types.ModuleType("streaming")
        parent.__path__ = list(spec.submodule_search_locations)
        sys.modules["streaming"] = parent
    return importlib.import_module("streaming.base")


if __name__ == "__main__":
    for name, make in PEERS.items():
        with tempfile.TemporaryDirectory() as folder:
            check(make(), Path(folder) / "data")
        print(f"{name}: 20 records written and read back, bit-identical")
