"""Rows that arrive in any order, from workers that die, are written in order, and what has arrived is kept."""

import gzip
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.core.engine import Engine
from millstream.errors import StoreExists
from millstream.reads.classify import classify
from support.classifying import make_run

SMALL: dict[str, Any] = {"batch_size": 32, "chunk_reads": 64, "save_s": 0.0}


class Shuffled(Engine):
    """An engine whose results arrive in a random order, `ahead` jobs at a time; notes the jobs that were begun."""

    ahead = 5

    def __init__(self, seed: int) -> None:
        super().__init__("ray")
        object.__setattr__(self, "rng", np.random.default_rng(seed))
        object.__setattr__(self, "begun", [])

    def run(self, make: Callable[[], Any], jobs: Iterable[Any], **_: object) -> Iterator[Any]:  # pyright: ignore
        worker, left, taken = make(), iter(jobs), list[Any]()
        rng, begun = self.rng, self.begun  # type: ignore[attr-defined]
        while True:
            while len(taken) < self.ahead and (job := next(left, None)) is not None:
                taken.append(job)
                begun.append(job)
            if not taken:
                return
            yield worker.do(taken.pop(int(rng.integers(len(taken)))))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    return make_run(tmp_path_factory.mktemp("chunks"))


@pytest.fixture(scope="module")
def whole(made: tuple[list[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows and the report of one process."""
    path = tmp_path_factory.mktemp("whole")
    files, run = made
    classify(run, files, path / "out.tsv.gz", report=path / "out.rep", **SMALL)
    return path


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_arrive_in_any_order_are_written_in_order(
    made: tuple[list[Path], Path], whole: Path, tmp_path: Path, seed: int
):
    files, run = made
    engine: Any = Shuffled(seed)
    done = classify(run, files, tmp_path / "out.tsv.gz", report=tmp_path / "out.rep", engine=engine, **SMALL)
    assert (done.num_reads, done.num_resumed) == (900, 0)
    assert sorted(engine.begun) == [(first, min(first + 64, 900)) for first in range(0, 900, 64)]
    for name in ("out.tsv.gz", "out.rep", "out.abundance.tsv"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    names = [".out.tsv.gz.done", "out.abundance.tsv", "out.rep", "out.tsv.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_rows_on_stdout_are_in_order_too(made: tuple[list[Path], Path], whole: Path, capfdbinary: Any):
    files, run = made
    classify(run, files, "-", engine=Shuffled(0), **SMALL)
    assert capfdbinary.readouterr().out == gzip.decompress((whole / "out.tsv.gz").read_bytes())


def killed_after(results: int, run: Path, files: list[Path], out: Path, engine: Any) -> list[Any]:
    """Classify in a child process that is killed when it asks for one more result; the jobs that had arrived."""
    arrived, sent = os.pipe()
    child = os.fork()
    if not child:
        try:
            deliver = engine.run

            def deliver_some(make: Any, jobs: Any) -> Iterator[Any]:
                for number, rows in enumerate(deliver(make, jobs)):
                    if number == results:
                        os.kill(os.getpid(), signal.SIGKILL)
                    os.write(sent, f"{rows.first} {rows.last}\n".encode())
                    yield rows

            object.__setattr__(engine, "run", deliver_some)
            classify(run, files, out, engine=engine, **SMALL)
        finally:
            os._exit(1)
    os.close(sent)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with os.fdopen(arrived) as lines:
        return [tuple(map(int, line.split())) for line in lines]


@pytest.mark.parametrize("then", ["ray", "local"])
def test_what_has_arrived_when_the_driver_is_killed_is_not_classified_again(
    made: tuple[list[Path], Path], whole: Path, tmp_path: Path, then: str
):
    files, run = made
    out, arrived = tmp_path / "out.tsv.gz", list[Any]()
    for seed, results in enumerate((1, 3, 4)):
        arrived += killed_after(results, run, files, out, Shuffled(seed))
    assert len(arrived) == len(set(arrived)) == 8
    assert not out.exists()
    engine: Any = Shuffled(9) if then == "ray" else Engine()
    done = classify(run, files, out, engine=engine, **SMALL)
    if then == "ray":
        assert not set(engine.begun) & set(arrived) and len(engine.begun) + 8 == 15
    assert out.read_bytes() == (whole / "out.tsv.gz").read_bytes()
    assert done.num_rows == 900 and not list(tmp_path.glob("*.partial"))


def test_after_ctrl_c_the_chunks_in_progress_still_count(made: tuple[list[Path], Path], whole: Path, tmp_path: Path):
    files, run = made
    out, engine, calls = tmp_path / "out.tsv.gz", Shuffled(1), iter(range(8))
    stopped: Any = classify(run, files, out, engine=engine, stop=lambda: next(calls, None) is None, **SMALL)
    begun: list[Any] = engine.begun  # type: ignore[attr-defined]
    assert stopped.interrupted and len(begun) == 8
    again: Any = Shuffled(2)
    assert classify(run, files, out, engine=again, **SMALL).num_rows == 900
    assert not set(again.begun) & set(begun)
    assert out.read_bytes() == (whole / "out.tsv.gz").read_bytes()


def test_force_starts_over(made: tuple[list[Path], Path], whole: Path, tmp_path: Path):
    files, run = made
    out = tmp_path / "out.tsv.gz"
    killed_after(4, run, files, out, Shuffled(0))
    engine: Any = Shuffled(1)
    classify(run, files, out, engine=engine, force=True, **SMALL)
    assert len(engine.begun) == 15 and out.read_bytes() == (whole / "out.tsv.gz").read_bytes()
    with pytest.raises(StoreExists):
        classify(run, files[:1], out, engine=engine, **SMALL)
