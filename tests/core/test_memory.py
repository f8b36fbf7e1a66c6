"""Memory of batches is reused, but never while a view of it is alive."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from millstream.core.memory import SMALL_BYTES, Map, OwnBlock, PageLimit, Pool, empty, file_bytes

pytestmark = pytest.mark.on_disk

MB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_returns_to_the_pool_when_its_last_view_is_gone():
    pool = Pool(10 * MB)
    first = pool.take(MB)
    place = address(first)
    view = first[5:].view(np.uint8)[::2].reshape(-1, 1)[3:]
    del first
    other = pool.take(MB)
    assert address(other) != place
    del view
    assert address(pool.take(MB)) == place


def test_a_torch_tensor_keeps_memory_leased_like_a_view():
    pool = Pool(10 * MB)
    with pool.use():
        array = empty((512, 512), "float32")
    place = address(array)
    part = torch.from_numpy(array)[100:200].view(-1)
    part.fill_(7)
    del array
    with pool.use():
        others = [empty((512, 512), "float32") for _ in range(3)]
    for other in others:
        other.fill(0)
    assert place not in map(address, others) and (part == 7).all()
    del part, other
    gc.collect()
    with pool.use():
        assert address(empty((512, 512), "float32")) == place


def test_arrays_have_the_requested_shape_and_dtype_and_are_writable():
    pool = Pool(100 * MB)
    with pool.use():
        for shape, dtype in (((300, 7, 11), "float64"), (123_457, "int16"), ((1_000, 0), "int8"), ((), "float32")):
            array = empty(shape, dtype)
            assert array.shape == ((shape,) if isinstance(shape, int) else shape) and array.dtype == np.dtype(dtype)
            array[...] = 3
            assert (array == 3).all() and array.flags.c_contiguous


def test_two_arrays_never_share_memory_while_both_live():
    pool = Pool(50 * MB)
    rng = np.random.default_rng(0)
    live: list[tuple[int, np.ndarray]] = []
    for mark in range(300):
        array = pool.take(int(rng.integers(SMALL_BYTES, MB)))
        array.fill(mark % 251)
        live.append((mark % 251, array))
        if len(live) > 12:
            live.pop(int(rng.integers(len(live))))
        assert all(array[0] == mark == array[-1] for mark, array in live)
    assert all((array == mark).all() for mark, array in live)


def test_batches_of_similar_sizes_reuse_the_same_memory():
    pool = Pool(100 * MB)
    places: set[int] = set()
    for size in (1_000_000, 990_000, 1_010_000, 1_000_001, 960_000):
        array = pool.take(size)
        assert array.nbytes == size
        places.add(address(array))
        del array
    assert len(places) == 1
    assert pool.held_bytes < 1.25 * MB


def test_small_arrays_and_arrays_outside_of_use_do_not_come_from_the_pool():
    pool = Pool(10 * MB)
    with pool.use():
        empty(SMALL_BYTES - 1, np.uint8)
        assert pool.held_bytes == 0
        kept = empty(SMALL_BYTES, np.uint8)
        assert pool.held_bytes >= SMALL_BYTES
    outside = empty(MB, np.uint8)
    assert pool.held_bytes < MB
    del kept, outside


def test_nested_use_restores_the_outer_pool():
    outer, inner = Pool(10 * MB), Pool(10 * MB)
    with outer.use():
        with inner.use():
            a = empty(MB, np.uint8)
        b = empty(2 * MB, np.uint8)
    assert inner.held_bytes == a.nbytes and outer.held_bytes == b.nbytes


def test_an_error_ends_the_use_of_a_pool():
    pool = Pool(10 * MB)

    def fail() -> None:
        with pool.use():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    array = empty(MB, np.uint8)
    assert pool.held_bytes == 0 < array.nbytes


def test_held_bytes_count_leased_and_unused_memory():
    pool = Pool(10 * MB)
    assert pool.held_bytes == 0
    one, two = pool.take(MB), pool.take(2 * MB)
    assert pool.held_bytes == 3 * MB
    del one
    assert pool.held_bytes == 3 * MB
    pool.limit = 0
    assert pool.held_bytes == 2 * MB
    del two
    pool.limit = 0
    assert pool.held_bytes == 0


def test_unused_memory_is_freed_to_stay_within_the_limit():
    pool = Pool(8 * MB)
    for size in (1, 2, 4, 7, 1, 3, 6, 5, 8):
        array = pool.take(size * MB)
        assert pool.held_bytes <= 8 * MB
        del array
    assert pool.held_bytes <= 8 * MB


def test_leased_memory_is_never_refused_or_freed_because_of_the_limit():
    pool = Pool(2 * MB)
    arrays = [pool.take(MB) for _ in range(4)]
    for mark, array in enumerate(arrays):
        array.fill(mark)
    assert pool.held_bytes == 4 * MB
    assert all((array == mark).all() for mark, array in enumerate(arrays))


def test_memory_returned_beyond_the_limit_is_freed():
    pool = Pool(2 * MB)
    arrays = [pool.take(MB) for _ in range(4)]
    del arrays
    pool.take(MB)
    assert pool.held_bytes <= 2 * MB


def test_unused_memory_of_other_sizes_does_not_accumulate():
    pool = Pool(1_000 * MB)
    for size in range(1, 60):
        array = pool.take(size * MB)
        del array
    assert pool.held_bytes <= 80 * MB  # one of the largest, and not all of them


def test_a_block_that_another_process_still_uses_is_not_leased_again():
    class Away(OwnBlock):
        is_away = True

    made: list[Away] = []

    def make(size: int) -> Away:
        made.append(Away(size))
        return made[-1]

    pool = Pool(10 * MB, make)
    first = pool.take(MB)
    place = address(first)
    del first
    second = pool.take(MB)
    assert address(second) != place and pool.held_bytes == 2 * MB
    made[0].is_away = False
    assert address(pool.take(MB)) == place


def test_threads_take_and_return_without_ever_sharing():
    pool = Pool(64 * MB)
    start = threading.Barrier(4)

    def work(mark: int) -> bool:
        rng = np.random.default_rng(mark)
        start.wait()
        held: list[np.ndarray] = []
        for _ in range(150):
            with pool.use():
                array = empty(int(rng.integers(SMALL_BYTES, 4 * SMALL_BYTES)), np.uint8)
            array.fill(mark)
            held.append(array)
            if len(held) > 3 and not (held.pop(0) == mark).all():
                return False
        return all((array == mark).all() for array in held)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 5)))
    gc.collect()
    assert pool.held_bytes <= 64 * MB
    pool.limit = 0
    assert pool.held_bytes == 0


def test_a_thread_uses_its_own_pool_only():
    pool = Pool(10 * MB)
    with pool.use(), ThreadPoolExecutor(1) as threads:
        array = threads.submit(empty, MB, np.uint8).result()
        assert pool.held_bytes == 0
    del array


def test_memory_dropped_in_another_thread_returns_to_the_pool():
    pool = Pool(10 * MB)
    box = [pool.take(MB)]
    place = address(box[0])
    worker = threading.Thread(target=box.clear)
    worker.start()
    worker.join()
    assert address(pool.take(MB)) == place


def test_pages_of_caches_beyond_the_limit_are_dropped_and_read_the_same_again(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (64 * MB // 256))
    limit = PageLimit(16 * MB)
    cache = Map(path, is_cache=True)
    before = file_bytes()
    total = int(cache.view.sum(dtype=np.int64))
    assert file_bytes() - before > 48 * MB
    limit.enforce()
    assert file_bytes() - before < 8 * MB
    assert int(cache.view.sum(dtype=np.int64)) == total


def test_pages_below_the_limit_and_those_of_other_maps_are_kept(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MB))
    limit, other = PageLimit(8 * MB), Map(path)
    other.view[:10] = 7  # copy-on-write: dropping the page would lose it
    other.view.sum()
    limit.enforce()
    assert other.view[:10].tolist() == [7] * 10


def test_what_kernels_take_when_they_are_compiled_is_not_taken_from_the_budget():
    code = """
        import numpy as np
        from millstream.core.memory import Allowance

        MB = 1 << 20
        allowance = Allowance("100MB")
        before = allowance.num_bytes
        Allowance.begin_compiling()
        taken = np.ones(40 * MB, np.uint8)
        assert abs(allowance.num_bytes - before - 40 * MB) < 8 * MB, "while it is compiled"
        assert abs(Allowance("100MB").num_bytes - allowance.num_bytes) < 32 * MB, "it is in use already"
        Allowance.end_compiling()
        kept = allowance.num_bytes
        assert abs(kept - before - 40 * MB) < 8 * MB, "what it keeps"
        del taken
        assert allowance.num_bytes == kept
        assert abs(Allowance("100MB").num_bytes - before) < 32 * MB
    """
    # On its own: other tests free memory at any time.
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)


def test_a_first_run_that_compiles_kernels_stays_within_the_budget(tmp_path: Path):
    """Numba sets up its compiler before the first kernel, which takes 60 MB, and keeps what it compiles."""
    code = """
        import numpy as np
        from millstream.core.memory import Allowance
        from millstream.reads.tokenizers import tokenizer

        allowance = Allowance("8MB")
        tokenizer("base").tokenize(np.full(8, 65, np.uint8), np.array([0, 8]))
        used, limit = allowance.usage()
        assert used <= limit, (used, limit)
    """
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", dedent(code)], env=environment, check=True)


def test_dropping_pages_beyond_the_end_of_a_file_touches_nothing_else(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(MB))
    dropped: list[tuple[int, int]] = []
    cache = Map(path)
    cache._mapping.advise = lambda offset, size, advice: dropped.append((offset, size))  # pyright: ignore
    cache.drop(MB - 10, 2 * MB)
    cache.drop(3 * MB, 4 * MB)
    assert all(offset + max(size, 0) <= MB or size <= 0 for offset, size in dropped) and len(dropped) == 2
