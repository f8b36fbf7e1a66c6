"""Peak memory of this process and all its children, as PSS: a page that several of them share counts once.

    with peak_pss() as memory:
        ...
    memory.peak_bytes

PSS includes pages of mapped files while they are mapped; `peak_file_bytes` is their share of the peak.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.05
SHARE = 0.1  # of one core at most: the kernel walks all pages, which takes 5 ms for a process that has imported torch


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


@contextmanager
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


def _watch(memory: Memory) -> None:
    pause = 0.0
    while not memory._done.wait(pause):
        start = time.thread_time()  # not wall time, most of which may be spent waiting for the GIL
        memory.sample()
        took = time.thread_time() - start
        pause = max(EVERY_S - took, took * (1 / SHARE - 1))


def _tree(pid: str) -> Iterator[str]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # a child belongs to the thread that started it
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
