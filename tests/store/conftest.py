"""Lets the store's tests import `making` and the tiny models; pytest's importlib mode leaves sys.path alone."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "source"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of three layers and 128 tokens."""
    import torch
    from tiny_models import make_model

    torch.set_num_threads(1)  # on a model this small, threads only wait for each other
    return make_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of reads build thousands of small indexes; that each is on the disk matters after a power cut only."""
    if request.path.name.startswith(("test_reads", "test_pack", "test_unpack")):
        monkeypatch.setattr(os, "fsync", lambda fd: None)
