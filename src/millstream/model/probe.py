"""Linear probes: a logistic regression on the hidden state of each layer, at one token. The bar to beat."""

# B batch, L layers, P positions, D hidden

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, cast

from torch import Tensor

from millstream.dataset.features import fields, layers, token_stats
from millstream.model.detector import Means
from millstream.model.logistic import Inputs, Logistic
from millstream.source.llm.fields import POSITIONS

Position = Literal["last_prompt", "first_answer", "last_answer", "mean_answer"]


def probe(means: Means, field_names: Sequence[str], *, position: Position) -> Logistic:
    """A probe whose layer is chosen, on `states` where the store has them, else on `hidden`."""
    if "hidden" in field_names and "states" not in field_names:
        inputs = Inputs(layers(position), _layers, axis="layer")
    else:
        place = POSITIONS.index(position)
        inputs = Inputs(fields("states"), partial(_states, place=place), axis="layer")
    return Logistic(means, inputs=inputs)


def token_probe(means: Means) -> Logistic:
    """A regression on all token statistics."""
    return Logistic(means, inputs=Inputs(token_stats(), _stats))


def _layers(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["layers"])


def _states(batch: Mapping[str, object], *, place: int) -> Tensor:
    states_BLPD = cast(Tensor, batch["states"])
    return states_BLPD[:, :, place].float()


def _stats(batch: Mapping[str, object]) -> Tensor:
    return cast(Tensor, batch["stats"])[:, None]
