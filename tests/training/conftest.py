"""Lets the tests here import `making_traces` and `training`, and makes one store for all of them."""

import sys
from pathlib import Path

import pytest

from extras import need

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "model")]
need("lightning_fabric", "torch_geometric")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from making_traces import make_traces

    return make_traces(tmp_path_factory.mktemp("train") / "traces", num=160)
