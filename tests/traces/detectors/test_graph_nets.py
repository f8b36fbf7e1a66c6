"""The nets over graphs: all graphs in one call are each graph alone, edges count, and the VAE has to explain them."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import millstream as ms
from millstream.core.batches import ColumnBatch, fetch_batch
from millstream.traces.detectors import DetectorSpec, Recipe, build_net, net_features
from millstream.traces.detectors.gnn import (
    ACTIVE,
    LOGVAR_LIMIT,
    NUM_ROUNDS,
    GraphEncoder,
    GraphVAE,
    HeadMessages,
    Messages,
    pool_layers,
    scatter_mean,
)
from millstream.traces.detectors.layer_nets import SpacedModel
from millstream.traces.detectors.net import DetectorNet
from millstream.traces.kind import TrainSettings
from millstream.training.devices import ScoringDevice
from millstream.training.study import Workplace
from millstream.training.task import FitResources
from support.making_traces import labelled, make_traces

RECIPE = Recipe(parameters=2000, dropout=0.0)
NUM, LAYERS = 12, 3
FIELDS = ["nodes", "edge_source", "edge_weight", "self_attention", "prompt_len", "answer_len"]
Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return labelled(make_traces(tmp_path_factory.mktemp("nets") / "traces", num=NUM, dim=8))


def batch_of(
    collection: ms.Collection, name: str, change: Callable[[ColumnBatch], ColumnBatch] = lambda fetched: fetched
) -> Batch:
    """What a net sees of all records; `change` alters what was fetched for it."""
    made: dict[str, Any] = {}
    for feature in net_features(name, collection.field_names, RECIPE):
        fetched = fetch_batch(collection, np.arange(len(collection)), feature.fields)
        assert isinstance(fetched, ColumnBatch)
        made |= feature(change(fetched))
    return {key: torch.as_tensor(value) for key, value in made.items()}


@pytest.mark.parametrize("tier", ["probe", "full"])
def test_of_many_layers_eight_are_read_at_even_steps(tier: str, tmp_path: Path):
    deep = labelled(make_traces(tmp_path / "traces", num=3, layers=12, dim=8, tier=tier))
    place = Workplace(TrainSettings(data="x", parameters=2000), ScoringDevice.default())
    model = DetectorSpec("gnn", deep.field_names).build(resources=FitResources(), place=place).model
    assert isinstance(model, SpacedModel)
    net = model.build(deep)
    assert model.num_layers == 12 and net.num_layers == len(model.layers) == 8  # pyright: ignore
    assert model.layers[-1] == -1 and set(np.diff(model.layers)) <= {1, 2}
    feature = model.kit.features[0]
    assert {field.split("[")[1] for field in feature.fields or () if "[" in field} == {
        ",".join(map(str, model.layers)) + "]"
    }
    few = next(iter(model.batches(deep)))
    whole = batch_of(deep, "gnn")
    graphs = [12 * record + 12 + layer for record in range(3) for layer in model.layers]
    for place, graph in enumerate(graphs):
        (a, b), (c, d) = few["ptr"][place : place + 2].tolist(), whole["ptr"][graph : graph + 2].tolist()
        torch.testing.assert_close(few["x"][a:b].float(), whole["x"][c:d].float())
        mine = (few["edge_index"][1] >= a) & (few["edge_index"][1] < b)
        theirs = (whole["edge_index"][1] >= c) & (whole["edge_index"][1] < d)
        torch.testing.assert_close(few["edge_index"][:, mine] - a, whole["edge_index"][:, theirs] - c)
        torch.testing.assert_close(few["edge_attr"][mine].float(), whole["edge_attr"][theirs].float())


def net_of(name: str, batch: Batch, recipe: Recipe = RECIPE) -> Any:
    torch.manual_seed(0)
    return build_net(name, batch, recipe).eval()


def scores(net: DetectorNet, batch: Batch) -> np.ndarray:
    with torch.inference_mode():
        return net.logits(batch)[0].numpy()


@pytest.fixture(scope="module")
def graphs(traces: ms.Collection) -> Batch:
    return batch_of(traces, "gnn")


def random_graph(num_nodes: int, num_edges: int, width: int, edge_dim: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_nodes)
    index = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    return (
        torch.randn(num_nodes, width, generator=generator),
        index,
        torch.rand(num_edges, edge_dim, generator=generator),
    )


# -- one call for all graphs


def test_encoding_all_graphs_at_once_equals_encoding_each_alone(graphs: Batch):
    net = net_of("gnn", graphs)
    width, edge_dim = net.encoder.project.in_features, net.encoder.rounds[0].forth.in_features
    nodes = torch.randn(len(graphs["x"]), width, generator=torch.Generator().manual_seed(0))
    edges = torch.rand(len(graphs["edge_attr"]), edge_dim, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = net.encoder(nodes, graphs["edge_index"], edges)
        for graph, (first, end) in enumerate(zip(graphs["ptr"][:-1], graphs["ptr"][1:], strict=True)):
            own = graphs["batch"][graphs["edge_index"][1]] == graph
            alone = net.encoder(nodes[first:end], graphs["edge_index"][:, own] - first, edges[own])
            assert together[first:end].numpy() == pytest.approx(alone.numpy(), abs=1e-4)
    assert len(graphs["ptr"]) == NUM * LAYERS + 1


def test_messages_flow_in_both_directions_with_weights_of_their_own():
    """Along 0 -> 1 -> 2 -> 3 -> 4, as far as there are rounds."""
    x, index = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    torch.manual_seed(0)
    encoder = GraphEncoder(3, 8, 1).eval()

    def heard_from(node: int) -> list[int]:
        changed = x.clone()
        changed[node] += 1
        with torch.inference_mode():
            difference = encoder(changed, index, torch.ones(4, 1)) - encoder(x, index, torch.ones(4, 1))
        return (difference.abs().amax(dim=1) > 1e-6).nonzero().flatten().tolist()

    assert heard_from(0) == list(range(1 + NUM_ROUNDS)) and heard_from(4) == list(range(4 - NUM_ROUNDS, 5))
    with torch.inference_mode():
        forwards, backwards = encoder(x, index, torch.ones(4, 1)), encoder(x, index.flip(0), torch.ones(4, 1))
    assert (forwards - backwards).abs().max() > 1e-3


def test_a_message_is_the_mean_over_the_neighbours_of_one_direction():
    x, index, values = random_graph(5, 9, 8, edge_dim=4)
    torch.manual_seed(0)
    messages = Messages(8, 4)
    with torch.inference_mode():
        found = messages(x, index, values)
        for node in range(5):
            heard = [x[node]]
            for hearer, sender, of_edge in ((1, 0, messages.forth), (0, 1, messages.back)):
                own = (index[hearer] == node).nonzero()[:, 0].tolist()
                sent = [(x[index[sender, edge]] + of_edge(values[edge])).relu() for edge in own]
                heard.append(torch.stack(sent).mean(dim=0) if sent else torch.zeros(8))
            assert found[node].numpy() == pytest.approx(messages.update(torch.cat(heard)).numpy(), abs=1e-5)


def test_nets_know_the_distance_of_tokens_and_which_are_of_the_answer(graphs: Batch):
    net = net_of("gnn", graphs)
    before = scores(net, graphs)
    further = {**graphs, "position": graphs["position"] * 2}
    assert np.abs(scores(net, further) - before).min() > 1e-5
    moved = {**graphs, "position": graphs["position"] + 100}  # of other prompts: no difference
    assert scores(net, moved) == pytest.approx(before, abs=1e-5)


def test_messages_over_heads_are_the_mean_over_edges():
    x, index, values = random_graph(5, 9, 8, edge_dim=4)
    torch.manual_seed(0)
    messages = HeadMessages(8, 4)
    with torch.inference_mode():
        found = messages(x, index, values)
        for node in range(5):
            own = (index[1] == node).nonzero()[:, 0].tolist()
            sent = [messages.say(torch.cat([x[index[0, edge]], values[edge]])) for edge in own]
            received = torch.stack(sent).mean(dim=0) if sent else torch.zeros(8)
            expected = x[node] + messages.hear(torch.cat([x[node], received])).relu()
            assert found[node].numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_a_graph_is_pooled_to_its_last_token_and_the_mean_of_its_answer(graphs: Batch):
    nodes = torch.randn(len(graphs["x"]), 4, generator=torch.Generator().manual_seed(0))
    whole = {key: value for key, value in graphs.items() if key != "answer"}
    read, read_whole = pool_layers(nodes, graphs, LAYERS), pool_layers(nodes, whole, LAYERS)
    assert read.shape == (NUM, LAYERS, 8)
    for graph, (first, end) in enumerate(zip(graphs["ptr"][:-1], graphs["ptr"][1:], strict=True)):
        own, is_answer = nodes[first:end], graphs["answer"][first:end]
        place = divmod(graph, LAYERS)
        assert read[place].tolist() == pytest.approx(
            [*own[-1].tolist(), *own[is_answer].mean(dim=0).tolist()], abs=1e-5
        )
        assert read_whole[place].tolist() == pytest.approx([*own[-1].tolist(), *own.mean(dim=0).tolist()], abs=1e-5)


# -- edges


def edges_of(batch: Batch, record: int, num_graphs: int) -> Tensor:
    return batch["batch"][batch["edge_index"][1]] // num_graphs == record


@pytest.mark.parametrize(("name", "num_graphs"), [("gnn", LAYERS), ("gvae", LAYERS), ("charm", 1)])
def test_edge_weights_change_the_score_of_their_record_only(name: str, num_graphs: int, traces: ms.Collection):
    batch = batch_of(traces, name)
    net = net_of(name, batch)
    before = scores(net, batch)
    own = edges_of(batch, 5, num_graphs)
    heavier = {**batch, "edge_attr": torch.where(own[:, None], batch["edge_attr"] + 0.5, batch["edge_attr"])}
    without = {**batch, "edge_index": batch["edge_index"][:, ~own], "edge_attr": batch["edge_attr"][~own]}
    for other in (heavier, without):
        change = np.abs(scores(net, other) - before)
        assert change[5] > 1e-4 and np.delete(change, 5).max() < 1e-5


@pytest.mark.parametrize(("name", "sees"), [("gnn", True), ("gnn_shuffled", True), ("gnn_unwired", False)])
def test_a_net_without_edges_ignores_attention(name: str, sees: bool, traces: ms.Collection):
    def altered(fetched: ColumnBatch) -> ColumnBatch:
        if "edge_weight" not in fetched.columns:
            return fetched
        weights: Sequence[Any] = fetched.columns["edge_weight"]
        return replace(fetched, columns={**fetched.columns, "edge_weight": [weight**2 for weight in weights]})

    batch, other = batch_of(traces, name), batch_of(traces, name, altered)
    net = net_of(name, batch)
    assert np.array_equal(scores(net, batch), scores(net, other)) is not sees
    assert sees or len(batch["edge_attr"]) == 0


def test_charm_reads_all_heads_where_the_store_has_them():
    (without,), (found,) = (net_features("charm", names, RECIPE) for names in (FIELDS, [*FIELDS, "edge_heads"]))
    assert "edge_heads" in (found.fields or ()) and "edge_heads" not in (without.fields or ())


def test_edges_are_scaled_for_each_layer_and_head(traces: ms.Collection):
    batch = batch_of(traces, "gnn")
    heads = torch.cat([batch["edge_attr"], 100 * batch["edge_attr"] + 7], dim=1)
    batch["edge_attr"] = heads * (1 + batch["batch"][batch["edge_index"][1]] % LAYERS)[:, None]
    net = net_of("gnn", batch)
    net.prepare([batch])
    layer = batch["batch"][batch["edge_index"][1]] % LAYERS
    scaled = net.edge_attr(batch["edge_attr"], layer)
    for number in range(LAYERS):
        own = scaled[layer == number]
        assert own.mean(dim=0).numpy() == pytest.approx(0, abs=0.1) and own[:, 0] == pytest.approx(own[:, 1], abs=1e-3)
    unwired = batch_of(traces, "gnn_unwired")
    null = net_of("gnn_unwired", unwired)
    null.prepare([unwired])
    assert np.isfinite(scores(null, unwired)).all()


def test_null_models_have_the_size_of_the_detector(traces: ms.Collection):
    for kind in ("gnn", "gvae"):
        nets = [net_of(name, batch_of(traces, name)) for name in (kind, f"{kind}_shuffled", f"{kind}_unwired")]
        shapes = [{key: value.shape for key, value in net.state_dict().items()} for net in nets]
        assert shapes[0] == shapes[1] == shapes[2]


# -- the graph VAE


def parts_of(net: GraphVAE, batch: Batch, seed: int = 0) -> dict[str, float]:
    torch.manual_seed(seed)
    _, parts = net.train()(batch, torch.ones(NUM), torch.ones(NUM))
    return {name: float(part) for name, part in parts.items()}


@pytest.fixture(scope="module")
def untouched(graphs: Batch) -> GraphVAE:
    return net_of("gvae", graphs)


@pytest.fixture
def vae(untouched: GraphVAE) -> GraphVAE:
    return deepcopy(untouched)


def test_the_vae_samples_in_training_but_scores_deterministically(vae: GraphVAE, graphs: Batch):
    assert np.array_equal(scores(vae, graphs), scores(vae, graphs))
    assert vae.logits(graphs)[1] == {}
    one, other = parts_of(vae, graphs, 0), parts_of(vae, graphs, 1)
    assert set(one) == {"bce", "node_loss", "edge_loss", "kl"}
    assert all(math.isfinite(value) for value in one.values()) and one != other
    assert one == parts_of(vae, graphs, 0)


def with_posterior(net: GraphVAE, mean: float, logvar: float) -> GraphVAE:
    """A net with the same posterior for every node."""
    latent = net.posterior.out_features // 2
    torch.nn.init.zeros_(net.posterior.weight)
    with torch.no_grad():
        net.posterior.bias[:latent], net.posterior.bias[latent:] = mean, logvar
    return net


@pytest.mark.parametrize(("mean", "logvar"), [(0.0, -2.0), (1.5, 0.0), (0.5, 1.0), (0.0, 20.0)])
def test_the_kl_is_that_of_a_gaussian_to_the_standard_normal(vae: GraphVAE, graphs: Batch, mean: float, logvar: float):
    found = parts_of(with_posterior(vae, mean, logvar), graphs)["kl"]
    logvar = min(logvar, LOGVAR_LIMIT)
    assert found == pytest.approx(0.1 * (mean**2 + math.exp(logvar) - 1 - logvar) / 2, rel=1e-5)


def test_units_below_the_free_bits_get_no_kl_gradient(vae: GraphVAE, graphs: Batch):
    with_posterior(vae, 0.1, 0.0).train()
    assert parts_of(vae, graphs)["kl"] == pytest.approx(0.1 * 0.05)
    torch.manual_seed(0)
    vae.logits(graphs)[1]["kl"].backward()
    assert vae.posterior.bias.grad is not None and not vae.posterior.bias.grad.any()
    with torch.no_grad():
        vae.posterior.bias[0] = 1.0  # only a unit above the free bits gets a gradient
    vae.posterior.bias.grad = None
    vae.logits(graphs)[1]["kl"].backward()
    assert vae.posterior.bias.grad is not None and vae.posterior.bias.grad.nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_kl_is_weighted_by_its_warm_up_share(vae: GraphVAE, graphs: Batch, share: float):
    whole = parts_of(vae, graphs)
    vae.kl_share.fill_(share)
    part = parts_of(vae, graphs)
    assert whole["kl"] > 0 and part["kl"] == pytest.approx(share * whole["kl"])
    assert {**part, "kl": 0} == {**whole, "kl": 0}


def test_the_vae_loss_is_scaled_by_its_weight(graphs: Batch):
    once, twice = (
        parts_of(net_of("gvae", graphs, replace(RECIPE, kl_weight=weight, free_bits=0.0)), graphs)
        for weight in (0.1, 0.2)
    )
    assert all(twice[name] == pytest.approx(2 * once[name], rel=1e-4) for name in ("kl", "node_loss", "edge_loss"))
    assert once["bce"] == twice["bce"]


def test_masked_nodes_are_hidden_from_the_encoder(vae: GraphVAE, graphs: Batch):
    torch.manual_seed(7)
    masked = torch.rand(len(graphs["x"])) < vae.masked  # the first random numbers the net draws
    assert 0.1 < masked.float().mean() < 0.3

    def seen(changed: Tensor) -> tuple[np.ndarray, float]:
        torch.manual_seed(7)
        other = {**graphs, "x": torch.where(changed[:, None], graphs["x"] + 1.0, graphs["x"])}
        with torch.no_grad():
            logits, terms = vae.train().logits(other)
        return logits.numpy(), float(terms["node_loss"])

    nothing = torch.zeros_like(masked)
    assert np.array_equal(seen(masked)[0], seen(nothing)[0])
    assert seen(masked)[1] != seen(nothing)[1]  # they must be reconstructed
    assert np.abs(seen(~masked)[0] - seen(nothing)[0]).min() > 0


def test_gradients_reach_every_parameter_where_no_node_is_masked(vae: GraphVAE, graphs: Batch):
    vae.masked = 0.0
    loss, parts = vae.train()(graphs, torch.ones(NUM), torch.ones(NUM))
    assert float(parts["node_loss"]) == 0
    loss.backward()
    assert [name for name, parameter in vae.named_parameters() if parameter.grad is None] == []


def test_negative_pairs_are_of_the_same_graph(vae: GraphVAE, graphs: Batch):
    """With equal latents within a graph and different ones between graphs, edges and negative pairs look the same."""
    latent = vae.posterior.out_features // 2
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(NUM * LAYERS, latent, generator=generator)[graphs["batch"]]
    likely = (z.square().sum(dim=1) / latent**0.5)[graphs["edge_index"][1]]
    expected = (torch.nn.functional.softplus(-likely).mean() + torch.nn.functional.softplus(likely).mean()) / 2
    assert vae._edge_loss(z, graphs).item() == pytest.approx(float(expected), abs=1e-5)


def test_training_improves_the_reconstruction_of_nodes_and_edges(vae: GraphVAE, graphs: Batch):
    def mean_parts() -> dict[str, float]:
        found = [parts_of(vae, graphs, seed) for seed in range(5)]
        return {name: sum(parts[name] for parts in found) / 5 for name in found[0]}

    before = mean_parts()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-2)
    target = torch.arange(NUM) % 2.0
    for step in range(40):
        torch.manual_seed(100 + step)
        loss, _ = vae(graphs, target, torch.ones(NUM))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = mean_parts()
    assert after["node_loss"] < 0.9 * before["node_loss"]
    assert after["edge_loss"] < 0.9 * before["edge_loss"]


def test_active_units_are_those_that_vary_between_nodes(vae: GraphVAE, graphs: Batch):
    with torch.inference_mode():
        mu, _ = vae.encode(vae.scaled_nodes(graphs), graphs)
    found = float(vae.measures(graphs)["active_units"])
    assert found == np.count_nonzero(mu.numpy().var(axis=0, ddof=1) > ACTIVE) > 0
    assert float(with_posterior(vae, 1.0, 0.0).measures(graphs)["active_units"]) == 0


def test_a_scattered_mean_is_that_of_the_rows_of_each_place_and_zero_without_any():
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([4, 0, 4, 2, 0, 4, 2])
    found = scatter_mean(rows, places, 6)
    for place in range(6):
        expected = rows[places == place].mean(0) if (places == place).any() else torch.zeros(3)
        torch.testing.assert_close(found[place], expected)
