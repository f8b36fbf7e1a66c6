"""Lets the tests here import their neighbours, and makes the small world that pages run in."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from docs_world import make_world

    return make_world(tmp_path_factory.mktemp("docs") / "world")
