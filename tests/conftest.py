"""Fixtures of all tests; slow files run first."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

from support.browser import browser, open_page, serve_views
from support.cloud_servers import azure_address, cloud, google_address
from support.effort import num_examples
from support.faulty_proxy import proxy
from support.forked_training import processes
from support.http_server import web
from support.model_server import model_server
from support.nursery import close_nursery, nursery, open_nursery
from support.s3_server import s3, s3_address
from support.temporary import disk, use_memory

os.environ.setdefault("OMP_NUM_THREADS", "1")  # with a test process on every core, more threads only wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Every process of a run imports all tests, whose assertions pytest rewrites: 8 s each without cached bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
use_memory()
gc.disable()  # until all tests are imported: what that makes stays

__all__ = [
    "azure_address",
    "browser",
    "cloud",
    "google_address",
    "model_server",
    "nursery",
    "open_page",
    "processes",
    "proxy",
    "s3",
    "s3_address",
    "serve_views",
    "web",
]

# No deadline: the first call of a kernel compiles it. No database: a failure prints the code that repeats it.
settings.register_profile("suite", max_examples=num_examples(100), deadline=None, database=None, print_blob=True)
settings.load_profile("suite")

# Slow files, the slowest first: started last, one of them would keep a single core busy at the end. Pages come after
# the first file has compiled the kernels of reads: in a new checkout two processes would compile the same ones.
LONG = (
    "test_ray.py",
    "test_ray_nodes.py",
    "training/test_remote_run.py",
    "traces/test_extract.py",
    "docs/test_pages.py",
    "traces/store/test_kill.py",
    "reads/files/test_reads_bad.py",
    "training/test_resume.py",
    "traces/store/test_faults.py",
    "training/test_run.py",
    "classic/test_pickles.py",
    "core/test_memory_budget.py",
    "traces/store/test_native.py",
    "cli/test_again.py",
    "reads/test_study.py",
    "core/test_frameworks.py",
    "reads/files/test_reads.py",
    "traces/store/test_remote_writer.py",
    "core/test_torchrun.py",
    "core/test_torch_data.py",
    "classic/test_preprocessed_datasets.py",
    "reads/test_classify.py",
    "reads/test_remote.py",
    "test_examples.py",
    "traces/llm/test_tracer.py",
    "traces/view/test_browser.py",
    "reads/test_resume.py",
    "training/test_processes.py",
    "classic/test_sequence_datasets.py",
    "reads/test_single.py",
    "traces/store/test_slices.py",
    "reads/pack/test_pack.py",
    "classic/test_baseline.py",
    "demo/test_stories.py",
    "reads/classifiers/test_nets.py",
    "reads/files/test_reads_processes.py",
    "traces/store/test_locks.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    freeze_modules()
    open_nursery()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # tests make objects by the million, and few cycles


def pytest_sessionfinish() -> None:
    close_nursery()


_frozen = 0  # modules


def freeze_modules() -> None:
    """Imported modules stay: without freezing, each garbage collection would look through them for half a second."""
    global _frozen
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = count_frozen
    _frozen = len(sys.modules)


def count_frozen() -> int:
    """Some: counting a million takes 35 ms. `train` asks whether there are any when it has imported what it needs."""
    freeze_new_modules()
    return 1


def freeze_new_modules() -> None:
    if len(sys.modules) > _frozen + 10:
        freeze_modules()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    freeze_new_modules()


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of a test: in memory, unless it is marked `on_disk`."""
    if request.node.get_closest_marker("on_disk") is None:
        yield tmp_path
        return
    with TemporaryDirectory(dir=disk()) as folder:
        yield Path(folder).resolve()


@pytest.fixture(autouse=True)
def own_cache_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ms.open(cache=...)` sets them for the process: for no test but its own. Nothing gets into the user's cache."""
    monkeypatch.setenv("MILLSTREAM_CACHE", "")
    monkeypatch.delenv("MILLSTREAM_CACHE")
    for name in ("MILLSTREAM_CACHE_DIR", "MILLSTREAM_SPOOL_DIR"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / name))


@pytest.fixture(scope="module")
def unrendered_figures() -> Iterator[None]:
    """Reports are written, but without rendering their figures, which takes most of the time.

    tests/report, tests/traces/report, tests/reads/report and tests/test_examples.py look at real ones.
    """
    from matplotlib.figure import Figure

    def savefig(self: Figure, file: Any, *, format: str, **options: object) -> None:
        file.write('<svg viewBox="0 0 1 1"></svg>' if format == "svg" else b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture(scope="module")
def roughly_measured_memory() -> Iterator[None]:
    """The memory of this process is what is resident: looking at each page takes a fifth of the time of training.

    tests/core/test_memory.py and tests/core/test_memory_budget.py measure it as users do.
    """
    from millstream.core import memory
    from millstream.training import loop

    with pytest.MonkeyPatch.context() as patch:
        for place in (memory, loop):
            patch.setattr(place, "tree_bytes", lambda pid=None: memory.resident_bytes())
        yield


@pytest.fixture(scope="module")
def quick_fits() -> Iterator[None]:
    """Regressions and calibrations take a fifth of their steps: what matters is what becomes of the models.

    tests/traces/detectors and tests/reads/classifiers look at how well they are fitted.
    """
    from millstream.reads.classifiers import exact
    from millstream.traces.detectors import regressions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "STEPS", exact.STEPS // 5)
        patch.setattr(regressions, "_NUM_STEPS", regressions._NUM_STEPS // 5)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """Tiny language models of several architectures, each made when it is first needed."""
    import torch

    from support.tiny_models import TinyModels

    torch.set_num_threads(1)  # on models this small, threads only wait for each other
    return TinyModels(tmp_path_factory.mktemp("tiny_models"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama of three layers and 128 tokens."""
    import torch

    from support.tiny_models import make_model

    torch.set_num_threads(1)
    return make_model("llama", tmp_path_factory.mktemp("tiny"))
