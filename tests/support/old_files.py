"""Old traces and files as the scripts wrote them, and torch_geometric's graphs without torch_geometric."""

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

L, H, D = 3, 2, 8  # layers, heads, hidden size
RNG = np.random.default_rng(7)


class DataEdgeAttr:
    pass


class DataTensorAttr:
    pass


class GlobalStorage:
    def __init__(self, parent: object, mapping: dict[str, object]) -> None:
        self._mapping = mapping
        self._parent = parent


class Data:
    def __init__(self, **fields: object) -> None:
        self._edge_attr_cls = DataEdgeAttr
        self._tensor_attr_cls = DataTensorAttr
        self._store = GlobalStorage(self, fields)


class Batch:
    """A class that the old files do not use."""


CLASSES: dict[str, list[type]] = {
    "torch_geometric": [],
    "torch_geometric.data": [],
    "torch_geometric.data.data": [Data, DataEdgeAttr, DataTensorAttr],
    "torch_geometric.data.storage": [GlobalStorage],
    "torch_geometric.data.batch": [Batch],
}
for module_name, classes in CLASSES.items():
    for cls in classes:
        cls.__module__ = module_name


@contextmanager
def old_torch_geometric() -> Iterator[None]:
    """As much of torch_geometric as pickle needs while a file is written."""
    with pytest.MonkeyPatch.context() as patch:
        for name, classes in CLASSES.items():
            module = ModuleType(name)
            for cls in classes:
                setattr(module, cls.__name__, cls)
            patch.setitem(sys.modules, name, module)
        yield


def torch_bytes(value: object, *, legacy: bool = False) -> bytes:
    """A file of `torch.save`, in the format before torch 1.6 or in the one since."""
    file = io.BytesIO()
    with old_torch_geometric():
        torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


class Call:
    """Pickles as a call of `function` and, if given, the setting of a state."""

    def __init__(self, function: object, *args: object, state: object = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


# -- traces


def f16(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32).astype(np.float16)


def new_trace(number: int, *, num_tokens: int = 6, num_layers: int = 3) -> dict[str, object]:
    """As the later scripts wrote it: one array per layer."""
    return {
        "question": f"Who wrote book {number}?",
        "hidden_states": [f16(num_tokens, 8) for _ in range(num_layers)],
        "attentions": [f16(2, num_tokens, num_tokens) for _ in range(num_layers)],
        "tokens": np.arange(num_tokens),
        "tokens_decoded": ["▁Who", "▁wrote"],
        "score": np.float32(0.25),
        "question_id": f"tc_{number}",
    }


def old_trace(number: int, *, num_steps: int = 4, hidden: int = 8) -> dict[str, object]:
    """As the first scripts wrote it: [layer][step], where step 0 is the prompt of 5 tokens."""
    lengths = [5] + [1] * (num_steps - 1)
    return {
        "question": f"Who wrote book {number}?",
        "hidden_states": [[f16(1, n, hidden) for n in lengths] for _ in range(3)],
        "attentions": [[f16(1, 2, n, 5 + i) for i, n in enumerate(lengths)] for _ in range(3)],
        "tokens": [1, 2, 3, 4],
        "prompt_length": 5,
        "cutoff_method": "newline",
        "ground_truth_answers": ["x", "y"],
        "global_example_id": number,
    }


def torch_trace(number: int) -> dict[str, object]:
    return {
        "hidden_states": [torch.from_numpy(f16(6, 8)) for _ in range(3)],
        "logits": torch.randn(4).bfloat16(),
        "tokens": torch.arange(6),
        "column": torch.arange(12).reshape(3, 4)[:, 1],
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "options": OrderedDict(beams=5),
        "example_id": number,
    }


def same(a: object, b: object) -> bool:
    """Equal in type, dtype, shape and every byte."""
    if isinstance(a, torch.Tensor):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and (not a.numel() or torch.equal(*(x.flatten().contiguous().view(torch.uint8) for x in (a, b))))
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or a != a)


# -- traces with labels: wrong answers have larger states


def states(number: int) -> np.ndarray:
    """Of a trace: [layer, token, dim]."""
    rng = np.random.default_rng(number)
    return (rng.standard_normal((L, 4 + number % 3, D)) + number % 2).astype(np.float16)


def attention(number: int) -> np.ndarray:
    """[layer, head, token, token]"""
    size = states(number).shape[1]
    weights = np.tril(np.random.default_rng(1000 + number).random((L, H, size, size)) + 0.1)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)


def graphs(number: int, *, weighted: bool = True) -> list[Data]:
    made: list[Data] = []
    for x, weight in zip(states(number), attention(number).mean(axis=1, dtype=np.float32), strict=True):
        target, source = np.nonzero(np.tri(len(x)))
        edges: dict[str, object] = {
            "x": torch.from_numpy(x),
            "edge_index": torch.from_numpy(np.stack([source, target])),
        }
        if weighted:
            edges["edge_attr"] = torch.from_numpy(weight[target, source]).half()
        made.append(Data(**edges, num_nodes=len(x)))
    return made


def steps(number: int) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Hidden states and attention as `generate` gave them, [layer][step]; the prompt has three tokens."""
    hidden, weights = states(number), attention(number)
    ends = range(3, hidden.shape[1] + 1)
    cuts = [(0 if end == 3 else end - 1, end) for end in ends]
    return (
        [[layer[None, start:end] for start, end in cuts] for layer in hidden],
        [[layer[None, :, start:end, :end] for start, end in cuts] for layer in weights],
    )


def write_traces(folder: Path, *, stepwise: bool) -> None:
    folder.mkdir()
    for first in (0, 30):
        traces: list[dict[str, object]] = []
        for number in range(first, first + 30):
            hidden, weights = steps(number) if stepwise else (list(states(number)), list(attention(number)))
            traces.append(
                {
                    "question_id": f"tc_{number}",
                    "question": f"what is {number}?",
                    "hidden_states": hidden,
                    "attentions": weights,
                    "generated_answer_clean": f"it is {number}",
                }
            )
        (folder / f"trivia_qa_traces_batch_{first // 30:04d}.pkl").write_bytes(pickle.dumps(traces))
