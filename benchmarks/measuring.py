"""What the benchmarks share: results, time, the page cache, and memory.

    with peak_pss() as memory:
        ...
    memory.peak_bytes

PSS is summed over this process and its children: a page that several of them share counts once. It includes pages of
mapped files while they are mapped; `peak_file_bytes` is their share of the peak. `measure` runs a function of a script
in a new process, so that its time and memory are its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"
EVERY_S = 0.05
SHARE = 0.1  # of one core at most: the kernel walks all pages, which takes 5 ms for a process that has imported torch

Result = dict[str, Any]


def save(name: str, result: object) -> Path:
    """Write a result to benchmarks/results/NAME.json."""
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def update_page(name: str, mark: str, lines: Sequence[str]) -> None:
    """Replace the lines between the two comments `mark` in docs/results/NAME.md."""
    page = PAGES / f"{name}.md"
    before, _, rest = page.read_text().partition(mark)
    _, _, after = rest.partition(mark)
    page.write_text(before + "\n".join([mark, "", *lines, "", mark]) + after)


def clock(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """CPU time of this process and its children that have ended: what counts where other jobs share the cores."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(action: Callable[[], object]) -> Result:
    """Seconds that `action` takes, of the clock and of CPU time."""
    cpu = cpu_seconds()
    return {"seconds": clock(action), "cpu_s": cpu_seconds() - cpu}


def rounded(value: Any) -> Any:
    """A result with five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return {key: rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


# The page cache


def read_file(*paths: Path) -> None:
    """Read files from start to end, which also puts them into the page cache."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_cache(path: Path) -> None:
    """Drop a file, or all files of a folder, from the page cache, unless they are mapped."""
    for file in (file for file in (path, *path.rglob("*")) if file.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# Memory


@dataclass
class Memory:
    """Peak memory: the highest sum over the processes at one time, and the number of samples."""

    peak_bytes: int = 0
    peak_file_bytes: int = 0
    num_samples: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        total, files = tree_pss()
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_file_bytes = total, files
        self.num_samples += 1


@contextlib.contextmanager
def peak_pss() -> Iterator[Memory]:
    """Samples in a thread every 50 ms (150 ms with two torch workers, to stay below SHARE), and at the end."""
    memory = Memory()
    thread = threading.Thread(target=_watch, args=(memory,), daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        memory.sample()
        memory._done.set()
        thread.join()


def tree_pss() -> tuple[int, int]:
    """Bytes of this process and its descendants now, and how many of them are pages of mapped files."""
    totals = [_pss(pid) for pid in _tree("self")]
    return sum(total for total, _ in totals), sum(files for _, files in totals)


def reset_peak() -> None:
    """Start `memory_bytes("VmHWM")` again from the current memory."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(what: str, pid: int | str = "self", file: str = "status") -> int:
    """A line of /proc/PID/status or smaps_rollup: VmRSS, VmHWM (its peak), Pss, ..."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _watch(memory: Memory) -> None:
    pause = 0.0
    while not memory._done.wait(pause):
        start = time.thread_time()  # not wall time, most of which may be spent waiting for the GIL
        memory.sample()
        took = time.thread_time() - start
        pause = max(EVERY_S - took, took * (1 / SHARE - 1))


def _tree(pid: str) -> Iterator[str]:
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").glob("*/children"))  # a child belongs to the thread that started it
    except OSError:  # the process has ended
        return
    for children in threads:
        try:
            numbers = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for number in numbers:
            yield from _tree(number)


def _pss(pid: str) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0, 0
    kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
    return kb["Pss"] * 1024, kb["Pss_File"] * 1024


class Watch:
    """The memory of another process. Not ru_maxrss: after fork and exec it starts at the parent's."""

    def __init__(self, pid: int) -> None:
        self.peak_mb = self.pss_mb = 0.0
        self._pid, self._done, self._thread = pid, threading.Event(), threading.Thread(target=self._sample)

    def _sample(self) -> None:
        pause = 0.0
        while not self._done.wait(pause):
            start = time.perf_counter()
            try:
                self.peak_mb = max(self.peak_mb, memory_bytes("VmHWM", self._pid) / 1e6)
                self.pss_mb = max(self.pss_mb, memory_bytes("Pss", self._pid, "smaps_rollup") / 1e6)
            except (OSError, StopIteration):  # it has ended
                return
            pause = max(0.02, 50 * (time.perf_counter() - start))  # walking 4 GB of pages takes 20 ms

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


# A measurement in its own process


class Absent(Exception):
    """A program that is not installed. A missing library raises ImportError, which means the same here."""


def measure(script: str, name: str, *, timeout_s: float = 600, **kwargs: Any) -> Result:
    """One measurement in a new process: its result, or {"absent": reason}, {"timeout": s} or {"error": text}."""
    arguments = [f"{key}={value}" for key, value in kwargs.items() if value is not None]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, script, name, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # so that its child processes can be killed with it
    )
    with Watch(process.pid) as watch:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"timeout": timeout_s}
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
    if process.returncode or not out.strip():
        return {"error": f"exit {process.returncode}: {(err.strip().splitlines() or [''])[-1]}"}
    result = json.loads(out.splitlines()[-1])
    return result if "absent" in result else rounded({"pss_mb": watch.pss_mb} | result)


def run(measures: dict[str, Callable[..., Result]], name: str, arguments: Sequence[str]) -> int:
    """The other end of `measure`: run one measurement in this process and print one line of JSON."""
    kwargs: dict[str, Any] = dict(argument.split("=", 1) for argument in arguments)
    for key, value in kwargs.items():
        if key in ("path", "plain", "folder", "tokenizer"):
            kwargs[key] = Path(value)
        elif value.isdigit():
            kwargs[key] = int(value)
    try:
        result = measures[name](**kwargs)
        result = {"tool": kwargs["tool"], "peak_mb": memory_bytes("VmHWM") / 1e6} | result
    except (ImportError, Absent) as error:
        result = {"absent": str(error)}
    print(json.dumps(result))
    return 0
