"""Data of the loader benchmark, and the datasets and record layouts that its peers share.

Traces of 2.7 MB and reads of 150 bases, cheap to generate, identified by number: record `i` depends only on the seed
and `i`, so that it can be generated again and compared after reading.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

# L layers, H heads, T tokens, D hidden
L, H, D = 17, 2, 896
MIN_T, MAX_T = 30, 120  # 2 L D T + 2 L H T^2 + 4 T bytes per record: 2.7 MB on average
BASES = 150
STAMP = 12  # the first bases of a read encode its number: at most 4^12 reads

TENSORS = ("hidden", "attention", "logprobs")
DTYPES = {"hidden": np.float16, "attention": np.float16, "logprobs": np.float32}
SCHEMA = {"hidden": "float16[layer, token, dim]", "attention": "float16[layer, head, token, key]"}  # of the store
BUFFER_RECORDS = 1000  # the old scripts' shuffle buffer, and the recommendation of webdataset's documentation

Record = dict[str, Any]


def traces(count: int, seed: int = 0) -> Iterator[Record]:
    """The first `count` of an endless series of model traces: ids, float16 tensors of varying lengths, labels."""
    return (trace(i, seed) for i in range(count))


def trace(i: int, seed: int = 0) -> Record:
    rng = np.random.default_rng((seed, 1, i))
    t = int(rng.integers(MIN_T, MAX_T + 1))
    record = {
        "question_id": f"q{i:06d}",
        "hidden": _slice(rng, seed, L, t, D),
        "attention": _slice(rng, seed, L, H, t, t),
        "logprobs": -rng.random(t, dtype=np.float32),
        "label": int(rng.integers(2)),
    }
    for name in TENSORS:  # float16 is exact up to 2048 only, hence two numbers
        record[name].reshape(-1)[:2] = divmod(i, 1000)
    return record


def trace_bytes(record: Record) -> int:
    """Payload of a trace: array bytes, the id, 8 for the label. Accepts numpy and torch."""
    return sum(record[name].nbytes for name in TENSORS) + len(record["question_id"]) + 8


def same_trace(found: Record, wanted: Record) -> bool:
    """Bit-identical, in numpy or torch."""
    arrays = [(np.asarray(found[name]), wanted[name]) for name in TENSORS]
    return (found["question_id"], int(found["label"])) == (wanted["question_id"], wanted["label"]) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes() for a, b in arrays
    )


def reads(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bases uint8 [count, 150] as ASCII, and labels int64 [count]."""
    rng = np.random.default_rng((seed, 2))
    alphabet = np.frombuffer(b"ACGT", np.uint8)
    bases = alphabet[rng.integers(0, 4, (count, BASES), dtype=np.uint8)]
    numbers = np.arange(count)
    for column in range(STAMP):
        bases[:, column] = alphabet[(numbers >> 2 * column) & 3]
    return bases, rng.integers(0, 1000, count)


def read_numbers(bases: np.ndarray) -> np.ndarray:
    """The number encoded in each row of `bases`."""
    codes = (bases[:, :STAMP].astype(np.int64) >> 1) & 3  # A C T G -> 0 1 2 3
    codes ^= codes >> 1  # A C G T
    return (codes << 2 * np.arange(STAMP)).sum(1)


def write_fasta(path: Path, count: int, seed: int = 0) -> None:
    """`>lbl|{label}|{tax}|150|read{i}/1` and 150 bases per record."""
    bases, labels = reads(count, seed)
    with path.open("wb") as file:
        for start in range(0, count, 50_000):
            rows = range(start, min(start + 50_000, count))
            file.write(
                b"".join(
                    b">lbl|%d|%d|%d|read%d/1\n%b\n" % (label, 1000 + label, BASES, i, row)
                    for i, label, row in zip(rows, labels[start:].tolist(), map(bytes, bases[start:]), strict=False)
                )
            )


def packed(bases: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One row of 158 bytes per read, label last: for formats whose record is a byte string."""
    return np.concatenate([bases, labels.astype("<i8").view(np.uint8).reshape(-1, 8)], axis=1)


def unpacked(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bases and labels again, copied."""
    return np.ascontiguousarray(rows[:, :BASES]), np.ascontiguousarray(rows[:, BASES:]).view("<i8").reshape(-1)


@lru_cache(maxsize=1)
def _pool(seed: int) -> np.ndarray:
    """16 MB of random float16, drawn once: taking a record from it costs a memcpy."""
    return np.random.default_rng((seed, 0)).standard_normal(1 << 23, dtype=np.float32).astype(np.float16)


def _slice(rng: np.random.Generator, seed: int, *shape: int) -> np.ndarray:
    pool, size = _pool(seed), int(np.prod(shape))
    start = int(rng.integers(pool.size - size))
    return pool[start : start + size].reshape(shape).copy()


# Datasets of our own, for peers that have none


class Rows(Dataset):
    """Map-style, from a function of a row number or of all row numbers of a batch."""

    def __init__(self, count: int, read: Callable[[int], Any], read_many: Callable[[list[int]], Any] | None = None):
        self._count, self._read = count, read
        if read_many:
            self.__getitems__ = read_many

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        return self._read(i)


class ShuffleBuffer(IterableDataset):
    """Files in random order, distributed over workers; each record is swapped with a random one in the buffer."""

    def __init__(self, files: list[Path], load: Callable[[Path], Iterable[Any]], seed: int) -> None:
        self._files, self._load, self._seed = files, load, seed

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        files = random.Random(self._seed).sample(self._files, len(self._files))[first::step]
        rng = random.Random(self._seed * 1000 + first)
        buffer: list[Any] = []
        for record in itertools.chain.from_iterable(map(self._load, files)):
            if len(buffer) < BUFFER_RECORDS:
                buffer.append(record)
            else:
                at = rng.randrange(BUFFER_RECORDS)
                buffer[at], record = record, buffer[at]
                yield record
        rng.shuffle(buffer)
        while buffer:
            yield buffer.pop()


class LastTwo:
    """Caches the two most recently used files."""

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load, self._held = load, OrderedDict[int, Any]()

    def __call__(self, number: int) -> Any:
        if number not in self._held:
            while len(self._held) > 1:
                self._held.popitem(last=False)
            self._held[number] = self._load(number)
        self._held.move_to_end(number)
        return self._held[number]


class LanceRows(Dataset):
    """Opens the dataset in the process that reads it: its threads do not survive a fork."""

    def __init__(self, path: str, take: Callable[[Any, list[int]], Any]) -> None:
        import lance

        self._path, self._take, self._rows = path, take, None
        self._count = lance.dataset(path).count_rows()

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, numbers: list[int]) -> Any:
        if self._rows is None:
            import lance

            self._rows = lance.dataset(self._path)
        return self._take(self._rows, numbers)


def shuffled(
    rows: Dataset, *, workers: int, batch_size: int, seed: int, collate: Callable[[Any], Any], context: Any = None
) -> DataLoader:
    """torch's exact shuffle of map-style rows."""
    return DataLoader(
        rows,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=context,
    )


def in_shards(records: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(records)
    while shard := list(itertools.islice(source, size)):
        yield shard


def as_torch(record: Record) -> Record:
    return record | {f: torch.from_numpy(record[f]) for f in TENSORS}


def as_torch_list(records: list[Record]) -> list[Record]:
    return [as_torch(r) for r in records]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """With numpy, in one thread: torch's clone uses all cores, and is 50 times slower if another process has one."""
    return torch.from_numpy(tensor.numpy().copy())


def copied_list(records: list[Record]) -> list[Record]:
    return [r | {f: copied(r[f]) for f in TENSORS} for r in records]


# A record as bytes, for array_record: T, label and the id in 32 bytes, then the tensors.


def to_bytes(record: Record) -> bytes:
    head = np.array([record["logprobs"].size, record["label"]], np.int64).tobytes()
    name = record["question_id"].encode().ljust(16, b"\0")
    return b"".join([head, name, *(record[f].tobytes() for f in TENSORS)])


def from_bytes(data: bytes) -> Record:
    num_tokens, label = np.frombuffer(data, np.int64, 2).tolist()
    record: Record = {"question_id": data[16:32].rstrip(b"\0").decode(), "label": label}
    start = 32
    for f, shape in tensor_shapes(num_tokens).items():
        record[f] = np.frombuffer(data, DTYPES[f], int(np.prod(shape)), start).reshape(shape)
        start += record[f].nbytes
    return record


def tensor_shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    t = num_tokens
    return {"hidden": (L, t, D), "attention": (L, H, t, t), "logprobs": (t,)}


# A record as a row of an Arrow table: tensors as large_binary, their shapes from the length of logprobs.


def arrow_row(pa: Any, record: Record) -> Any:
    def binary(array: np.ndarray) -> Any:
        offsets = pa.py_buffer(np.array([0, array.nbytes], np.int64))
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(array)])

    columns = {f: pa.array([record[f]]) for f in ("question_id", "label")} | {f: binary(record[f]) for f in TENSORS}
    return pa.record_batch(columns)


def arrow_records(table: Any, own: Callable[[np.ndarray], np.ndarray]) -> list[Record]:
    """The rows of a table; `own` may copy the views of its buffers."""
    return [record for batch in table.to_batches() for record in _batch_records(batch, own)]


def take_traces(rows: Any, numbers: list[int]) -> list[Record]:
    """From Lance, whose `take` reads into its own buffers."""
    return [arrow_records(rows.take([i]), np.asarray)[0] for i in numbers]


def _batch_records(batch: Any, own: Callable[[np.ndarray], np.ndarray]) -> Iterator[Record]:
    ends = {}
    for f in TENSORS:
        _, offsets, data = batch[f].buffers()
        first = batch[f].offset
        ends[f] = np.frombuffer(offsets, np.int64)[first : first + len(batch) + 1].tolist(), data
    names, labels = batch["question_id"].to_pylist(), batch["label"].to_pylist()
    for row in range(len(batch)):
        start, stop = ends["logprobs"][0][row : row + 2]
        record: Record = {"question_id": names[row], "label": labels[row]}
        for f, shape in tensor_shapes((stop - start) // 4).items():
            offsets, data = ends[f]
            flat = np.frombuffer(data, np.uint8)[offsets[row] : offsets[row + 1]].view(DTYPES[f])
            record[f] = own(flat).reshape(shape)
        yield record
