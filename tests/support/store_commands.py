"""Commands on one store, run by two processes at the same time, or in a child that damaged bytes may kill."""

import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.core.tables import is_table_intact
from millstream.errors import CorruptRecord, CorruptShard, MillstreamError
from millstream.traces.convert import convert
from millstream.traces.store.format import is_whole, read_shard
from millstream.traces.store.inspect import summarise
from millstream.traces.store.manifest import LABELS, read_sidecar, shard_info, shard_name, sidecar_name
from millstream.traces.store.repair import repair, verify
from millstream.traces.store.rewrite import drop_records, merge, subset_shards
from millstream.traces.store.traces import Traces
from support.making import quiet

COUNT, DAMAGED_RECORD = 24, 7


def record(number: int) -> dict[str, object]:
    hidden = np.full((2, 3, 4), number, np.float16)
    return {"question_id": f"q{number}", "generated_answer": "yes", "aliases": ["yes"], "hidden": hidden}


def append(path: Path) -> None:
    with ms.TraceWriter(path, shard_records=2) as writer:
        for number in range(COUNT, COUNT + 4):
            writer.append(record(number))


def open_and_close(path: Path) -> None:
    ms.TraceWriter(path).close()


def read(path: Path) -> None:
    for number in range(len(traces := Traces(path))):
        with suppress(CorruptRecord, CorruptShard):  # one record is damaged; a repair may replace its shard
            traces[number]


def drop_last(path: Path) -> None:
    drop_records(path, lambda traces: [number for number, name in enumerate(traces.ids) if name == "q19"])


def copy_all(path: Path) -> None:
    """Merge, subset and inspect the store; both copies have each record once, and are as whole as the store."""
    for number, copy in enumerate((merge_alone, subset_all)):
        out = path.with_name(f"{path.name}-{os.getpid()}-{number}")
        copy(path, out)
        with suppress(CorruptShard):  # dropped meanwhile
            summarise(path)
        ids = Traces(out).ids
        damaged = {damage.id for damage in verify(out)}
        assert len(ids) == len(set(ids)) >= COUNT - 6 and damaged <= {f"q{DAMAGED_RECORD}"}
        shutil.rmtree(out)


def merge_alone(path: Path, out: Path) -> None:
    merge([path], out)


def subset_all(path: Path, out: Path) -> None:
    subset_shards(path, out, [shard.number for shard in Traces(path).shards])


def featurize_copy(path: Path) -> None:
    out = path.with_name(f"{path.name}-{os.getpid()}-features")
    try:
        ms.featurize(path, out, feature="layers", token="last", field="hidden")
    finally:
        shutil.rmtree(out, ignore_errors=True)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "repair": repair,
    "append": append,
    "recover": open_and_close,
    "label": ms.label,
    "drop": drop_last,
    "read": read,
    "copy": copy_all,
    "featurize": featurize_copy,
    "verify": lambda path: list(verify(path)),
}


def run(command: Callable[[Path], object], path: Path, delay: float) -> str | None:
    """The refusal of a command, if any."""
    time.sleep(delay)
    try:
        with quiet():
            command(path)
    except MillstreamError as error:
        return str(error)
    return None


def run_named(name: str, path: Path, delay: float) -> str | None:
    return run(COMMANDS[name], path, delay)


def convert_all(path: Path) -> None:
    convert(sorted(path.parent.glob("*.pkl")), path)


def featurize_all(path: Path) -> None:
    ms.featurize(path.parent / "store", path, feature="layers", token="last", field="hidden")


def merge_two(path: Path) -> None:
    merge([path.parent / "store", path.parent / "other"], path)


def read_flipped(path: Path, places: range, report: Callable[[object], None]) -> None:
    """Read a shard with each bit of these bytes flipped; report (byte, bit) wherever nothing is noticed."""
    data = bytearray((path / shard_name(0)).read_bytes())
    whole = read_shard(np.frombuffer(bytes(data), np.uint8))
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            found = read_shard(np.frombuffer(bytes(data), np.uint8))
            if len(found[1]) == len(whole[1]) and not found[2]:
                report((place, bit))
            data[place] ^= 1 << bit


def read_damaged(path: Path, seed: int, count: int, report: Callable[[object], None]) -> None:
    """Read a shard and its sidecar `count` times, each time with other bytes replaced; report the damages done."""
    rng = random.Random(seed)
    originals = {name: (path / name).read_bytes() for name in (shard_name(0), sidecar_name(0), LABELS)}
    sealed = shard_info(path, 0)
    for _ in range(count):
        for name, original in originals.items():
            data = bytearray(original)
            near = rng.choice([len(data), min(len(data), 2000)])  # often in the header and the first record
            start = rng.randrange(near)
            for place in [rng.randrange(near) for _ in range(rng.randint(1, 8))] + [*range(start, start + 4)]:
                data[min(place, len(data) - 1)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            if name == shard_name(0):
                view = np.frombuffer(bytes(data), np.uint8)
                for row in read_shard(view)[1]:
                    is_whole(view, row.offset)
                continue
            (path / name).write_bytes(data)
            if name == LABELS:
                assert bool(is_table_intact(bytes(data))) == (bytes(data) == original)
            elif read_sidecar(path, 0, None) is not None or read_sidecar(path, 0, sealed.sidecar_crc32c) is not None:
                assert bytes(data) == original
            (path / name).write_bytes(original)
    report(count)


def verify_and_repair_damaged(path: Path, seed: int, count: int, report: Callable[[object], None]) -> None:
    """Verify and repair copies of a store with bytes replaced near the start of its shard; report the records left."""
    rng = random.Random(seed)
    for number in range(count):
        copy = path.with_name(f"{path.name}-{seed}-{number}")
        shutil.copytree(path, copy)
        data = bytearray((copy / shard_name(0)).read_bytes())
        for _ in range(rng.randint(1, 12)):
            data[rng.randrange(3000)] = rng.randrange(256)
        (copy / shard_name(0)).write_bytes(data)
        with quiet():
            found = list(verify(copy))
            repair(copy)
            assert found and not list(verify(copy))
        report(len(Traces(copy)))
        shutil.rmtree(copy)
