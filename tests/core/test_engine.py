"""The local engine does jobs in this process, one after the other, when needed."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from millstream.core.engine import Engine
from millstream.errors import BadSetting, BadSource, MissingExtra
from support.effort import PATIENCE_S
from support.extras import need


class Doubler:
    """A worker that notes what happens to it."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        notes.append("made")

    def do(self, job: int) -> int:
        if job < 0:
            raise BadSource(f"{job}: too little")
        self.notes.append(f"do {job}")
        return 2 * job

    def close(self) -> None:
        self.notes.append("closed")


@pytest.fixture
def notes() -> list[str]:
    return []


def test_a_local_engine_does_all_jobs_in_order_with_one_worker_and_closes_it(notes: list[str]):
    assert list(Engine().run(lambda: Doubler(notes), [3, 1, 2])) == [6, 2, 4]
    assert notes == ["made", "do 3", "do 1", "do 2", "closed"]


def test_workers_and_jobs_are_lazy(notes: list[str]):
    results = Engine().run(lambda: Doubler(notes), iter([3, 1, 2]))
    assert notes == []
    assert next(results) == 6
    assert notes == ["made", "do 3"]


def test_stopping_early_closes_the_worker(notes: list[str]):
    results = Engine().run(lambda: Doubler(notes), [3, 1, 2])
    next(results)
    results.close()
    assert notes == ["made", "do 3", "closed"]


def test_an_error_in_a_worker_is_raised_and_the_worker_is_closed(notes: list[str]):
    results = Engine().run(lambda: Doubler(notes), [3, -1, 2])
    assert next(results) == 6
    with pytest.raises(BadSource, match="-1: too little"):
        next(results)
    assert notes == ["made", "do 3", "closed"]


def test_map_is_lazy_and_keeps_the_order_of_the_items():
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(4):
            taken.append(item)
            yield item

    results = Engine().map(lambda item: item * item, items())
    assert next(results) == 0
    assert taken == [0]
    assert list(results) == [1, 4, 9]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("spark",), "spark"),
        (("local", None, 2), "--engine ray"),
        (("local", "auto"), "--engine ray"),
        (("ray", None, 0), "--workers 0"),
    ],
    ids=["name", "workers", "address", "count"],
)
def test_a_bad_engine_setting_is_an_error(wrong: tuple[object, ...], said: str):
    with pytest.raises(BadSetting, match=said):
        Engine(*wrong)  # pyright: ignore[reportArgumentType]


def test_a_missing_ray_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch, notes: list[str]):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[ray\]'"):
        next(Engine("ray").run(lambda: Doubler(notes), [1]))
    assert notes == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run([sys.executable, "-c", code], env=ours, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_ray_that_would_listen_on_all_interfaces_is_refused():
    need("ray")
    done = run_python("import ray; from millstream.core.engine import Engine; list(Engine('ray').map(abs, [1]))")
    assert done.returncode == 1 and "EngineError" in done.stderr and "ray.init()" in done.stderr
