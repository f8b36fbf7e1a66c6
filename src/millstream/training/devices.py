"""Where models are trained and score: Lightning Fabric, or a device alone, and the threads of torch."""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millstream.core.engine import available_cores
from millstream.errors import BadSetting, MissingExtra
from millstream.training import LoopSettings


def make_fabric(settings: LoopSettings) -> Any:
    """The Fabric of a run. `launch` starts processes (or joins them, under torchrun): with devices=2, two run this.

    `devices` are those of one machine; torchrun tells how many machines there are.
    """
    try:
        from lightning_fabric import Fabric
    except ImportError:
        raise MissingExtra("training needs lightning-fabric: pip install 'millstream[train]'") from None
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it logs every process
    cuda = _uses_cuda(settings)
    told = dict(os.environ) if "TORCHELASTIC_RUN_ID" in os.environ else dict[str, str]()  # by torchrun
    num_nodes = int(told.get("WORLD_SIZE", 1)) // int(told.get("LOCAL_WORLD_SIZE", 1))
    if settings.batch_size % (settings.devices * num_nodes):
        raise BadSetting(
            f"batch_size={settings.batch_size}: must be a multiple of devices={settings.devices} times {num_nodes} "
            "machines"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about devices that are not used
        try:
            fabric = Fabric(
                accelerator=settings.accelerator if cuda or settings.accelerator != "auto" else "cpu",
                devices=settings.devices,
                num_nodes=num_nodes,
                strategy="ddp" if settings.devices * num_nodes > 1 else "auto",
                precision=precision_of(settings),  # pyright: ignore[reportArgumentType]
            )
        except (ValueError, RuntimeError) as error:
            given = f"accelerator={settings.accelerator} devices={settings.devices} precision={settings.precision}"
            raise BadSetting(f"{given}: {error}") from None
        fabric.launch()  # pyright: ignore[reportUnknownMemberType]
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif not cuda:
        _leave_a_core(settings.devices)
    return fabric


def precision_of(settings: LoopSettings) -> str:
    """The precision of these settings on this machine."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16-mixed" if _uses_cuda(settings) else "32-true"


def _uses_cuda(settings: LoopSettings) -> bool:
    return torch.cuda.is_available() and settings.accelerator in ("auto", "gpu", "cuda")


@dataclass(frozen=True)
class ScoringDevice:
    """The part of a Fabric that scoring needs: importing Lightning takes seconds."""

    device: torch.device

    @staticmethod
    def default() -> "ScoringDevice":
        is_cuda = torch.cuda.is_available()
        if not is_cuda:
            _leave_a_core()
        return ScoringDevice(torch.device("cuda" if is_cuda else "cpu"))

    def to_device(self, batch: Mapping[str, object]) -> dict[str, Tensor]:
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return {name: value.to(self.device) for name, value in tensors.items()}


def _leave_a_core(num_processes: int = 1) -> None:
    """Leave a core to the loader: waiting torch threads spin, so two of them are slower than one (measured)."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // num_processes - 1))
