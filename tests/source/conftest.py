"""Lets the tests here import their neighbours, and keeps the tiny language models of a session."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    import torch
    from tiny_models import TinyModels

    torch.set_num_threads(1)  # on models this small, threads only wait for each other
    return TinyModels(tmp_path_factory.mktemp("tiny_models"))
