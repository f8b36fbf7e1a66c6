"""Lightning Fabric carries devices, processes and precision; this is all that is asked of it."""

import os
import warnings
from typing import Any

from millstream.errors import BadSetting, MissingExtra
from millstream.train.settings import LoopSettings


def make_fabric(settings: LoopSettings) -> Any:
    """Processes are started (or joined, under torchrun) by `launch`: with devices=2, this command runs twice."""
    try:
        from lightning_fabric import Fabric
    except ImportError:
        raise MissingExtra("training needs lightning-fabric: pip install 'millstream[train]'") from None
    import torch

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
