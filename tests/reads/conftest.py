"""What the tests of reads share."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests build thousands of small indexes; that each is on the disk matters after a power cut only."""
    if request.path.parent.name in ("files", "pack"):
        monkeypatch.setattr(os, "fsync", lambda fd: None)
