"""What every trained detector promises: a record's score is its own, all of a net learns, inputs come scaled."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import millstream as ms
from millstream.core.batches import fetch_batch
from millstream.errors import BadSetting, NoDetector
from millstream.traces.detectors import NETS, Recipe, build_net, net_features, scores_of
from millstream.traces.detectors.net import LIMIT, DetectorNet, LayerLSTM, Scale, match_width
from millstream.training.task import Moments, count_parameters
from support.effort import num_examples
from support.making_traces import labelled, make_traces

FAMILIES = ["lstm", "gnn", "gvae", "charm"]
NAMES = [name for name in NETS if NETS[name].family in FAMILIES]
RECIPE = Recipe(parameters=2000, dropout=0.0)
NUM, LAYERS = 40, 3


class Zoo:
    """Nets with chance as weights, scaled as for training, and batches for them: each made once."""

    def __init__(self, collection: ms.Collection) -> None:
        self.collection = collection
        self.batch, self._net = cache(self._batch), cache(self._built)

    def net(self, name: str) -> DetectorNet:
        return deepcopy(self._net(name))

    def _batch(self, name: str, numbers: Sequence[int] = range(NUM)) -> dict[str, Tensor]:
        made: dict[str, Any] = {}
        for feature in net_features(name, self.collection.field_names, RECIPE):
            made |= feature(fetch_batch(self.collection, np.array(numbers, np.int64), feature.fields))
        return {key: torch.as_tensor(value) for key, value in made.items()}

    def _built(self, name: str) -> DetectorNet:
        torch.manual_seed(0)
        net = build_net(name, self.batch(name), RECIPE)
        net.prepare([self.batch(name)])
        return net.eval()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(labelled(make_traces(tmp_path_factory.mktemp("nets") / "traces", num=NUM, dim=8)))


def scores(net: DetectorNet, batch: dict[str, Tensor]) -> np.ndarray:
    with torch.inference_mode():
        return net.logits(batch)[0].float().numpy()


# -- nets


@pytest.mark.parametrize("name", NAMES)
def test_the_score_of_a_record_is_the_same_in_any_batch_and_order(name: str, zoo: Zoo):
    net = zoo.net(name)
    numbers = (3, 4, 11, 25, 38)
    together = scores(net, zoo.batch(name, numbers))
    assert together.shape == (len(numbers),) and np.ptp(together) > 1e-3
    alone = [scores(net, zoo.batch(name, (number,)))[0] for number in numbers]
    assert together == pytest.approx(np.array(alone), abs=1e-5)
    assert scores(net, zoo.batch(name, numbers[::-1])) == pytest.approx(together[::-1], abs=1e-5)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name: str, size: int, zoo: Zoo):
    """Processes that train together wait for all of them: one that is left out stops the run."""
    net = zoo.net(name).train()
    loss, _ = net(zoo.batch(name, range(size)), torch.ones(size), torch.ones(size))
    loss.backward()
    assert [key for key, parameter in net.named_parameters() if parameter.grad is None] == []
    if NETS[name].wiring != "none":
        assert [key for key, parameter in net.named_parameters() if not parameter.grad.any()] == []  # pyright: ignore
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())  # pyright: ignore


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_weighted_cross_entropy_plus_the_reported_terms(name: str, zoo: Zoo):
    net = zoo.net(name).train()
    batch = zoo.batch(name, range(6))
    target, weight = torch.tensor([0.0, 1, 1, 0, 1, 0]), torch.tensor([0.5, 2, 2, 0.5, 2, 0.5])
    torch.manual_seed(3)
    loss, parts = net(batch, target, weight)
    torch.manual_seed(3)
    logits, _ = net.logits(batch)
    chance = 1 / (1 + np.exp(-logits.detach().double().numpy()))
    entropy = -np.log(np.where(target.numpy() == 1, chance, 1 - chance))
    assert float(parts["bce"]) == pytest.approx(float((entropy * weight.numpy()).mean()), abs=1e-5)
    assert loss.item() == pytest.approx(sum(map(float, parts.values())), abs=1e-5)
    assert not any(part.requires_grad for part in parts.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_gives_about_the_same_scores_and_a_loss(name: str, zoo: Zoo):
    net = zoo.net(name)
    batch = zoo.batch(name, range(10))
    whole = scores(net, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert scores(net, batch) == pytest.approx(whole, abs=0.05)
        loss, _ = net.train()(batch, torch.zeros(10), torch.ones(10))
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", FAMILIES)
def test_inputs_are_scaled_to_mean_0_and_deviation_1_per_layer(name: str, zoo: Zoo):
    net, batch = zoo.net(name), zoo.batch(name)
    if net.stats is not None:
        is_scaled(net.stats(batch["stats"]))
    family = NETS[name].family
    if family == "lstm":
        for layer in range(LAYERS + 1):
            is_scaled(net.layers(batch["layers"])[:, layer])  # pyright: ignore
    elif family == "charm":
        is_scaled(net.x(batch["x"]))  # pyright: ignore
        is_scaled(net.edge_attr(batch["edge_attr"]))  # pyright: ignore
    else:
        rows = net.scaled_nodes(batch)  # pyright: ignore
        for layer in range(LAYERS):
            is_scaled(rows[batch["batch"] % LAYERS == layer])


def is_scaled(rows: Tensor) -> None:
    """But for columns that are constant, and the few values beyond the limit."""
    varies = rows.std(dim=0) > 1e-3
    assert varies.any() and rows.abs().max() <= LIMIT
    assert rows.mean(dim=0).numpy() == pytest.approx(0, abs=0.02)
    assert rows[:, varies].std(dim=0, correction=0).numpy() == pytest.approx(1, abs=0.05)


def test_the_lstm_uses_the_order_of_layers_and_the_token_statistics(zoo: Zoo):
    net, batch = zoo.net("lstm"), zoo.batch("lstm")
    before = scores(net, batch)
    swapped = net.layers.mean.flip(0), net.layers.factor.flip(0)  # pyright: ignore
    other = {**batch, "stats": batch["stats"].roll(1, 0)}
    assert np.abs(scores(net, other) - before).max() > 1e-3
    net.layers.mean.copy_(swapped[0]), net.layers.factor.copy_(swapped[1])  # pyright: ignore
    assert np.abs(scores(net, {**batch, "layers": batch["layers"].flip(1)}) - before).max() > 1e-3
    assert "stats" not in zoo.batch("lstm_states", (0,))
    assert zoo.net("lstm_states").stats is None


@pytest.mark.parametrize("place", ["last_prompt", "first_answer", "last_answer", "mean_answer"])
def test_the_lstm_reads_the_token_in_the_settings(place: str, zoo: Zoo):
    feature = net_features("lstm", zoo.collection.field_names, Recipe(token=place))[0]
    found = np.asarray(feature(fetch_batch(zoo.collection, np.array([3, 9]), feature.fields))["layers"])
    states = [np.asarray(zoo.collection[number]["states"]) for number in (3, 9)]  # pyright: ignore
    position = ["last_prompt", "first_answer", "last_answer", "mean_answer"].index(place)
    assert np.array_equal(found, np.stack([state[:, position] for state in states]).astype(np.float32))


def test_the_lstm_reads_reasoning_where_the_store_has_its_states(zoo: Zoo):
    names = zoo.collection.field_names
    with pytest.raises(BadSetting, match="answer_after="):
        net_features("lstm", names, Recipe(token="mean_thinking"))
    feature: Any = net_features("lstm", [*names, "thinking_logprobs"], Recipe(token="mean_thinking"))[0]
    assert 5 in [getattr(part, "token", None) for part in getattr(feature, "features", [feature])]


# -- width


@pytest.mark.parametrize("name", ["lstm", "gnn", "charm"])
def test_a_field_that_a_net_needs_and_the_store_lacks_is_named_with_the_net(name: str):
    fields = {"lstm": ["hidden"], "gnn": ["nodes", "edge_source"], "charm": ["attention"]}[name]
    with pytest.raises(NoDetector, match=f"{name} .*prompt_len|prompt_len.* {name}"):
        net_features(name, ["question_id", *fields], Recipe())


class Own:
    def __init__(self, scores: object) -> None:
        self.scores = scores

    def score(self, collection: object) -> object:
        return self.scores


@pytest.mark.parametrize(
    ("scores", "found"),
    [([0.5] * 3, r"\(3,\)"), (np.zeros((4, 2)), r"\(4, 2\)"), (None, "NoneType"), (["a"] * 4, "list")],
)
def test_an_own_detector_that_does_not_return_one_score_per_record_is_named(scores: object, found: str):
    with pytest.raises(BadSetting, match=f"Own.score returned .*{found}.*4"):
        scores_of(Own(scores), range(4))
    assert scores_of(Own([1, 2, 3, 4]), range(4)).scores.tolist() == [1, 2, 3, 4]


def family_of(name: str) -> Any:
    if name == "lstm":
        return LayerLSTM
    from millstream.traces.detectors.gnn import GraphLSTM, GraphVAE

    return {"gnn": GraphLSTM, "gvae": GraphVAE}[name]


@pytest.mark.parametrize("dim", [16, 768, 4096])
@pytest.mark.parametrize("name", ["lstm", "gnn", "gvae"])
def test_nets_have_the_requested_number_of_parameters_within_a_tenth(name: str, dim: int):
    edges = {} if name == "lstm" else {"edge_dim": 1}
    build = partial(family_of(name), num_layers=33, dim=dim, num_stats=20, dropout=0.2, **edges)
    with torch.device("meta"):
        found = count_parameters(build(match_width(build, 100_000)))
    assert found == pytest.approx(100_000, rel=0.1)


@pytest.mark.parametrize("parameters", [1, 2000, 31_234, 100_000, 1_000_000])
def test_the_width_found_is_the_nearest_possible(parameters: int):
    def build(width: int) -> nn.Module:
        return nn.Linear(width, width)

    found = match_width(build, parameters)
    assert found >= 8 and found % 2 == 0
    nearest = min(abs(width * (width + 1) - parameters) for width in range(8, 4097, 4))
    assert abs(found * (found + 1) - parameters) <= nearest


# -- scales


def test_a_scale_maps_constants_to_zero_and_clips_outliers():
    rows = torch.tensor([[3.0, 0.0], [3.0, 2.0]])
    moments = Moments()
    moments.add(rows)
    scale = Scale(1, 2)
    scale.set(moments)
    assert scale(rows).tolist() == [[0.0, -1.0], [0.0, 1.0]]
    assert scale(torch.tensor([[3.0, 1e6], [3.5, -1e6]])).tolist() == [[0.0, LIMIT], [0.5, -LIMIT]]


def test_a_scale_takes_the_group_of_each_row_or_the_second_to_last_axis():
    scale = Scale(2, 1)
    moments = Moments()
    rows = torch.tensor([[1.0], [100.0], [3.0], [300.0]])
    moments.add(rows, torch.tensor([0, 1, 0, 1]), num_groups=2)
    scale.set(moments)
    assert scale(rows, torch.tensor([0, 1, 0, 1]))[:, 0].tolist() == pytest.approx([-1, -1, 1, 1])
    assert scale(rows.reshape(2, 2, 1)).flatten().tolist() == pytest.approx([-1, -1, 1, 1])


def test_scales_are_saved_with_the_weights(zoo: Zoo):
    net = zoo.net("lstm")
    torch.manual_seed(1)
    other = build_net("lstm", zoo.batch("lstm", (0,)), RECIPE)
    other.load_state_dict(net.state_dict())
    batch = zoo.batch("lstm", range(5))
    assert np.array_equal(scores(other.eval(), batch), scores(net, batch))


@settings(max_examples=num_examples(50), deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    num_groups=st.integers(1, 3),
    offset=st.sampled_from([0.0, 1e3, -1e7]),
)
def test_moments_equal_numpy_however_rows_are_batched(seed: int, sizes: list[int], num_groups: int, offset: float):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(sum(sizes) + 1, 3)) * [1e-2, 1.0, 50.0] + offset
    group = rng.integers(0, num_groups, len(rows))
    moments = Moments()
    ends = np.cumsum([*sizes, 1])
    for end, size in zip(ends, [*sizes, 1], strict=True):
        part = slice(end - size, end)
        moments.add(torch.from_numpy(rows[part]), torch.from_numpy(group[part]), num_groups=num_groups)
    mean, factor = moments.scaling()
    assert mean.dtype == factor.dtype == torch.float32 and mean.shape == (num_groups, 3)
    for number in range(num_groups):
        own = rows[group == number]
        if len(own):
            assert mean[number].numpy() == pytest.approx(own.mean(axis=0), rel=1e-6, abs=1e-6)
            deviation = own.std(axis=0)
            expected = 1 / np.where(deviation < 1e-5, 1, deviation)
            assert factor[number].numpy() == pytest.approx(expected, rel=1e-4)
        else:
            assert mean[number].tolist() == [0, 0, 0] and factor[number].tolist() == [1, 1, 1]


def test_moments_of_half_precision_inputs_are_accumulated_in_full_precision():
    rows = torch.full((5000, 1), 60000.0, dtype=torch.float16)
    moments = Moments()
    moments.add(rows)
    assert moments.scaling()[0].item() == 60000.0
