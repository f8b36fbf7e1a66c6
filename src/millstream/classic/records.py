"""A trace as the old scripts wrote it <-> a record of a store.

hidden_states   list of L arrays [T, D], or [layer][step] arrays (1, prompt, D), (1, 1, D), (1, 1, D) ...
attentions      list of L arrays [H, T, T], or [layer][step] arrays (1, H, q, k) with k growing
or both as [step][layer], as `generate` of Hugging Face returns them; these are stored as [layer][step].
"""

# L layers, T tokens, D hidden, H heads, P values of all steps of a layer, concatenated

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from millstream.core.record import Array
from millstream.errors import BadSource

if TYPE_CHECKING:
    import torch

NAMES = {
    "hidden": "hidden_states",
    "attention": "attentions",
    "prompt_len": "prompt_length",
    "generated_answer": "generated_answer_clean",
    "aliases": "ground_truth_answers",
    "finish": "cutoff_method",
}
TOKEN_FIELDS = ("tokens", "tokens_full")
MAX_DEPTH = 16  # of lists and dicts in a field


def shapes_field(field: str) -> str:
    """The field with the shapes of the steps of `field`."""
    return f"{field}_steps"


def to_record(trace: dict[str, object]) -> dict[str, object]:
    """Convert a trace to a record for a store: tensors, numbers, strings, lists of them, None.

    Layers are stacked: [L, ...] from a list of arrays, [L, P] from [layer][step] arrays, each layer's steps flattened
    and concatenated (traces with one step and with many must fit the same field). The field `<name>_steps` has the
    shapes of the steps.

        record = to_record({"hidden_states": [np.zeros((7, 64))] * 12, "global_example_id": 3})
        record["hidden_states"].shape, record["question_id"]  # (12, 7, 64), "3"
    """
    record: dict[str, object] = {}
    for name, value in _layers_first(trace).items():
        try:
            name.encode()  # Arrow rejects lone surrogates, pickle does not
            if not _is_nested(value):
                record[name] = _storable(name, value)
            elif shapes_field(name) in trace:
                raise BadSource(
                    f"field {name!r}: its steps need the field {shapes_field(name)!r}, which is taken. Rename it"
                )
            else:
                record[name], record[shapes_field(name)] = _stack_steps(name, cast(Sequence[Sequence[object]], value))
        except (OverflowError, RecursionError, ValueError) as error:
            raise BadSource(f"field {name!r}: cannot be stored: {error}") from error
    if record.get("question_id") is None and record.get("global_example_id") is not None:
        record["question_id"] = str(record["global_example_id"])
    return record


def restore_steps(record: dict[str, object]) -> dict[str, object]:
    """The inverse of `to_record` for [layer][step] fields: nested lists of views, without the `<name>_steps` fields."""
    trace = dict(record)
    for name, value in record.items():
        steps = record.get(shapes_field(name))
        if isinstance(steps, list | tuple | np.ndarray) and _is_tensor(value):
            shapes = [tuple(map(int, shape)) for shape in cast(Sequence[Sequence[int]], steps)]
            trace[name] = _split_steps(cast(Array, value), shapes)
            del trace[shapes_field(name)]
    return trace


# Torch tensors index, slice and reshape like arrays, so they are typed as arrays here.


def _storable(name: str, value: object) -> object:
    if _is_torch(value):
        return cast("torch.Tensor", value).detach().cpu()
    if isinstance(value, np.ndarray):
        array = cast(Array, value)
        if array.dtype.kind == "U":
            return _plain(name, array.tolist())
        if array.dtype.kind not in "biufc":
            raise BadSource(f"field {name!r}: cannot store an array of {array.dtype}, only numbers and strings")
        return array
    if not isinstance(value, list | tuple):
        return _plain(name, value)
    items = cast(Sequence[object], value)
    if any(_is_tensor(item) for item in items):
        return _stack(name, items)
    if name in TOKEN_FIELDS and all(type(item) is int or isinstance(item, np.integer) for item in items):
        return np.array(items, np.int64)
    return _plain(name, items)


def _plain(name: str, value: object, depth: int = 0) -> object:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, np.generic):
        value = cast(object, value.item())
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in cast(Sequence[object], value)]
    elif isinstance(value, dict):
        items = cast(dict[object, object], value).items()
        return {_key(key): _plain(name, item, depth + 1) for key, item in items}
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a whole number beyond 64 bits")
    elif not isinstance(value, bool | int | float | bytes | None):
        raise BadSource(f"field {name!r}: cannot store a {type(value).__name__} here, only numbers, strings and lists")
    return value


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"its key {str(key)[:80]!r} is not a string")
    key.encode()
    return key


def _is_tensor(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    return hasattr(value, "__torch_function__")


def _is_nested(value: object) -> bool:
    """Whether the value is [layer][step] tensors."""
    if not isinstance(value, list | tuple):
        return False
    items = cast(Sequence[object], value)
    layers = [cast(Sequence[object], item) for item in items if isinstance(item, list | tuple)]
    return len(layers) == len(items) and any(_is_tensor(step) for layer in layers for step in layer)


def _layers_first(trace: dict[str, object]) -> dict[str, object]:
    """The trace with hidden states and attentions as [layer][step], also if they are [step][layer].

    The steps of a layer differ in shape: the prompt first, then one token each, seeing more and more. Shapes of hidden
    states are all equal if the prompt has one token; then attentions decide, or the number of tokens.
    """
    nested = {
        name: cast(Sequence[Sequence[object]], trace[name])
        for name in (NAMES["hidden"], NAMES["attention"])
        if _is_nested(trace.get(name))
    }
    found = {name: _order_of_axes(values) for name, values in nested.items()}
    known = {order for order in found.values() if order}
    if len(known) > 1:
        raise BadSource(f"fields {', '.join(map(repr, nested))}: one is [layer][step], the other [step][layer]")
    if nested and not known:
        name, values = next(iter(nested.items()))
        known = {_order_by_counts(trace, name, len(values), len(values[0]))}
    if known != {"step, layer"}:
        return trace
    return {**trace, **{name: list(map(list, zip(*steps, strict=True))) for name, steps in nested.items()}}


def _order_of_axes(values: Sequence[Sequence[object]]) -> str | None:
    """None if the shapes fit both orders. If they fit neither, they are reported when they are stacked."""
    shapes = [[tuple(getattr(item, "shape", ())) for item in inner] for inner in values]
    by_layer = all(inner == shapes[0] for inner in shapes)
    by_step = all(len(inner) == len(shapes[0]) and len(set(inner)) == 1 for inner in shapes)
    if by_layer and by_step:
        return None
    return "step, layer" if by_step else "layer, step"


def _order_by_counts(trace: dict[str, object], name: str, outer: int, inner: int) -> str:
    if inner == 1:  # one step: a model has at least two hidden states
        return "layer, step"
    if outer == 1:
        return "step, layer"
    counts = {
        len(cast(Sequence[object], trace[field])) for field in TOKEN_FIELDS if hasattr(trace.get(field), "__len__")
    }
    prompt = trace.get(NAMES["prompt_len"])
    counts |= {count - prompt for count in counts if isinstance(prompt, int)}
    if (outer in counts) == (inner in counts):
        raise BadSource(
            f"field {name!r}: {outer} lists of {inner} tensors of one shape can be [layer][step] or [step][layer]. "
            "Save one array [token, dim] per layer"
        )
    return "step, layer" if outer in counts else "layer, step"


def _stack(name: str, items: Sequence[object]) -> Array:
    """Stack tensors of equal shape along a new first axis. (np.stack would change the byte order.)"""
    first, *_ = tensors = _of_one_kind(name, items)
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = ", ".join(sorted({str(tuple(tensor.shape)) for tensor in tensors})[:4])
        raise BadSource(f"field {name!r}: expected tensors of one shape, found {shapes}")
    stacked = _empty((len(tensors), *first.shape), first)
    for number, tensor in enumerate(tensors):
        stacked[number] = tensor
    return stacked


def _stack_steps(name: str, layers: Sequence[Sequence[object]]) -> tuple[Array, list[list[int]]]:
    tensors = _of_one_kind(name, [step for layer in layers for step in layer])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    num_steps = len(layers[0])
    steps = shapes[:num_steps]
    for number, layer in enumerate(layers):
        if len(layer) != num_steps or shapes[number * num_steps : (number + 1) * num_steps] != steps:
            raise BadSource(f"field {name!r}: the steps of layer {number} differ in shape from those of layer 0")
    stacked = _empty((len(layers), sum(map(prod, steps))), tensors[0])
    for number, place in enumerate(place for layer in _split_steps(stacked, steps) for place in layer):
        place[...] = tensors[number]
    return stacked, [list(shape) for shape in steps]


def _split_steps(stacked: Array, steps: list[tuple[int, ...]]) -> list[list[Array]]:
    """[layer][step] views of [L, P]."""
    bounds = list(pairwise(accumulate(map(prod, steps), initial=0)))
    return [
        [layer[start:stop].reshape(shape) for (start, stop), shape in zip(bounds, steps, strict=True)]
        for layer in stacked
    ]


def _of_one_kind(name: str, items: Sequence[object]) -> list[Array]:
    kinds = {(type(item).__name__, str(getattr(item, "dtype", ""))) for item in items}
    if len(kinds) > 1:
        found = ", ".join(sorted(" ".join(kind) for kind in kinds)[:4])
        raise BadSource(f"field {name!r}: expected tensors of one kind and dtype, found {found}")
    return [cast(Array, _storable(name, item)) for item in items]


def _empty(shape: tuple[int, ...], like: object) -> Array:
    if _is_torch(like):
        return cast(Array, cast("torch.Tensor", like).new_empty(shape))
    return np.empty(shape, cast(Array, like).dtype)
