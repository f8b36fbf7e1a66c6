"""Weights and where training is, in one safetensors file: written whole or not at all, read without running code."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from millstream.errors import BadSource
from millstream.store.layout import publishing, sync_folder

ABOUT = "millstream"
OPTIMIZER = "optimizer."
_NOTHING_LEFT = "The checkpoint before it is kept; free some space and run the same command again"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
    """Tensors by name, and what else there is to know as JSON; no tensor is copied on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    whole = {name: tensors[name].detach().cpu().contiguous() for name in order}
    header: dict[str, object] = {"__metadata__": {ABOUT: json.dumps(about)}}
    at = 0
    for name, tensor in whole.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with publishing(path, _NOTHING_LEFT) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in whole.values():
            file.write(cast(bytes, tensor.reshape(-1).view(torch.uint8).numpy()))
    sync_folder(path.parent)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    with _opened(path) as file:
        tensors = {name: cast(Tensor, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        return tensors, cast("dict[str, object]", json.loads(file.metadata()[ABOUT]))


def load_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor, by name; no tensor is read."""
    with _opened(path) as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportUnknownVariableType]
            yield cast(Any, file)
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
