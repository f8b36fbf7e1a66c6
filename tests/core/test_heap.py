"""Freed memory returns to the system, but not what the next step takes again."""

from collections.abc import Iterable

import pytest

from millstream.core import memory
from millstream.core.memory import Heap

SLACK = 100


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """When memory was trimmed: the number of bytes."""
    found: list[int] = []
    monkeypatch.setattr(memory, "trim_malloc", lambda: found.append(memory.resident_bytes()))
    return found


def steps_with(heap: Heap, sizes: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for size in sizes:
        monkeypatch.setattr(memory, "resident_bytes", lambda size=size: size)
        heap.trim_malloc()


def heap_at(size: int, monkeypatch: pytest.MonkeyPatch) -> Heap:
    monkeypatch.setattr(memory, "resident_bytes", lambda: size)
    return Heap(SLACK)


def test_memory_is_trimmed_when_it_has_grown_by_the_slack(trims: list[int], monkeypatch: pytest.MonkeyPatch):
    steps_with(heap_at(1000, monkeypatch), [1050, 1100, 1101], monkeypatch)
    assert trims == [1101]


def test_what_each_step_takes_again_is_not_trimmed_again(trims: list[int], monkeypatch: pytest.MonkeyPatch):
    steps_with(heap_at(1000, monkeypatch), [1500] * 20, monkeypatch)
    assert trims == [1500]


def test_memory_that_keeps_growing_is_trimmed_again_and_again(trims: list[int], monkeypatch: pytest.MonkeyPatch):
    steps_with(heap_at(1000, monkeypatch), range(1000, 3000, 50), monkeypatch)
    assert len(trims) > 5
