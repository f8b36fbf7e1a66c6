"""Reads across threads, forks, spawned processes and kills."""

import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.reads.files.index import IndexLimits, IndexSettings, build_index, load_index
from millstream.reads.files.inflate import ahead
from millstream.reads.reads import Reads
from support.effort import PATIENCE_S
from support.read_files import REGEX, WRAPPERS, fasta, flushed, holds, index_of, opened, records, sequences_of, texts

MADE = records(300)


# -- forks and spawned processes


def read_all(reads: Reads) -> None:
    assert texts(reads) == sequences_of(MADE)
    assert reads.find(MADE[7].header.decode()) == [7]
    assert reads[299].columns["who"] == "r299"


@pytest.mark.parametrize("memory", [1, "10MB"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reads_that_were_used_can_be_used_after_a_fork(wrapper: str, memory: int | str, tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(WRAPPERS[wrapper](fasta(MADE)))
    reads = opened(tmp_path / "reads.fa", memory=memory, header_regex=REGEX)
    texts(reads)
    children = [multiprocessing.get_context("fork").Process(target=read_all, args=(reads,)) for _ in range(2)]
    for child in children:
        child.start()
    read_all(reads)
    for child in children:
        child.join(PATIENCE_S)
    assert [child.exitcode for child in children] == [0, 0]


def test_a_fork_in_the_middle_of_decoding_does_not_hang(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(WRAPPERS["bgzf"](fasta(MADE)))
    reads = opened(tmp_path / "reads.fa", memory=1, header_regex=REGEX)
    read_all(reads)
    done = threading.Event()

    def decode() -> None:
        while not done.is_set():
            texts(reads)

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes: list[int | None] = []
    for _ in range(4):
        child = multiprocessing.get_context("fork").Process(target=read_all, args=(reads,))
        child.start()
        child.join(PATIENCE_S)
        codes.append(child.exitcode)
        if child.exitcode is None:
            child.kill()
    done.set()
    for thread in threads:
        thread.join()
    assert codes == [0] * 4


def test_pickled_reads_open_in_a_new_process(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(flushed(fasta(MADE)))
    (tmp_path / "pickle").write_bytes(pickle.dumps(opened(tmp_path / "reads.fa", header_regex=REGEX, memory="1MB")))
    code = (
        "import pickle, sys; reads = pickle.load(open(sys.argv[1], 'rb')); print(reads[5].columns['who'], len(reads))"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "pickle"], capture_output=True, check=True)
    assert result.stdout.split() == [b"r5", b"300"] and result.stderr == b""


# -- killed and interrupted


def end_of_fork(work: Callable[[], None]) -> int | None:
    """How a child of this process ended."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(PATIENCE_S)
    return child.exitcode


def test_a_kill_while_indexing_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "reads.fa").write_bytes(flushed(fasta(MADE)))

    def work() -> None:
        def die(done: int, note: str = "") -> None:
            if done > 3000:
                os.kill(os.getpid(), signal.SIGKILL)

        limits = IndexLimits(buffer_bytes=512)
        build_index(tmp_path / "reads.fa", IndexSettings(header_regex=REGEX), limits=limits, progress=die)

    assert end_of_fork(work) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["reads.fa"]
    assert holds(opened(tmp_path / "reads.fa"), MADE)


def test_a_kill_while_an_index_is_replaced_leaves_the_old_one(tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_bytes(fasta(MADE))
    opened(file)
    before = index_of(file).read_bytes()

    def work() -> None:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        build_index(file, IndexSettings(header_regex=REGEX))

    assert end_of_fork(work) == -signal.SIGKILL
    assert index_of(file).read_bytes() == before and holds(opened(file), MADE)
    assert all(name.endswith(".tmp") for name in os.listdir(tmp_path) if not name.startswith("reads.fa"))
    assert opened(tmp_path).paths == [file]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_index_leaves_neither_files_nor_threads(
    error: type[BaseException], wrapper: str, tmp_path: Path
):
    (tmp_path / "reads.fa").write_bytes(WRAPPERS[wrapper](fasta(MADE)))
    gc.collect()
    before, open_files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def interrupt(done: int, note: str = "") -> None:
        raise error

    with pytest.raises(error):
        limits = IndexLimits(buffer_bytes=512)
        build_index(tmp_path / "reads.fa", IndexSettings(header_regex=REGEX), limits=limits, progress=interrupt)
    assert os.listdir(tmp_path) == ["reads.fa"] and set(threading.enumerate()) <= before
    assert len(os.listdir("/proc/self/fd")) <= open_files


def test_opening_while_an_index_is_replaced_gives_the_old_or_the_new_one(tmp_path: Path):
    file = tmp_path / "reads.fa"
    file.write_bytes(fasta(MADE))
    opened(file)
    done = threading.Event()

    def rebuild() -> None:
        while not done.is_set():
            build_index(file, IndexSettings(header_regex=REGEX))

    thread = threading.Thread(target=rebuild)
    thread.start()
    try:
        for _ in range(20):
            sections = load_index(file, index_of(file))
            assert sections.meta["records"] == 300 and sections.column("bases").rows == 300
    finally:
        done.set()
        thread.join()


# -- a thread ahead


def test_all_items_come_in_order():
    assert list(ahead(iter(range(1000)), depth=3)) == list(range(1000))


def test_an_error_is_raised_in_place_of_its_item():
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    stream = ahead(items(), depth=8)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_closing_stops_the_thread_and_the_items():
    before = threading.active_count()
    stream = ahead(iter(int, 1), depth=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before


# -- where nothing can be written


def test_kernels_work_where_they_cannot_be_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a container under any user id, or with a read-only home."""
    (tmp_path / "__pycache__").touch()  # a file, where numba wants a folder
    module = tmp_path / "module.py"
    module.write_text(
        "from millstream.core.kernels import kernel\n\n@kernel\ndef double(number):\n    return 2 * number\n"
    )
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/dev/null")
    double = runpy.run_path(str(module))["double"]
    assert double(21) == 42 and double.stats.cache_path is None
