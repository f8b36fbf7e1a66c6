"""How old files, and stores converted from them, plug into traces: see `millstream.traces.convert`.

Importing this module is fast; the readers import torch, so they are imported when a file is read.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.core.features import Feature
    from millstream.traces.graphs import Wiring

SUFFIXES = (".pkl", ".pkl.gz", ".pt")
NAMES = {"hidden": "hidden_states", "attention": "attentions", "prompt_len": "prompt_length"}
AXES = {
    ("hidden_states", 3): "layer, token, dim",
    ("attentions", 4): "layer, head, query, key",
    ("hidden_states", 2): "layer, value",  # the steps of each layer, concatenated
    ("attentions", 2): "layer, value",
    ("layers", 2): "layer, dim",
    ("x", 3): "layer, token, dim",
    ("edge_index", 2): "end, edge",
    ("edge_attr", 1): "edge",
    ("edge_counts", 1): "layer",
}
SAVED_GRAPHS = ("x", "edge_index", "edge_attr", "edge_counts")
_CONTENTS = {None: "traces", "lstm": "preprocessed sequences (lstm)", "gnn": "preprocessed graphs (gnn)"}


def recognises(path: Path) -> bool:
    """By its suffix, or because it starts like a pickle or a torch file."""
    if path.name.endswith(SUFFIXES):
        return True
    with path.open("rb") as file:
        head = file.read(128)
    if head.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(path) as file:
                head = file.read(1)
        except (OSError, EOFError, zlib.error):
            return False
    return head[:1] == b"\x80" or (head.startswith(b"PK") and b"/data.pkl" in head)


def describe(path: Path) -> str:
    from millstream.classic.preprocessed import is_preprocessed

    return _CONTENTS[is_preprocessed(path)]


def records(path: Path, *, notify: Callable[[str], None]) -> Iterator[dict[str, object]]:
    from millstream.classic.pickles import normalise, read_traces
    from millstream.classic.preprocessed import is_preprocessed, read_preprocessed

    if is_preprocessed(path):
        return read_preprocessed(path, notify=notify)
    return map(normalise, read_traces(path, notify=notify))


def layer_feature(field_names: Sequence[str]) -> "Feature | None":
    from millstream.core.features import fields
    from millstream.traces.features import layers

    if NAMES["hidden"] in field_names:  # some of these traces do not record where the answer ends
        return _joined(layers("last", field=NAMES["hidden"]), field_names)
    return fields("layers") if "layers" in field_names else None


def graph_feature(field_names: Sequence[str], *, k: int | None, threshold: float, wiring: "Wiring") -> "Feature | None":
    from millstream.classic.features import SavedGraphFeature
    from millstream.traces.graphs import graphs

    if {NAMES["hidden"], NAMES["attention"]} <= set(field_names):
        feature = graphs(k, threshold=threshold, wiring=wiring, hidden=NAMES["hidden"], attention=NAMES["attention"])
        return _joined(feature, field_names)
    return SavedGraphFeature(wiring) if set(SAVED_GRAPHS) <= set(field_names) else None


def shapes_field(field: str) -> str:
    return f"{field}_steps"


def join(field: str, number: int, values: Any, shapes: Sequence[Sequence[int]]) -> Any:
    from millstream.classic.features import join_steps

    return join_steps(field, number, values, shapes)


def _joined(feature: "Feature", field_names: Sequence[str]) -> "Feature":
    """The first scripts stored tensors step by step."""
    from millstream.classic.features import JoinedSteps

    return JoinedSteps(feature) if shapes_field(NAMES["hidden"]) in field_names else feature
