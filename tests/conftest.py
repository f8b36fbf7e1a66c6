"""Lets all tests import `commands`; long files first. With several processes on two cores torch's threads only wait."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Every process of a run imports all tests, whose assertions pytest rewrites: 8 s each, if nothing may be kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.path.insert(0, str(Path(__file__).parent))

# Files that take long, the longest first: begun last, one of them would keep a single core busy at the end.
LONG = (
    "docs/test_pages.py",
    "store/test_extract_ray.py",
    "docs/test_pages.py",
    "train/test_run.py",
    "test_examples.py",
    "store/test_pack.py",
    "train/test_processes.py",
    "train/test_resume.py",
    "test_demo.py",
    "train/test_read_resume.py",
    "train/test_classification.py",
    "store/test_extract.py",
    "source/test_pickles.py",
    "loader/test_memory.py",
    "store/test_reads_processes.py",
    "source/test_facts.py",
    "loader/test_loader.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
