"""The small world that pages run in."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, unrendered_figures: None, roughly_measured_memory: None, quick_fits: None
) -> Path:
    from support.docs_world import make_world

    return make_world(tmp_path_factory.mktemp("docs") / "world")
