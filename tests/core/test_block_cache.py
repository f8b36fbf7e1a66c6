"""The block cache: exact ranges, bounded in bytes, safe against damage, kills, full disks and other processes."""

import os
import random
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.core.block_cache import BLOCK_BYTES, BlockCache, CacheSettings

DATA = random.Random(1).randbytes(BLOCK_BYTES + 12_345)


def cache_in(folder: Path, num_bytes: int = 1 << 30) -> BlockCache:
    return BlockCache(CacheSettings(num_bytes, folder))


def put(cache: BlockCache, start: int, end: int, name: str = "ab" * 20) -> None:
    cache.write(name, start, memoryview(DATA)[start:end])


def got(cache: BlockCache, start: int, end: int, *, verify: bool = True, name: str = "ab" * 20):
    """What is missing of a range; what is there is right."""
    out = bytearray(end - start)
    gaps = cache.read(name, start, memoryview(out), verify=verify)
    at = start
    for a, b in [*gaps, (end, end)]:
        assert out[at - start : a - start] == DATA[at:a]
        at = b
    return gaps


def disk_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # another process has just removed it
            total += file.stat().st_size
    return total


def test_exactly_what_was_written_is_there(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    assert got(cache, 0, 100) == [(0, 100)]
    put(cache, 10, 30)
    put(cache, 50, 60)
    assert got(cache, 0, 100) == [(0, 10), (30, 50), (60, 100)]
    assert got(cache, 12, 25) == []


@pytest.mark.parametrize("seed", range(6))
def test_random_ranges_are_right_in_this_and_in_a_new_cache(tmp_path: Path, seed: int) -> None:
    rng, cache, there = random.Random(seed), cache_in(tmp_path), bytearray(len(DATA))
    for _ in range(20):
        start = rng.randrange(len(DATA) - 1)
        end = min(start + rng.choice([1, 100, 5_000, BLOCK_BYTES]), len(DATA))
        if rng.random() < 0.5:
            put(cache, start, end)
            there[start:end] = b"\1" * (end - start)
        for reader in (cache, cache_in(tmp_path)):
            gaps = got(reader, start, end, verify=rng.random() < 0.5)
            found = bytearray(b"\1" * (end - start))
            for a, b in gaps:
                found[a - start : b - start] = bytes(b - a)
            assert found == there[start:end]


def test_a_flipped_bit_is_never_served(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    put(cache, 0, 1000)
    (file,) = tmp_path.rglob("*.0")
    data = bytearray(file.read_bytes())
    for at in range(16, len(data), 7):  # before that are the random bytes that tell files apart
        file.write_bytes(bytes([*data[:at], data[at] ^ 4, *data[at + 1 :]]))
        assert got(cache_in(tmp_path), 0, 1000) == [(0, 1000)]
        file.write_bytes(data)
    assert got(cache_in(tmp_path), 0, 1000) == []


def test_what_a_killed_writer_left_is_ignored_and_then_cut_off(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    put(cache, 0, 1000)
    (file,) = tmp_path.rglob("*.0")
    whole = file.read_bytes()
    for kept in (1, 35, 36, 500):
        file.write_bytes(whole + whole[16 : 16 + kept])
        assert got(cache_in(tmp_path), 0, 2000) == [(1000, 2000)]
        put(cache_in(tmp_path), 1000, 2000)
        assert got(cache_in(tmp_path), 0, 2000) == []


def test_it_never_takes_more_than_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, num_bytes=10_000)
    for number in range(50):
        put(cache, 0, 900, name=f"{number:040}")
        assert disk_bytes(tmp_path) <= 10_000
        os.utime(next(tmp_path.rglob(f"{number:038}.0")), (number, number))
    assert got(cache, 0, 900, name=f"{49:040}") == []
    assert got(cache, 0, 900, name=f"{0:040}") == [(0, 900)]


def test_a_count_that_was_lost_is_made_again(tmp_path: Path) -> None:
    put(cache_in(tmp_path, num_bytes=10_000), 0, 5000)
    (tmp_path / "size").write_text("")
    cache = cache_in(tmp_path, num_bytes=10_000)
    put(cache, 5000, 9000)
    put(cache, 9000, 9900)
    assert disk_bytes(tmp_path) <= 10_000


def _fill(folder: Path, seed: int) -> None:
    rng, cache = random.Random(seed), cache_in(folder, num_bytes=400_000)
    for _ in range(200):
        start = rng.randrange(len(DATA) - 20_000)
        put(cache, start, start + rng.randrange(1, 20_000))
        assert disk_bytes(folder) <= 400_000
        got(cache, start, start + 20_000)


def test_two_processes_fill_it_at_once_within_one_limit(tmp_path: Path) -> None:
    pids = []
    for seed in (1, 2):
        if not (pid := os.fork()):
            status = 1
            try:
                _fill(tmp_path, seed)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]


def test_a_folder_that_cannot_be_written_is_told_once_and_reading_goes_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    cache = cache_in(tmp_path / "file" / "cache")
    put(cache, 0, 100)
    put(cache, 0, 100)
    assert got(cache, 0, 100) == [(0, 100)]
    assert capsys.readouterr().err.count("cannot be used as a cache") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_leaves_no_piece_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_in(tmp_path)
    put(cache, 0, 100)

    def full(fd: int, parts: list[memoryview], at: int) -> int:
        os.pwrite(fd, bytes(parts[0]), at)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        put(cache, 100, 200)
    assert got(cache_in(tmp_path), 0, 200) == [(100, 200)]
