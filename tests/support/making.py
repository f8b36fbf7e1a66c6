"""Records to write and compare, damage to files, and real processes that write, are killed and report their progress.

A record is a function of (seed, number), so any process can make it and any other can check it bit for bit. Children
are forked by a server without threads and without torch: 30 ms each, where a new interpreter takes a second.
"""

import builtins
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from millstream import open as ms_open
from millstream.errors import DamageWarning, StoreFull
from millstream.traces.store.manifest import DAMAGED, shard_name
from millstream.traces.store.repair import Damage, repair, verify
from millstream.traces.store.rewrite import merge, subset_records, subset_shards
from millstream.traces.store.traces import Traces
from millstream.traces.store.writer import TraceWriter
from support.effort import PATIENCE_S

Key = tuple[int, int]  # seed, number
Make = Callable[[int, int], dict[str, object]]

PROCESSES = multiprocessing.get_context("forkserver")
# Whatever the children import: there are hundreds, and importing pyarrow.compute alone takes 60 ms.
PROCESSES.set_forkserver_preload(
    ["pytest", "numpy.random", "pyarrow.compute", "millstream.traces.store.rewrite", "millstream.traces.store.writer"]
)


# -- records


def record(seed: int, number: int, *, dim: int = 128) -> dict[str, object]:
    """Tensors of one and of many slices, compressible and not, empty ones, texts, numbers, lists and None."""
    rng = np.random.default_rng([seed, number])
    num_tokens = int(rng.integers(6, 30))
    hidden = rng.integers(0, 2**16, (3, num_tokens, dim), np.uint16).view(np.float16)  # any bits, also NaN
    hidden[0] = 1.5
    return {
        "question_id": f"{seed}:{number}",
        "question": "Wer mahlt das Korn? " + "näher " * int(rng.integers(1, 9)),
        "answer": None if number % 4 == 2 else f"die Mühle {number}",
        "score": float(rng.normal()),
        "correct": bool(rng.integers(2)),
        "tags": ["x", f"tag{number}"][: 1 + number % 2],
        "tokens": rng.integers(0, 50_000, num_tokens).astype(np.int32),
        "hidden": hidden,
        "attention": np.tril(rng.random((2, num_tokens, num_tokens), np.float32)),
        "nothing": np.empty((0, 4), np.float32),
    }


def small(seed: int, number: int) -> dict[str, object]:
    """A record with little tensor data, except for every third, whose hidden states are stored in slices."""
    return record(seed, number, dim=400 if number % 3 == 1 else 8)


def plain(seed: int, number: int) -> dict[str, object]:
    """A record of few fields, for tests about the number of files."""
    full = record(seed, number, dim=64)
    return {name: full[name] for name in ("question_id", "answer", "hidden")}


def same(found: dict[str, object], expected: dict[str, object]) -> bool:
    """Whether two records are the same bit for bit."""
    return found.keys() == expected.keys() and all(same_value(found[name], expected[name]) for name in expected)


def same_value(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(found, dict) and same(found, expected)
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and found.tobytes() == expected.tobytes()
        )
    return type(found) is type(expected) and found == expected


def key_of(found: dict[str, object]) -> Key:
    seed, number = str(found["question_id"]).split(":")
    return int(seed), int(number)


def keys_in(traces: Traces, make: Make = record) -> list[Key]:
    """The key of every record of the store, in order; each record is compared with what was written."""
    keys: list[Key] = []
    for found in traces:
        keys.append(key_of(found))
        assert same(found, make(*keys[-1])), f"record {len(keys) - 1} is not what was written"
    return keys


def read_keys(path: Path, make: Make = record) -> list[Key]:
    return keys_in(ms_open(path), make)


def assert_holds(path: Path, keys: Iterable[Key], make: Make = record) -> None:
    """The store has these records exactly once, bit for bit, and `verify` finds nothing."""
    assert Counter(read_keys(path, make)) == Counter(keys)
    assert damages(path) == []


def damages(path: Path) -> list[Damage]:
    with quiet():
        return list(verify(path))


def lost_ids(path: Path) -> set[object]:
    """The ids listed in `damaged/lost.jsonl`."""
    file = path / DAMAGED / "lost.jsonl"
    return {json.loads(line)["id"] for line in file.read_text().splitlines()} if file.exists() else set()


def write(path: Path, keys: Iterable[Key], make: Make = record, **options: Any):
    with TraceWriter(path, **options) as writer:
        writer.extend(make(*key) for key in keys)
    return path


def write_open(
    path: Path,
    keys: Iterable[Key],
    make: Make = record,
    **options: Any,
) -> tuple[Path, list[int]]:
    """A store whose writer died with all records in one open shard; also the size of that file after each record."""
    living = path.with_name(path.name + ".living")
    writer = TraceWriter(living, **options)
    ends: list[int] = []
    for key in keys:
        writer.append(make(*key))
        ends.append(open_shard(living).stat().st_size)
    shutil.copytree(living, path)  # nobody has locked the copy
    writer.close()
    shutil.rmtree(living)
    return path, ends


def open_shard(path: Path) -> Path:
    (file,) = path.glob("*.open")
    return file


def quiet() -> warnings.catch_warnings:
    """Ignore warnings about damage that costs no record."""
    return warnings.catch_warnings(action="ignore", category=DamageWarning)


# -- damage


def flip(file: Path, position: int, bit: int = 0) -> None:
    with open(file, "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1 << bit]))


def place_of(path: Path, number: int, name: str) -> tuple[Path, int]:
    """The file and the byte at which a tensor of a record begins."""
    row = number
    for shard in ms_open(path).shards:
        if row < shard.records:
            file = path / shard_name(shard.number)
            return file, pq.read_table(file.with_suffix(".parquet"))[name][row].as_py()["offset"]
        row -= shard.records
    raise IndexError(number)


def files_of(path: Path) -> dict[str, bytes]:
    """Every file under a folder with its bytes."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


# -- processes


class Child:
    """A process that runs `job(*args, report)` and reports its progress through a pipe, unbuffered."""

    def __init__(self, job: Callable[..., None], *args: object) -> None:
        self._receiver, sender = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=_run, args=(job, args, sender))
        self.process.start()
        sender.close()

    def receive(self) -> Any:
        """The next report; None once the child has exited and all its reports were received."""
        try:
            return self._receiver.recv()
        except (EOFError, ConnectionResetError):
            return None

    def rest(self) -> Iterator[Any]:
        while (reports := self.receive()) is not None:
            yield reports

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> int:
        """Wait for the end: 0, or -SIGKILL when killed; anything else fails the test (its traceback is on stderr)."""
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        self._receiver.close()
        assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
        return code


def run_child(job: Callable[..., None], *args: object) -> list[Any]:
    """Run a job to its end in a child process; its reports."""
    child = Child(job, *args)
    reports = list(child.rest())
    assert child.join() == 0
    return reports


def _run(job: Callable[..., None], args: tuple[object, ...], sender: Connection) -> None:
    warnings.simplefilter("error")
    job(*args, sender.send)
    assert "torch" not in sys.modules, "writing numpy arrays must not cost the import of torch"


# All calls that change the disk. Not fsync: death before and after it leaves the same files.
_CALLS = "open rename link unlink mkdir rmdir ftruncate pwritev copy_file_range"
CALLS = {os: _CALLS.split(" "), builtins: ["open"]}


def die_everywhere(
    template: Path | None, work: Path, job: Callable[..., None], *args: object
) -> Iterator[tuple[Path, list[Any], str]]:
    """Run `job(path, *args, report)` on copies of `template`, killed before, during and after each of its steps.

    Yields (path, reports of the job, how it died) for the uninterrupted run and for every death that leaves different
    files. One process without threads forks them all.
    """
    child = Child(_die_everywhere, template, work, job, args)
    seen: list[object] = []
    for path, reports, how in child.rest():
        state = reports, {re.sub(r"\.\w+\.tmp$", ".tmp", name): data for name, data in files_of(path.parent).items()}
        if state not in seen:
            seen.append(state)
            yield path, reports, how
        shutil.rmtree(path.parent)
    assert child.join() == 0


def _die_everywhere(
    template: Path | None, work: Path, job: Callable[..., None], args: tuple[object, ...], report: Callable[..., None]
) -> None:
    def run(step: int, when: str, how: str) -> list[Any]:
        path = work / how / "store"
        path.parent.mkdir(parents=True)
        if template is not None:
            shutil.copytree(template, path)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            _exit_after(_dying, step, when, job, path, *args, sender.send)
        sender.close()
        reports: list[Any] = []
        try:
            while True:
                reports.append(receiver.recv())
        except EOFError:
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (-signal.SIGKILL if step else 0), f"{how}: exit code {code}"
        calls = [] if step else reports.pop()
        report((path, reports, how))
        return calls

    calls = run(0, "never", "not interrupted")
    for step, name in enumerate(calls, 1):
        # After a step is before the next one, unless a record is reported or an open file is written between them.
        after = name in ("pwritev", "rename", "open") or step == len(calls)
        whens = ["before", *["torn"] * (name == "pwritev"), *["after"] * after]
        for when in whens:
            run(step, when, f"killed {when} step {step}, {name}")


def _exit_after(job: Callable[..., None], *args: object) -> None:
    """Run a job in a forked child and exit, without returning into the parent's code."""
    code = 1
    try:
        job(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _dying(step: int, when: str, job: Callable[..., None], *args: Any) -> None:
    """Run the job and SIGKILL this process at call number `step`; at the end report the names of its calls."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            if name == "open" and not _writes(*args[1:2]):
                return real(*args, **kwargs)
            calls.append(name)
            if len(calls) != step:
                return real(*args, **kwargs)
            try:
                if when == "torn":
                    _write_half(real, *args)
                elif when == "after":
                    return real(*args, **kwargs)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    for module, names in CALLS.items():
        for name in names:
            setattr(module, name, counted(name, getattr(module, name)))
    time.time = lambda: 1.7e9  # so that two deaths with the same effect leave the same bytes
    job(*args)
    args[-1](calls)


@contextmanager
def noted(how: str) -> Iterator[None]:
    """Add to a failure how the process had died."""
    try:
        yield
    except BaseException as error:
        error.add_note(how)
        raise


def _writes(mode: str | int = "r") -> bool:
    """Whether `open` with this mode or these flags may change the disk."""
    return mode not in ("r", "rb") if isinstance(mode, str) else bool(mode & (os.O_CREAT | os.O_RDWR | os.O_WRONLY))


def _write_half(real: Callable[..., object], fd: object, buffers: list[memoryview], offset: object) -> None:
    data = b"".join(bytes(buffer) for buffer in buffers)
    real(fd, [data[: len(data) // 2]], offset)


# -- jobs


def append_forever(path: Path, seed: int, options: dict[str, Any], report: Callable[[object], None]) -> None:
    """Append to a store; report its number of records at first and after each append."""
    with quiet():
        writer = TraceWriter(path, **options)
    report(len(writer))
    while True:
        writer.append(record(seed, len(writer)))
        report(len(writer))


def append_some(path: Path, keys: list[Key], options: dict[str, Any], report: Callable[[object], None]) -> None:
    """Append these records and close; report how many are written after each."""
    writer = TraceWriter(path, **options)
    for done, key in enumerate(keys):
        writer.append(plain(*key))
        report(done + 1)
    writer.close()


def open_and_close(path: Path, report: Callable[[object], None]) -> None:
    with quiet(), TraceWriter(path):
        pass


def repair_store(path: Path, report: Callable[[object], None]) -> None:
    with quiet():
        repair(path)


def merge_stores(path: Path, sources: list[Path], report: Callable[[object], None]) -> None:
    merge(sources, path)


def take_shards(path: Path, source: Path, numbers: list[int], report: Callable[[object], None]) -> None:
    subset_shards(source, path, numbers)


def take_records(path: Path, source: Path, numbers: list[int], report: Callable[[object], None]) -> None:
    subset_records(ms_open(source), path, numbers)


def append_until_full(path: Path, seed: int, options: dict[str, Any], report: Callable[[object], None]) -> None:
    """Append until the disk is full, in a `with` block; report the number of records after each."""
    number = 0
    try:
        with TraceWriter(path, **options) as writer:
            while True:
                writer.append(record(seed, number))
                number += 1
                report(number)
    except StoreFull:
        pass


def append_under_limit(path: Path, limit: int, report: Callable[[object], None]) -> None:
    """Append until a file may not grow, then with the limit lifted; report each record written and each error."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    writer = TraceWriter(path)
    number = 0
    for _ in range(2):
        try:
            while True:
                writer.append(record(1, number))
                number += 1
                report(number)
        except StoreFull as error:
            report(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(2):
        writer.append(record(1, number))
        number += 1
        report(number)
    writer.close()


def die_on_full_disk(path: Path, filler: Path, leave: int, report: Callable[[object], None]) -> None:
    """Write two records, the second to a disk with `leave` bytes free, and die; report each record written."""
    writer = TraceWriter(path, shard_records=2)
    for number, key in enumerate([(1, 0), (1, 2)]):
        if number == 1:
            fill(filler, leave)
        try:
            writer.append(small(*key))
            report(key)
        except StoreFull:
            pass
    os.kill(os.getpid(), signal.SIGKILL)


def fill(filler: Path, leave: int) -> None:
    """Fill a disk except for `leave` bytes."""
    disk = os.statvfs(filler.parent)
    with open(filler, "wb") as f:
        f.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))


def open_write_close(path: Path, keys: list[Key], start: Any, report: Callable[[object], None]) -> None:
    """Open, write one record and close, for each key; report each record written."""
    start.wait(PATIENCE_S)
    for key in keys:
        with TraceWriter(path, shard_records=2) as writer:
            writer.append(small(*key))
            report(key)


def read_in_fork(path: Path, report: Callable[[object], None]) -> None:
    """Read a store opened before a fork in child and parent; report the exit code of the child and the keys."""
    traces = ms_open(path)
    held = traces[0]
    pid = os.fork()
    if not pid:
        _exit_after(keys_in, traces)
    keys = keys_in(traces)
    report(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    report(keys)
    assert same(held, record(*keys[0]))


def read_pickled(traces: Traces, sender: Connection) -> None:
    sender.send(keys_in(traces))


def hold_all(path: Path, limit: int, report: Callable[[object], None]) -> None:
    """Keep every record of a store, and read all as a loader does, with few descriptors; report the keys."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with ms_open(path, open_shards=300) as traces:
        held = list(traces)
    assert all(same(found, plain(*key_of(found))) for found in held)
    for nowait in (os.RWF_NOWAIT, 1 << 30):  # an unknown flag: as if nothing were cached
        os.RWF_NOWAIT = nowait  # pyright: ignore
        read = Traces(path, mapped=False, verify="never").fetch(range(len(held)), ["hidden"])["hidden"]
        assert all(same_value(one, found["hidden"]) for one, found in zip(read, held, strict=True))
    report([key_of(found) for found in held])
