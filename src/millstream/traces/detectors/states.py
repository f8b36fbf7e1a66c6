"""Which hidden states detectors read: the field that a store has, and some of its layers."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from millstream.core.batches import fetch_batch
from millstream.core.collection import Collection
from millstream.core.record import Array
from millstream.errors import NoDetector
from millstream.report.measures import spaced
from millstream.traces.features import LayerFeature
from millstream.traces.features import layers as layer_feature
from millstream.traces.kind import POSITIONS

MAX_LAYERS = 8  # read, unless the settings name some: more gain little


def states_field(field_names: Sequence[str]) -> str:
    """The field with states at some tokens."""
    found = next((name for name in ("states", "hidden") if name in field_names), None)
    if found is None:
        raise NoDetector(
            f"the store has neither states (tier probe) nor hidden (tier full), only {', '.join(field_names)}"
        )
    return found


def token_field(field_names: Sequence[str]) -> str:
    """The field with the states of generated tokens."""
    found = next((name for name in ("answer_hidden", "hidden") if name in field_names), None)
    if found is None:
        raise NoDetector(
            f"the store has no hidden states of tokens (tiers answer and full), only {', '.join(field_names)}"
        )
    return found


def stored_layers(collection: Collection, field: str) -> int:
    """How many layers the records have of a field."""
    first = fetch_batch(collection, np.zeros(1, np.int64), [field]).columns[field]
    return len(cast("Sequence[Array]", first)[0])


def some_layers(count: int, most: int = MAX_LAYERS) -> tuple[int, ...]:
    """Some of the stored layers at even steps; of many, without the first, which is the embedding."""
    return tuple((spaced(count, most + 1)[1:] if count > most else np.arange(count)).tolist())


def last_answer(layers: Sequence[int], *, field: str) -> LayerFeature:
    """`layers` [B, L, D] at the last answer token; all layers if none are named."""
    token = POSITIONS.index("last_answer") if field == "states" else "last_answer"
    return layer_feature(token, field=field, layers=tuple(layers) or None)
