"""One vector a layer, at a chosen token: what an LSTM over the layers reads."""

# B batch, L layers, T tokens, D hidden

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from millstream.buffers import empty
from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.padding import stack
from millstream.records import Array

if TYPE_CHECKING:
    import torch

Token = Literal["first", "last", "mean", "last_prompt", "first_answer", "last_answer", "mean_answer"] | int
PROMPT, ANSWER = "prompt_len", "answer_len"
_OF_ANSWER = ("last_prompt", "first_answer", "last_answer", "mean_answer")
Floats = NDArray[np.floating]
TOKENS = ("first", "last", "mean", *_OF_ANSWER)


@dataclass(frozen=True)
class LayerFeature:
    """`layers` [B, L, D]. Made by `ms.features.layers`."""

    token: Token
    field: str
    layers: tuple[int, ...] | None
    dtype: str

    @property
    def fields(self) -> list[str]:
        picked = self.field if self.layers is None else f"{self.field}[{','.join(map(str, self.layers))}]"
        return [picked, *([PROMPT] if self.token in _OF_ANSWER else []), *([ANSWER] if self._to_end else [])]

    @property
    def _to_end(self) -> bool:
        """Whether it matters where the answer ends."""
        return self.token == "last_answer"

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("features.layers takes hidden states of traces; these records are reads")
        prompts = cast("Sequence[int]", batch.columns[PROMPT]) if self.token in _OF_ANSWER else [0] * len(batch)
        answers = cast("Sequence[int | None]", batch.columns[ANSWER]) if self._to_end else [0] * len(batch)
        hidden = cast("Sequence[Array | None]", batch.columns[self.field])
        rows: list[Array] = []
        for number, states, prompt, answer in zip(batch.numbers.tolist(), hidden, prompts, answers, strict=True):
            if states is None or states.ndim != 3:
                found = "None" if states is None else f"{states.ndim} axes"
                raise ValueError(f"record {number}: {self.field!r} has {found}, expected [layer, token, dim]")
            rows.append(self._row(as_floats(states), int(prompt), int(answer or 0), number))
        if len({row.shape for row in rows}) == 1:
            out = empty((len(rows), *rows[0].shape), self.dtype)
            for row, target in zip(rows, out, strict=True):
                target[...] = row
            return {"layers": out}
        whole, mask = stack([row.astype(self.dtype) for row in rows])
        return {"layers": whole} if mask is None else {"layers": whole, "layers_mask": mask}

    def _row(self, states_LTD: Floats, prompt: int, answer: int, number: int) -> Floats:
        count = states_LTD.shape[1]
        start, end = {"mean": (0, count), "mean_answer": (prompt, count)}.get(str(self.token), (0, 0))
        if self.token in ("mean", "mean_answer") and start < end:
            return states_LTD[:, start:end].mean(axis=1, dtype=np.float32)
        named = {
            "first": 0,
            "last": count - 1,
            "last_prompt": prompt - 1 if prompt else count,
            "first_answer": prompt,
            # An answer of no tokens is looked at where its stop token is.
            "last_answer": prompt + answer - 1 if answer else max(count - 1, prompt),
        }
        place = named.get(str(self.token), self.token)
        if isinstance(place, str) or not -count <= place < count:
            raise ValueError(f"record {number}: has {count} tokens, {prompt} of them prompt: no token {self.token!r}")
        return states_LTD[:, place]


def as_floats(states: "Array | torch.Tensor") -> "NDArray[np.floating]":
    """As numpy; float32 for a dtype that numpy lacks."""
    if hasattr(states, "__torch_function__"):
        return cast("torch.Tensor", states).float().numpy()
    return cast("NDArray[np.floating]", states)
