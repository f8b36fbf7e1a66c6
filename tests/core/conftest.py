"""Lets the tests here import `loading` and the store's `making`, and gives them one small store and two read files."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "store"):
    sys.path.insert(0, str(folder))
settings.register_profile("loader", deadline=None)
settings.load_profile("loader")

import loading  # noqa: E402

import millstream as ms  # noqa: E402


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    """Traces 0 to 100 in shards of 17."""
    return loading.write_traces(tmp_path_factory.mktemp("traces") / "store", range(101))


@pytest.fixture(scope="session", params=["reads.fa", "reads.fa.gz"])
def reads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    """Reads 0 to 59,999: three stretches of a megabyte, the least that is decoded at once."""
    return loading.write_reads(tmp_path_factory.mktemp("reads") / request.param, 60_000)
