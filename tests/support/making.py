"""Records to write and compare, damage to do to files, and real processes that write, die and tell how far they came.

A record is a function of (seed, number), so that any process can make it and any other can check it bit for bit.
Children come from a fork server without threads and without torch: 30 ms each, where an interpreter takes a second.
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
PROCESSES.set_forkserver_preload(["pytest", "millstream.traces.store.rewrite", "millstream.traces.store.writer"])


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
    """A record that is mostly frame, but for every third, whose hidden states are cut into slices."""
    return record(seed, number, dim=400 if number % 3 == 1 else 8)


def plain(seed: int, number: int) -> dict[str, object]:
    """A record of few fields, where it is the number of files that counts."""
    full = record(seed, number, dim=64)
    return {name: full[name] for name in ("question_id", "answer", "hidden")}


def same(found: dict[str, object], expected: dict[str, object]) -> bool:
    """Whether two records are the same to the bit."""
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
    """The ids that `damaged/lost.jsonl` asks to be extracted again."""
    file = path / DAMAGED / "lost.jsonl"
    return {json.loads(line)["question_id"] for line in file.read_text().splitlines()} if file.exists() else set()


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
    """A store whose writer died with everything in one open shard; with the file's bytes after each record."""
    living = path.with_name(path.name + ".living")
    writer = TraceWriter(living, **options)
    ends: list[int] = []
    for key in keys:
        writer.append(make(*key))
        ends.append(open_shard(living).stat().st_size)
    shutil.copytree(living, path)  # a copy is locked by nobody
    writer.close()
    shutil.rmtree(living)
    return path, ends


def open_shard(path: Path) -> Path:
    (file,) = path.glob("*.open")
    return file


def quiet() -> warnings.catch_warnings:
    """Damage that could be worked around is only warned of."""
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
    """A process that runs `job(*args, tell)` and tells how it goes through a pipe, unbuffered."""

    def __init__(self, job: Callable[..., None], *args: object) -> None:
        self._ear, mouth = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=_run, args=(job, args, mouth))
        self.process.start()
        mouth.close()

    def hear(self) -> Any:
        """The next thing told; None when the child is gone and everything it told was heard."""
        try:
            return self._ear.recv()
        except (EOFError, ConnectionResetError):
            return None

    def rest(self) -> Iterator[Any]:
        while (told := self.hear()) is not None:
            yield told

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> int:
        """Wait for the end: 0, or -SIGKILL when killed; anything else fails the test (its traceback is on stderr)."""
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        self._ear.close()
        assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
        return code


def run_child(job: Callable[..., None], *args: object) -> list[Any]:
    """Run a job to its end in a process of its own; what it told."""
    child = Child(job, *args)
    told = list(child.rest())
    assert child.join() == 0
    return told


def _run(job: Callable[..., None], args: tuple[object, ...], mouth: Connection) -> None:
    warnings.simplefilter("error")
    job(*args, mouth.send)
    assert "torch" not in sys.modules, "writing numpy arrays must not cost the import of torch"


# Everything through which the store changes the disk. Not fsync: death before and after it leaves the same files.
_CALLS = "open rename link unlink mkdir rmdir ftruncate pwritev copy_file_range"
CALLS = {os: _CALLS.split(" "), builtins: ["open"]}


def die_everywhere(
    template: Path | None, work: Path, job: Callable[..., None], *args: object
) -> Iterator[tuple[Path, list[Any], str]]:
    """Run `job(path, *args, tell)` on copies of `template`, killed before, amid and after each of its steps.

    Gives (path, what the job told, how it died) of the run that was left alone and of every death that left something
    new. One process without threads forks them all.
    """
    child = Child(_die_everywhere, template, work, job, args)
    seen: list[object] = []
    for path, told, how in child.rest():
        state = told, {re.sub(r"\.\w+\.tmp$", ".tmp", name): data for name, data in files_of(path.parent).items()}
        if state not in seen:
            seen.append(state)
            yield path, told, how
        shutil.rmtree(path.parent)
    assert child.join() == 0


def _die_everywhere(
    template: Path | None, work: Path, job: Callable[..., None], args: tuple[object, ...], tell: Callable[..., None]
) -> None:
    def run(step: int, when: str, how: str) -> list[Any]:
        path = work / how / "store"
        path.parent.mkdir(parents=True)
        if template is not None:
            shutil.copytree(template, path)
        ear, mouth = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            _exit_after(_dying, step, when, job, path, *args, mouth.send)
        mouth.close()
        told: list[Any] = []
        try:
            while True:
                told.append(ear.recv())
        except EOFError:
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (-signal.SIGKILL if step else 0), f"{how}: exit code {code}"
        calls = [] if step else told.pop()
        tell((path, told, how))
        return calls

    calls = run(0, "never", "left alone")
    for step, name in enumerate(calls, 1):
        # After a step is before the next, unless something happens unseen: a record is told, an open file is written.
        after = name in ("pwritev", "rename", "open") or step == len(calls)
        whens = ["before", *["torn"] * (name == "pwritev"), *["after"] * after]
        for when in whens:
            run(step, when, f"killed {when} step {step}, {name}")


def _exit_after(job: Callable[..., None], *args: object) -> None:
    """What a forked child does instead of returning into its parent's code."""
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
    """Run the job and SIGKILL this process at its call number `step`; at the end tell the names of its calls."""
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
    """Say in a failure how the process had died."""
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


def append_forever(path: Path, seed: int, options: dict[str, Any], tell: Callable[[object], None]) -> None:
    """Continue a store: tell how many records were there, then how many there are after each append."""
    with quiet():
        writer = TraceWriter(path, **options)
    tell(len(writer))
    while True:
        writer.append(record(seed, len(writer)))
        tell(len(writer))


def append_some(path: Path, keys: list[Key], options: dict[str, Any], tell: Callable[[object], None]) -> None:
    """Append these records and close; tell how many are written after each."""
    writer = TraceWriter(path, **options)
    for done, key in enumerate(keys):
        writer.append(plain(*key))
        tell(done + 1)
    writer.close()


def open_and_close(path: Path, tell: Callable[[object], None]) -> None:
    with quiet(), TraceWriter(path):
        pass


def repair_store(path: Path, tell: Callable[[object], None]) -> None:
    with quiet():
        repair(path)


def merge_stores(path: Path, sources: list[Path], tell: Callable[[object], None]) -> None:
    merge(sources, path)


def take_shards(path: Path, source: Path, numbers: list[int], tell: Callable[[object], None]) -> None:
    subset_shards(source, path, numbers)


def take_records(path: Path, source: Path, numbers: list[int], tell: Callable[[object], None]) -> None:
    subset_records(ms_open(source), path, numbers)


def append_until_full(path: Path, seed: int, options: dict[str, Any], tell: Callable[[object], None]) -> None:
    """Append until the disk is full, as a program does that does not expect it; tell each record written."""
    number = 0
    try:
        with TraceWriter(path, **options) as writer:
            while True:
                writer.append(record(seed, number))
                number += 1
                tell(number)
    except StoreFull:
        pass


def append_under_limit(path: Path, limit: int, tell: Callable[[object], None]) -> None:
    """Append until a file may not grow, then with the limit lifted; tell each record written and each refusal."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    writer = TraceWriter(path)
    number = 0
    for _ in range(2):
        try:
            while True:
                writer.append(record(1, number))
                number += 1
                tell(number)
        except StoreFull as error:
            tell(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(2):
        writer.append(record(1, number))
        number += 1
        tell(number)
    writer.close()


def die_on_full_disk(path: Path, filler: Path, leave: int, tell: Callable[[object], None]) -> None:
    """Write two records, the second to a disk with `leave` bytes free, and die; tell each record written."""
    writer = TraceWriter(path, shard_records=2)
    for number, key in enumerate([(1, 0), (1, 2)]):
        if number == 1:
            fill(filler, leave)
        try:
            writer.append(small(*key))
            tell(key)
        except StoreFull:
            pass
    os.kill(os.getpid(), signal.SIGKILL)


def fill(filler: Path, leave: int) -> None:
    """Take all space of a disk but so many bytes."""
    disk = os.statvfs(filler.parent)
    with open(filler, "wb") as f:
        f.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))


def open_write_close(path: Path, keys: list[Key], start: Any, tell: Callable[[object], None]) -> None:
    """Open, write one record and close, again and again; tell each record written."""
    start.wait(PATIENCE_S)
    for key in keys:
        with TraceWriter(path, shard_records=2) as writer:
            writer.append(small(*key))
            tell(key)


def read_in_fork(path: Path, tell: Callable[[object], None]) -> None:
    """Read in a forked child what was open before the fork, while the parent reads, too; tell how both went."""
    traces = ms_open(path)
    held = traces[0]
    pid = os.fork()
    if not pid:
        _exit_after(keys_in, traces)
    keys = keys_in(traces)
    tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    tell(keys)
    assert same(held, record(*keys[0]))


def read_pickled(traces: Traces, mouth: Connection) -> None:
    mouth.send(keys_in(traces))


def hold_all(path: Path, limit: int, tell: Callable[[object], None]) -> None:
    """Hold every record of a store at once, and read all as a loader does, with few descriptors; tell the keys."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with ms_open(path, open_shards=300) as traces:
        held = list(traces)
    assert all(same(found, plain(*key_of(found))) for found in held)
    for nowait in (os.RWF_NOWAIT, 1 << 30):  # a flag no kernel knows: as if nothing were cached
        os.RWF_NOWAIT = nowait  # pyright: ignore
        read = Traces(path, mapped=False, verify="never").fetch(range(len(held)), ["hidden"])["hidden"]
        assert all(same_value(one, found["hidden"]) for one, found in zip(read, held, strict=True))
    tell([key_of(found) for found in held])
