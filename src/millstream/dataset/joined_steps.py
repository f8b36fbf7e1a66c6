"""Features of old traces whose tensors lie step by step, as `generate` gave them: the steps are joined first."""

# L layers, H heads, T tokens, D hidden, P values of all steps one after the other

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from millstream.dataset.batch import Batch, Feature, TraceBatch
from millstream.dataset.graph_feature import Floats
from millstream.dataset.layer_feature import as_floats
from millstream.records import Array

if TYPE_CHECKING:
    import torch

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class JoinedSteps:
    """What `feature` makes of hidden states [L, T, D] and attention [L, H, T, T], joined from values [L, P] of steps.

    The first step is the whole prompt, each later one a token that looks back; `<field>_steps` has their shapes.
    """

    feature: Feature

    @property
    def fields(self) -> list[str]:
        return [name for field in self.feature.fields or () for name in (field, steps_field(field))]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("steps are those of traces; these records are reads")
        joined: dict[str, Sequence[object]] = {}
        for name in self.feature.fields or ():
            values = cast("Sequence[Array | torch.Tensor | None]", batch.columns[name])
            steps = cast("Sequence[Shapes | None]", batch.columns[steps_field(name)])
            rows = zip(batch.numbers.tolist(), values, steps, strict=True)
            joined[name] = [join_steps(name, number, value, shapes) for number, value, shapes in rows]
        return self.feature(TraceBatch(batch.numbers, joined), seed=seed, epoch=epoch)


def steps_field(field: str) -> str:
    """The field that has the shapes of another one's steps."""
    return f"{field}_steps"


def join_steps(name: str, number: int, value: "Array | torch.Tensor | None", shapes: Shapes | None) -> Floats:
    """Values [L, P] of a record's field as hidden states [L, T, D] or attention [L, H, T, T]."""
    if value is None or not shapes or any(len(shape) not in (3, 4) or shape[0] != 1 for shape in shapes):
        raise ValueError(
            f"record {number}: {name!r} with steps of the shapes {shapes}, expected one sequence in each: "
            "[1, token, dim] or [1, head, token, token]"
        )
    values_LP = as_floats(value)
    if len(shapes[0]) == 3:
        return values_LP.reshape(len(values_LP), -1, shapes[0][-1])
    size = sum(shape[2] for shape in shapes)
    joined_LHTT = np.zeros((len(values_LP), shapes[0][1], size, size), values_LP.dtype)
    start = token = 0
    for _, heads, queries, keys in shapes:
        end = start + prod((heads, queries, keys))
        block = values_LP[:, start:end].reshape(-1, heads, queries, keys)
        joined_LHTT[:, :, token : token + queries, :keys] = block
        start, token = end, token + queries
    return joined_LHTT
