"""Lets the store's tests import `making`; pytest's importlib mode leaves sys.path alone."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of reads build thousands of small indexes; that each is on the disk matters after a power cut only."""
    if request.path.name.startswith(("test_reads", "test_pack", "test_unpack")):
        monkeypatch.setattr(os, "fsync", lambda fd: None)
