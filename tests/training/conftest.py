"""One store for all tests of training."""

from pathlib import Path

import pytest

from support.extras import need

need("lightning_fabric")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.making_traces import make_traces

    return make_traces(tmp_path_factory.mktemp("train") / "traces", num=160)
