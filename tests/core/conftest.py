"""One small store and two read files for the tests of the engine."""

import pytest

import millstream as ms
from support import loading


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    """Traces 0 to 100 in shards of 17."""
    return loading.write_traces(tmp_path_factory.mktemp("traces") / "store", range(101))


@pytest.fixture(scope="session", params=["reads.fa", "reads.fa.gz"])
def reads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    """Reads 0 to 59,999: three blocks of a megabyte, the smallest unit that is decoded."""
    return loading.write_reads(tmp_path_factory.mktemp("reads") / request.param, 60_000)
