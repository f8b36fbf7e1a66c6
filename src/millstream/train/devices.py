"""Lightning Fabric carries devices, processes and precision; this is all that is asked of it."""

import logging
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from millstream.errors import BadSetting, MissingExtra
from millstream.train.settings import LoopSettings


def make_fabric(settings: LoopSettings) -> Any:
    """Processes are started (or joined, under torchrun) by `launch`: with devices=2, this command runs twice."""
    try:
        with _torchmetrics_unread():
            from lightning_fabric import Fabric
    except ImportError:
        raise MissingExtra("training needs lightning-fabric: pip install 'millstream[train]'") from None
    import torch

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces every process
    cuda = torch.cuda.is_available() and settings.accelerator in ("auto", "gpu", "cuda")
    precision = ("bf16-mixed" if cuda else "32-true") if settings.precision == "auto" else settings.precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of devices that are there and not used
        try:
            fabric = Fabric(
                accelerator=settings.accelerator if cuda or settings.accelerator != "auto" else "cpu",
                devices=settings.devices,
                strategy="ddp" if settings.devices > 1 else "auto",
                precision=precision,  # pyright: ignore[reportArgumentType]
            )
        except (ValueError, RuntimeError) as error:
            asked = f"accelerator={settings.accelerator} devices={settings.devices} precision={settings.precision}"
            raise BadSetting(f"{asked}: {error}") from None
        fabric.launch()  # pyright: ignore[reportUnknownMemberType]
    if not cuda and "OMP_NUM_THREADS" not in os.environ:
        # One core for the loader: torch's threads wait by spinning, and beside it two are slower than one (measured).
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.devices - 1))
    return fabric


@contextmanager
def _torchmetrics_unread() -> Generator[None]:
    """To see the version of torchmetrics Fabric imports it, and with it scipy, matplotlib and transformers: for 3 s."""
    name = "torchmetrics"
    if name in sys.modules or find_spec(name) is None:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.__dict__["__version__"] = version(name)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
