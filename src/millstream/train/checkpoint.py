"""Weights and where training is, in one safetensors file: written whole or not at all, read without running code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from millstream.errors import BadSource, MissingExtra
from millstream.store.layout import publish

ABOUT = "millstream"
OPTIMIZER = "optimizer."


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Tensors by name, and what else there is to know as JSON."""
    try:
        from safetensors.torch import save as to_bytes
    except ImportError:
        raise MissingExtra("checkpoints need safetensors: pip install 'millstream[train]'") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    publish(path, to_bytes(whole, {ABOUT: json.dumps(about)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportUnknownVariableType]
            names = cast("list[str]", list(file.keys()))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            about = cast("dict[str, str]", file.metadata())  # pyright: ignore[reportUnknownMemberType]
            tensors = {name: cast(Tensor, file.get_tensor(name)) for name in names}  # pyright: ignore[reportUnknownMemberType]
            return tensors, cast("dict[str, object]", json.loads(about[ABOUT]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadSource(
            f"{path}: is no checkpoint of millstream, or damaged ({error}). Remove it and train again"
        ) from None


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, by its number."""
    state = cast("dict[int, dict[str, Tensor]]", optimizer.state_dict()["state"])
    return {f"{OPTIMIZER}{number}.{name}": value for number, values in state.items() for name, value in values.items()}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            number, key = name.removeprefix(OPTIMIZER).split(".")
            state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
