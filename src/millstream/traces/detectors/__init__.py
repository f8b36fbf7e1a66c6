"""The detectors by name: the features each needs, and how it is built."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.features import Feature
from millstream.errors import BadSetting, NoDetector
from millstream.report.measures import auroc
from millstream.traces.convert import imported_fields
from millstream.traces.detectors import mil, saplma
from millstream.traces.detectors.attention_pool import AttentionPool
from millstream.traces.detectors.baselines import BASELINES, Make
from millstream.traces.detectors.layer_nets import LAYER_DETECTION, BestLayerModel, Given, LayersOf, SpacedModel
from millstream.traces.detectors.logistic import Detector, Scores
from millstream.traces.detectors.net import DetectorNet, LayerLSTM, Net, match_width, score_of
from millstream.traces.detectors.own import checked_fields, own_detector
from millstream.traces.detectors.stack import Stack, with_samples
from millstream.traces.detectors.states import states_field, token_field
from millstream.traces.detectors.token_transformer import TokenTransformer
from millstream.traces.detectors.tokens import (
    TOKEN_DETECTION,
    TOKEN_STATISTICS,
    Scored,
    TokenLSTM,
    TokenProbe,
    TokenStatistic,
    highest,
    need_token_labels,
    split_tokens,
    states_feature,
)
from millstream.traces.features import Token, layers, token_stats
from millstream.traces.graphs import STORED, GraphFeature, HeadGraphFeature, Wiring, graphs
from millstream.traces.kind import POSITIONS, THINKING, TrainSettings
from millstream.traces.spans import TOKEN_LABELS
from millstream.training.study import Built, Kit, NetModel, Workplace
from millstream.training.task import FitResources, Labels, Model, Outcome, Task

Kind = Literal["trained", "null", "baseline"]
NULLS = {
    "lstm": ("lstm_states",),
    "gnn": ("gnn_shuffled", "gnn_unwired"),
    "gvae": ("gvae_shuffled", "gvae_unwired"),
}


class LayerKind(NamedTuple):
    """One kind of net of a single layer, which is chosen on validation."""

    title: str
    kind: Kind
    field_of: Callable[[Sequence[str]], str]
    features: Callable[..., Sequence[Feature]]
    build: Callable[..., Net]


LAYER_NETS = {
    "mil": LayerKind(
        "multiple-instance learning over tokens (HaMI)", "trained", token_field, mil.features_of, mil.build
    ),
    "saplma": LayerKind(
        "SAPLMA's net at the last answer token", "baseline", states_field, saplma.features_of, saplma.build
    ),
}
STACKS: Mapping[str, tuple[str, Make]] = {
    "stack": ("probes averaged over layers, token statistics", Stack),
    "stack_samples": ("stack, and statistics of samples", with_samples),
}
GROUP = "baselines"
TOKEN_PROBE = "token-probe"
TOKEN_DETECTORS = ("token-lstm", TOKEN_PROBE, *TOKEN_STATISTICS)
_OF_LOOP = ("seeds", "epochs", "batch_size", "lr", "warmup", "patience", "precision")  # settings


@dataclass(frozen=True)
class Recipe:
    """Size and inputs of the nets."""

    parameters: int = 100_000
    dropout: float = 0.2
    token: str = "last_answer"
    token_stats: bool = True
    layers: str | None = None
    k: int | None = 8
    threshold: float = 0.0
    kl_weight: float = 0.1
    free_bits: float = 0.05


@dataclass(frozen=True)
class NetKind:
    """One kind of net."""

    title: str
    kind: Kind
    family: Literal["lstm", "gnn", "gvae", "charm", "token-lstm", "attention_pool", "token_transformer"]
    wiring: Wiring = "attention"
    sees_stats: bool = True


NETS = {
    "lstm": NetKind("LSTM over the layers", "trained", "lstm"),
    "gnn": NetKind("GINE over token graphs + LSTM over the layers", "trained", "gnn"),
    "gvae": NetKind("graph VAE + LSTM over the layers", "trained", "gvae"),
    "attention_pool": NetKind("answer tokens weighed by a learned query", "trained", "attention_pool"),
    "token_transformer": NetKind("transformer over answer tokens and layers", "trained", "token_transformer"),
    "token-lstm": NetKind("LSTM over the tokens, a score per token", "trained", "token-lstm"),
    "charm": NetKind("CHARM-style single graph, attention only", "baseline", "charm", sees_stats=False),
    "lstm_states": NetKind("lstm without token statistics", "null", "lstm", sees_stats=False),
    "gnn_shuffled": NetKind("gnn, edges from random earlier tokens", "null", "gnn", "shuffled"),
    "gnn_unwired": NetKind("gnn without edges", "null", "gnn", "none"),
    "gvae_shuffled": NetKind("gvae, edges from random earlier tokens", "null", "gvae", "shuffled"),
    "gvae_unwired": NetKind("gvae without edges", "null", "gvae", "none"),
}


# The most layers that nets read, unless the settings name some.
OF_TOKENS = {"attention_pool": 8, "token_transformer": 4}
OF_GRAPHS = {"gnn": 8, "gvae": 8}  # all 30 of SmolLM2 take four times as long, and gain nothing
OURS = tuple(dict.fromkeys([*STACKS, *NETS, *LAYER_NETS, *TOKEN_DETECTORS, *BASELINES]))


def net_features(name: str, field_names: Sequence[str], recipe: Recipe) -> list[Feature]:
    """The features of a net for records with these fields."""
    net = NETS[name]
    made: list[Feature] = []
    if net.family == "token-lstm":
        return [states_feature(field_names, recipe.layers, stats=recipe.token_stats)]
    if net.family in OF_TOKENS:
        states = states_feature(field_names, recipe.layers, stats=False)
        made.append(replace(states, is_labelled=False, is_cut=True))
    elif net.family == "lstm":
        made.append(_layers(field_names, recipe))
    elif net.family == "charm":
        made.append(_head_graphs(field_names))
    else:
        made.append(_graphs(field_names, recipe, net.wiring))
    if net.sees_stats and recipe.token_stats and "logprobs" in field_names:
        made.append(token_stats())
    _need(name, made, field_names)
    return made


def _need(name: str, features: Sequence[Feature], field_names: Sequence[str]) -> None:
    needed = [field.split("[")[0] for feature in features for field in feature.fields or ()]
    if missing := [field for field in dict.fromkeys(needed) if field not in field_names]:
        raise NoDetector(
            f"{name} needs the field {', '.join(map(repr, missing))}; the store has {', '.join(field_names)}"
        )


def build_net(name: str, example: Mapping[str, object], recipe: Recipe) -> Net:
    """A net for batches like the example, of about the size in the recipe."""
    shapes = {key: tuple(value.shape) for key, value in example.items() if isinstance(value, Tensor)}
    num_stats = shapes["stats"][1] if "stats" in shapes else 0
    family = NETS[name].family
    if family == "lstm":
        _, num_layers, dim = shapes["layers"]
        build = partial(LayerLSTM, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
    elif family == "token-lstm":
        _, num_layers, dim = shapes["x"]
        build = partial(TokenLSTM, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
    elif family in OF_TOKENS:
        _, num_layers, dim = shapes["x"]
        if family == "attention_pool":  # its size is that of its input
            return AttentionPool(num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
        build = partial(TokenTransformer, num_layers=num_layers, dim=dim, num_stats=num_stats, dropout=recipe.dropout)
    elif family == "charm":
        from millstream.traces.detectors.gnn import HeadGraph

        build = partial(HeadGraph, dim=shapes["x"][1], edge_dim=shapes["edge_attr"][1], dropout=recipe.dropout)
    else:
        from millstream.traces.detectors.gnn import GraphLSTM, GraphVAE

        vae = partial(GraphVAE, kl_weight=recipe.kl_weight, free_bits=recipe.free_bits)
        num_layers, dim = int(cast(Tensor, example["num_layers"])[0]), shapes["x"][1]
        build = partial(
            GraphLSTM if family == "gnn" else vae,
            num_layers=num_layers,
            dim=dim,
            edge_dim=shapes["edge_attr"][1],
            num_stats=num_stats,
            dropout=recipe.dropout,
        )
    return build(match_width(build, recipe.parameters))


@dataclass(frozen=True)
class DetectorSpec:
    """A detector named in the settings, for records with these fields."""

    name: str
    field_names: Sequence[str]

    @property
    def by_gradients(self) -> bool:
        """Whether it is a net: trained by all processes, once per seed."""
        return self.name in NETS or self.name in LAYER_NETS

    @property
    def library(self) -> str | None:
        """A large library that only this detector imports."""
        return "sklearn.decomposition" if self.name == "lapeigvals" else None

    def build(self, *, resources: FitResources, place: Workplace, folder: Path | None = None) -> Built:
        field_names = self.field_names
        given = Given(resources=resources, place=place, folder=folder)
        if folder is not None and self.name in TOKEN_DETECTORS:  # to be trained; it can score without labels
            need_token_labels(field_names)
        if self.name in NETS:
            recipe = recipe_of(cast(TrainSettings, place.settings))
            kit = Kit(net_features(self.name, field_names, recipe), partial(build_net, self.name, recipe=recipe))
            task = TOKEN_DETECTION if self.name in TOKEN_DETECTORS else DETECTION
            net = NetModel(self.name, kit, task=task, **given)
            family = NETS[self.name].family
            if recipe.layers is None and family in OF_TOKENS:
                net = SpacedModel(self.name, self._of_tokens(recipe), task=task, most=OF_TOKENS[family], **given)
            elif family in OF_GRAPHS and isinstance(kit.features[0], GraphFeature):
                net = SpacedModel(self.name, self._of_graphs(kit), task=task, most=OF_GRAPHS[family], **given)
            return Built(net, NETS[self.name].title, NETS[self.name].kind)
        if self.name in LAYER_NETS:
            layer_net = LAYER_NETS[self.name]
            field = layer_net.field_of(field_names)
            layers = LayersOf(field, partial(layer_net.features, field=field), layer_net.build)
            _need(self.name, layers.features([]), field_names)
            model = BestLayerModel(self.name, layers, task=LAYER_DETECTION, **given)
            return Built(model, layer_net.title, layer_net.kind)
        if self.name in STACKS:
            title, make = STACKS[self.name]
            return Built(checked_fields(make(resources, field_names), field_names), title, "trained")
        if self.name == TOKEN_PROBE:
            feature = states_feature(field_names, cast(TrainSettings, place.settings).layers, stats=False)
            return Built(TokenProbe(resources, feature=feature), "probe of the hidden states of each token", "trained")
        if self.name in TOKEN_STATISTICS:
            title, make = TOKEN_STATISTICS[self.name]
            return Built(checked_fields(make(resources, field_names), field_names), title, "baseline")
        if ":" in self.name:
            return Built(checked_fields(own_detector(self.name)(resources), field_names), self.name, "trained")
        if self.name not in BASELINES:
            raise _unknown(self.name)
        baseline = BASELINES[self.name]
        detector = checked_fields(baseline.make(resources, field_names), field_names)
        return Built(detector, baseline.title, "baseline", baseline.extra_forwards)

    def _of_graphs(self, kit: Kit) -> LayersOf:
        """How a net over graphs reads layers of its own choice."""
        graph, *others = kit.features
        assert isinstance(graph, GraphFeature)

        def features(layers: Sequence[int]) -> list[Feature]:
            return [replace(graph, layers=tuple(layers) or None), *others]

        return LayersOf("edge_weight" if graph.attention == STORED else graph.attention, features, kit.build)

    def _of_tokens(self, recipe: Recipe) -> LayersOf:
        """How a net over tokens reads layers of its own choice."""

        def features(layers: Sequence[int]) -> list[Feature]:
            return net_features(self.name, self.field_names, replace(recipe, layers=",".join(map(str, layers)) or None))

        return LayersOf(token_field(self.field_names), features, partial(build_net, self.name, recipe=recipe))


def detector_specs(settings: TrainSettings, field_names: Sequence[str]) -> list[DetectorSpec]:
    """The detectors that `model=` names."""
    named = [name.strip() for name in settings.model.split(",") if name.strip()]
    # Of the group, baselines that need more than a tier keeps are for stores that were extracted with it.
    costly = {name for name, baseline in BASELINES.items() if baseline.extra_forwards or baseline.needs_samples}
    beyond = {name for name, one in BASELINES.items() if one.beyond_tiers and one.beyond_tiers not in field_names}
    left_out = ((costly - {*field_names}) | beyond) - {*named}
    found = [name for name in expanded(named) if name not in left_out]
    if GROUP in named and TOKEN_LABELS in field_names:
        found = list(dict.fromkeys([*found, *TOKEN_STATISTICS]))
    for name in found:
        if ":" in name:
            own_detector(name)
        elif not is_ours(name):
            raise _unknown(name)
    if not found:
        raise BadSetting("model=: give at least one detector")
    return [DetectorSpec(name, field_names) for name in found]


def is_ours(name: str) -> bool:
    """Whether a detector is one of millstream's, not code of someone's own."""
    return name in OURS


def scores_of(model: Model, collection: Collection) -> Scored:
    """One number per record, in the order of the collection, and perhaps per token; higher: more likely wrong."""
    if isinstance(model, NetModel):
        outcome = model.outcome(collection)
        if not model.task.is_ragged:
            return Scored(outcome["score"].astype(np.float64))
        tokens = split_tokens(outcome)
        return Scored(highest(tokens, collection), tokens)
    if isinstance(model, TokenProbe | TokenStatistic):
        tokens = model.score_tokens(collection)
        return Scored(highest(tokens, collection), tokens)
    found = cast(object, cast(Detector, model).score(collection))
    try:
        scores = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        scores = np.empty(())
    if scores.shape != (len(collection),):
        given = f"shape {scores.shape}" if scores.shape else f"a {type(found).__name__}"
        raise BadSetting(
            f"{type(model).__name__}.score returned {given}, expected one number per record, {len(collection)} in all"
        )
    return Scored(scores)


def scores_by_layer(model: NetModel, collection: Collection) -> Scores | None:
    """[N, L]: the score of each record if each layer were the last; None if the net does not read layer by layer."""
    net = cast(DetectorNet, model.restored(collection)).eval()
    with torch.inference_mode():
        found = [net.by_layer(model.fabric.to_device(batch)) for batch in model.batches(collection)]
    known = [scores for scores in found if scores is not None]
    return torch.cat(known).double().cpu().numpy() if known else None


def expanded(names: Sequence[str]) -> list[str]:
    """Each name once; `baselines` becomes all baselines, and the null models of the detectors named."""
    nulls = [null for model in names for null in NULLS.get(model, ())]
    group = [*BASELINES, "charm", *nulls]
    return list(dict.fromkeys(one for name in names for one in (group if name == GROUP else [name])))


def used_by() -> Mapping[str, Sequence[str]]:
    """The detectors that each setting of `train` has an effect on; settings of all of them are left out."""
    wired = [name for name, net in NETS.items() if net.family in ("gnn", "gvae") and net.wiring != "none"]
    gvae = [name for name, net in NETS.items() if net.family == "gvae"]
    return {
        **dict.fromkeys(_OF_LOOP, (*NETS, *LAYER_NETS)),
        **dict.fromkeys(("clip", "dropout"), tuple(NETS)),
        "weight_decay": [name for name in (*NETS, *LAYER_NETS) if name != "mil"],
        "parameters": [name for name in NETS if name != "attention_pool"],
        "token": [name for name, net in NETS.items() if net.family == "lstm"],
        "token_stats": [name for name, net in NETS.items() if net.sees_stats],
        "layers": (*OF_TOKENS, *TOKEN_DETECTORS[:2]),
        **dict.fromkeys(("k", "threshold"), tuple(wired)),
        **dict.fromkeys(("kl_weight", "free_bits"), tuple(gvae)),
    }


def recipe_of(settings: TrainSettings) -> Recipe:
    return Recipe(**{field.name: getattr(settings, field.name) for field in fields(Recipe)})


def _layers(names: Sequence[str], recipe: Recipe) -> Feature:
    positions = (*POSITIONS, *THINKING)
    if recipe.token not in positions:
        raise BadSetting(f"token={recipe.token}: must be one of {', '.join(positions)}")
    if recipe.token in THINKING and not {"states", "thinking_logprobs"} <= {*names}:
        raise BadSetting(
            f"token={recipe.token}: the store has no states of reasoning. Extract with answer_after= and tier=probe"
        )
    if "states" in names:
        return layers(positions.index(recipe.token), field="states", dtype=None)
    if "hidden" in names:
        return layers(cast("Token", recipe.token), field="hidden", dtype=None)
    for others in imported_fields():
        if imported := others.layer_feature(names):
            return imported
    raise NoDetector(f"the store has neither states (tier probe) nor hidden (tier full), only {', '.join(names)}")


def _graphs(names: Sequence[str], recipe: Recipe, wiring: Wiring) -> Feature:
    make = partial(graphs, recipe.k, threshold=recipe.threshold, wiring=wiring, dtype=None)
    if "nodes" in names and "edge_source" in names:
        return make(hidden="nodes", attention=STORED, tokens="answer")
    if "hidden" in names and "attention" in names:
        return make(tokens="answer" if "answer_len" in names and "prompt_len" in names else "all")
    for others in imported_fields():
        if imported := others.graph_feature(names, k=recipe.k, threshold=recipe.threshold, wiring=wiring):
            return imported
    raise NoDetector(
        "the store has neither nodes and edges (tiers graph and probe) nor hidden and attention (full), only "
        f"{', '.join(names)}"
    )


def _head_graphs(names: Sequence[str]) -> Feature:
    if "attention" in names:
        return HeadGraphFeature("attention")
    if "edge_source" in names and "self_attention" in names:
        return HeadGraphFeature("edge_heads" if "edge_heads" in names else "edges")
    raise NoDetector(
        f"the store has neither edges and heads (tiers graph, probe) nor attention (full), only {', '.join(names)}"
    )


def _auroc(labels: Labels, outcome: Outcome) -> float:
    return auroc(labels, outcome["score"].astype(np.float64))


def _unknown(name: str) -> BadSetting:
    known = [*OURS, GROUP]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(known)}, or package.module:Class"
    return BadSetting(f"model={name}: unknown detector; {hint}")


DETECTION = Task(2, "AUROC", _auroc, score_of)
