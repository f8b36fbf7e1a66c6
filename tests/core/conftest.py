"""Small stores and read files for the tests of the engine."""

from pathlib import Path

import pytest

import millstream as ms
from support import loading, making_small


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    """Traces 0 to 100 in shards of 17."""
    return loading.write_traces(tmp_path_factory.mktemp("traces") / "store", range(101))


@pytest.fixture(scope="session", params=["reads.fa", "reads.fa.gz"])
def reads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    """Reads 0 to 59,999: three blocks of a megabyte, the smallest unit that is decoded."""
    return loading.write_reads(tmp_path_factory.mktemp("reads") / request.param, 60_000)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collections")


@pytest.fixture(scope="session")
def trivia(folder: Path) -> ms.Traces:
    return making_small.write_traces(folder / "trivia", [f"q{number}" for number in range(100)])


@pytest.fixture(scope="session")
def popqa(folder: Path) -> ms.Traces:
    return making_small.write_traces(folder / "popqa", [f"p{number}" for number in range(200, 240)])


@pytest.fixture(scope="session")
def few_reads(folder: Path) -> ms.Reads:
    return making_small.write_reads(folder / "reads.fa", range(80))


@pytest.fixture(scope="session")
def more_reads(folder: Path) -> ms.Reads:
    return making_small.write_reads(folder / "more.fa", range(1_000, 1_060))
