"""The detectors by name: what each takes from a store, and how it is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from torch import Tensor

from millstream.dataset import features
from millstream.dataset.batch import Feature
from millstream.dataset.graph_feature import STORED, Wiring
from millstream.dataset.head_graph_feature import HeadGraphFeature
from millstream.dataset.joined_steps import JoinedSteps, steps_field
from millstream.dataset.saved_graph_feature import SAVED, SavedGraphFeature
from millstream.errors import BadSetting, NoDetector
from millstream.model.net import Net, match_width
from millstream.source.llm.fields import POSITIONS

Kind = Literal["trained", "null", "baseline"]


@dataclass(frozen=True)
class Recipe:
    """How large nets are and what they see."""

    parameters: int = 100_000
    dropout: float = 0.2
    token: str = "last_answer"
    token_stats: bool = True
    k: int | None = 8
    threshold: float = 0.0
    kl_weight: float = 0.1
    free_bits: float = 0.05


@dataclass(frozen=True)
class NetKind:
    """One kind of net."""

    title: str
    kind: Kind
    family: Literal["lstm", "gnn", "gvae", "charm"]
    wiring: Wiring = "attention"
    sees_stats: bool = True


NETS = {
    "lstm": NetKind("LSTM over the layers", "trained", "lstm"),
    "gnn": NetKind("GINE over token graphs + LSTM over the layers", "trained", "gnn"),
    "gvae": NetKind("graph VAE + LSTM over the layers", "trained", "gvae"),
    "charm": NetKind("CHARM-style single graph, attention only", "baseline", "charm", sees_stats=False),
    "lstm_states": NetKind("lstm without token statistics", "null", "lstm", sees_stats=False),
    "gnn_shuffled": NetKind("gnn, edges from any earlier token", "null", "gnn", "shuffled"),
    "gnn_unwired": NetKind("gnn without edges", "null", "gnn", "none"),
    "gvae_shuffled": NetKind("gvae, edges from any earlier token", "null", "gvae", "shuffled"),
    "gvae_unwired": NetKind("gvae without edges", "null", "gvae", "none"),
}
NULLS = {
    "lstm": ("lstm_states",),
    "gnn": ("gnn_shuffled", "gnn_unwired"),
    "gvae": ("gvae_shuffled", "gvae_unwired"),
}


def net_features(name: str, field_names: Sequence[str], recipe: Recipe) -> list[Feature]:
    """What a net takes from records that have these fields."""
    net = NETS[name]
    made: list[Feature] = [
        {"lstm": _layers, "gnn": _graphs, "gvae": _graphs, "charm": _head_graphs}[net.family](net, field_names, recipe)
    ]
    if net.sees_stats and recipe.token_stats and "logprobs" in field_names:
        made.append(features.token_stats())
    return made


def build_net(name: str, example: Mapping[str, object], recipe: Recipe) -> Net:
    """A net for batches like the example, about as large as the recipe says."""
    shapes = {key: tuple(value.shape) for key, value in example.items() if isinstance(value, Tensor)}
    num_stats = shapes["stats"][1] if "stats" in shapes else 0
    family = NETS[name].family
    if family == "lstm":
        from millstream.model.lstm import LayerLSTM

        _, num_layers, dim = shapes["layers"]
        build = partial(LayerLSTM, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
    elif family == "charm":
        from millstream.model.charm import HeadGraph

        build = partial(HeadGraph, dim=shapes["x"][1], edge_dim=shapes["edge_attr"][1], dropout=recipe.dropout)
    else:
        from millstream.model.gnn import GraphLSTM
        from millstream.model.gvae import GraphVAE

        kind = (
            GraphLSTM if family == "gnn" else partial(GraphVAE, kl_weight=recipe.kl_weight, free_bits=recipe.free_bits)
        )
        num_layers, dim = int(cast(Tensor, example["num_layers"])[0]), shapes["x"][1]
        build = partial(kind, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
    return build(match_width(build, recipe.parameters))


def _layers(net: NetKind, names: Sequence[str], recipe: Recipe) -> Feature:
    if recipe.token not in POSITIONS:
        raise BadSetting(f"token={recipe.token}: there is {', '.join(POSITIONS)}")
    if "states" in names:
        return features.layers(POSITIONS.index(recipe.token), field="states")
    if "hidden" in names:
        return features.layers(cast("features.Token", recipe.token), field="hidden")
    if "hidden_states" in names:  # of old traces, not all of which say where the answer ends
        return _joined(features.layers("last", field="hidden_states"), names)
    if "layers" in names:  # of preprocessed files, as they are
        return features.fields("layers")
    raise NoDetector(f"the store has neither states (tier probe) nor hidden (tier full), only {', '.join(names)}")


def _graphs(net: NetKind, names: Sequence[str], recipe: Recipe) -> Feature:
    make = partial(features.graphs, recipe.k, threshold=recipe.threshold, wiring=net.wiring)
    if "nodes" in names and "edge_source" in names:
        return make(hidden="nodes", attention=STORED, tokens="answer")
    if "hidden" in names and "attention" in names:
        return make(tokens="answer" if "answer_len" in names and "prompt_len" in names else "all")
    if "hidden_states" in names and "attentions" in names:  # of old traces
        return _joined(make(hidden="hidden_states", attention="attentions"), names)
    if set(SAVED) <= set(names):  # of preprocessed files, as they are
        return SavedGraphFeature(net.wiring)
    raise NoDetector(
        "the store has neither nodes and edges (tiers graph and probe) nor hidden and attention (full), only "
        f"{', '.join(names)}"
    )


def _joined(feature: Feature, names: Sequence[str]) -> Feature:
    """For old traces, the first of which lie step by step."""
    return JoinedSteps(feature) if steps_field("hidden_states") in names else feature


def _head_graphs(net: NetKind, names: Sequence[str], recipe: Recipe) -> Feature:
    if "prompt_len" in names and "answer_len" in names:
        if "attention" in names:
            return HeadGraphFeature(from_attention=True)
        if "edge_source" in names and "self_attention" in names:
            return HeadGraphFeature(from_attention=False)
    raise NoDetector(
        f"the store has neither edges and heads (tiers graph, probe) nor attention (full), only {', '.join(names)}"
    )
