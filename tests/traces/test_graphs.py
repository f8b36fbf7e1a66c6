"""Token graphs equal those of a slow reference, from attention or stored edges, in any batch."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.core.batches import ColumnBatch, fetch_batch
from millstream.core.features import Feature
from millstream.traces.graphs import THRESHOLD, HeadGraphFeature
from millstream.traces.llm.fields import NODE_DIM, NUM_EDGES
from support.effort import num_examples
from support.making_traces import make_traces

Edges = dict[tuple[int, int], float]  # from one token to another, and its weight
NUM, DIM, LAYERS = 40, 16, 3
FEW = settings(max_examples=num_examples(40), deadline=None)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return ms.open(make_traces(tmp_path_factory.mktemp("graphs") / "full", num=NUM, tier="full"))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return ms.open(make_traces(tmp_path_factory.mktemp("graphs") / "probe", num=NUM, tier="probe"))


def stored(k: int | None = 8, **options: Any) -> Feature:
    return ms.features.graphs(k, hidden="nodes", attention="edges", **options)


def make(feature: Feature, collection: ms.Collection, numbers: Sequence[int]) -> dict[str, Any]:
    return dict(feature(fetch_batch(collection, np.array(numbers, np.int64), feature.fields)))


class Graph(NamedTuple):
    """One graph of a batch, its nodes numbered from 0; repeated edges are counted by their list."""

    x: np.ndarray
    edges: list[tuple[int, int, float]]
    answer: list[bool]
    last: int
    position: list[int]


def each_graph(batch: Mapping[str, Any]) -> Iterator[Graph]:
    """The graphs of a batch; checks that every node and edge belongs to exactly one."""
    ptr, (source, target) = batch["ptr"].tolist(), batch["edge_index"]
    assert batch["edge_attr"].shape == (len(source), 1) and batch["x"].shape[0] == ptr[-1] == len(batch["batch"])
    assert np.array_equal(batch["batch"][source], batch["batch"][target])
    for graph, (first, end) in enumerate(pairwise(ptr)):
        assert (batch["batch"][first:end] == graph).all()
        own = np.flatnonzero(batch["batch"][target] == graph)
        weights = batch["edge_attr"][own, 0].tolist()
        ends = zip((source[own] - first).tolist(), (target[own] - first).tolist(), weights, strict=True)
        answer = batch["answer"][first:end].tolist() if "answer" in batch else []
        last, position = int(batch["last"][graph]) - first, batch["position"][first:end].tolist()
        yield Graph(batch["x"][first:end], list(ends), answer, last, position)


# -- records of chance


def record_of(seed: int, *, tokens: int, prompt: int, answer: int, layers: int = 2, heads: int = 2) -> dict[str, Any]:
    """A trace in both forms: all of its attention, and the strongest edges of every token."""
    rng = np.random.default_rng(seed)
    attention = np.tril(rng.random((layers, heads, tokens, tokens), np.float32) ** 3)
    attention /= attention.sum(axis=-1, keepdims=True)
    source = np.full((layers, tokens, NUM_EDGES), -1, np.int16)
    weight = np.zeros((layers, tokens, NUM_EDGES), np.float32)
    for layer, i in np.ndindex(layers, tokens):
        mean = attention[layer, :, i, :i].mean(axis=0)
        strongest = np.argsort(-mean)[:NUM_EDGES]
        source[layer, i, : len(strongest)], weight[layer, i, : len(strongest)] = strongest, mean[strongest]
    first = max(prompt - 1, 0)
    of_heads = np.zeros((layers, tokens - first, heads, NUM_EDGES), np.float32)
    for layer, row, slot in np.argwhere(source[:, first:] >= 0):
        of_heads[layer, row, :, slot] = attention[layer, :, row + first, source[layer, row + first, slot]]
    states = rng.normal(size=(layers + 1, tokens, 4)).astype(np.float32)
    own = attention.diagonal(axis1=2, axis2=3)[:, :, first:]
    return {
        "hidden": states,
        "nodes": states,
        "attention": attention,
        "edge_source": source,
        "edge_weight": weight,
        "edge_heads": of_heads,
        "self_attention": own,
        "prompt_len": prompt,
        "answer_len": answer,
    }


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Long and short prompts, empty answers, with and without a token that ends them."""
    prompt, answer = draw(st.integers(1, 12)), draw(st.integers(0, 4))
    after = 1 if answer == 0 else draw(st.integers(0, 2))
    return record_of(draw(st.integers(0, 10**6)), tokens=prompt + answer + after, prompt=prompt, answer=answer)


def batch_of(feature: Feature, given: Sequence[Mapping[str, Any]], numbers: Sequence[int] | None = None) -> Any:
    columns = {name: [record[name] for record in given] for name in feature.fields or ()}
    return dict(feature(ColumnBatch(np.array(range(len(given)) if numbers is None else numbers), columns)))


def slow_edges(mean_TT: np.ndarray, k: int | None, threshold: float, self_loops: bool, targets: Sequence[int]) -> Edges:
    found: Edges = {}
    for i in targets:
        row = {j: float(mean_TT[i, j]) for j in range(i + 1 if self_loops else i) if mean_TT[i, j] > threshold}
        strongest = sorted(row, key=lambda j: -row[j])
        found |= {(j, i): row[j] for j in (strongest if k is None else strongest[:k])}
    return found


def slow_graphs(record: Mapping[str, Any], k: int | None, threshold: float, self_loops: bool, tokens: str) -> Any:
    """Of each layer: its tokens, their states, its edges between tokens, and which of them are the answer."""
    prompt, count = record["prompt_len"], record["hidden"].shape[1]
    answer = list(range(prompt, prompt + record["answer_len"])) or [prompt]
    for layer, weights in enumerate(record["attention"]):
        looking = [prompt - 1, *answer] if tokens == "answer" else list(range(count))
        edges = slow_edges(weights.mean(axis=0), k, threshold, self_loops, looking)
        nodes = sorted({*looking, *(source for source, _ in edges)})
        yield nodes, record["hidden"][layer + 1][nodes], edges, [node in answer for node in nodes]


def assert_is(graph: Graph, nodes: list[int], x: np.ndarray, edges: Edges) -> None:
    assert np.array_equal(graph.x, x)
    found = {(nodes[a], nodes[b]): weight for a, b, weight in graph.edges}
    assert len(found) == len(graph.edges), "an edge is there twice"
    assert found == pytest.approx(edges, abs=1e-6)


# -- graphs of layers


@FEW
@given(
    given_records=st.lists(records(), min_size=1, max_size=3),
    k=st.sampled_from([1, 3, 8, None]),
    threshold=st.sampled_from([0.0, 0.1, 0.3]),
    self_loops=st.booleans(),
    tokens=st.sampled_from(["all", "answer"]),
)
def test_graphs_of_attention_equal_those_made_token_by_token(
    given_records: list[dict[str, Any]], k: int | None, threshold: float, self_loops: bool, tokens: Any
):
    feature = ms.features.graphs(k, threshold=threshold, self_loops=self_loops, tokens=tokens)
    batch = batch_of(feature, given_records)
    found = each_graph(batch)
    for record in given_records:
        for nodes, x, edges, answer in slow_graphs(record, k, threshold, self_loops, tokens):
            graph = next(found)
            assert_is(graph, nodes, x, edges)
            assert graph.last == len(nodes) - 1 and graph.position == nodes
            assert graph.answer == (answer if tokens == "answer" else [])
    assert next(found, None) is None
    assert batch["num_layers"].tolist() == [2] * len(given_records)


@FEW
@given(
    given_records=st.lists(records(), min_size=1, max_size=3),
    k=st.sampled_from([1, 3, 8, None]),
    threshold=st.sampled_from([0.0, 0.1]),
    tokens=st.sampled_from(["all", "answer"]),
)
def test_graphs_of_stored_edges_equal_those_of_the_attention(
    given_records: list[dict[str, Any]], k: int | None, threshold: float, tokens: Any
):
    """With `k=None` all that are stored: eight."""
    batch = batch_of(stored(k, threshold=threshold, tokens=tokens), given_records)
    found = each_graph(batch)
    for record in given_records:
        for nodes, x, edges, _ in slow_graphs(record, 8 if k is None else k, threshold, False, tokens):
            assert_is(next(found), nodes, x, edges)


@FEW
@given(
    given_records=st.lists(records(), min_size=1, max_size=3),
    k=st.sampled_from([1, 3, 8, None]),
    threshold=st.sampled_from([0.0, 0.1]),
    wiring=st.sampled_from(["attention", "shuffled", "none"]),
    from_stored=st.booleans(),
)
def test_edges_with_all_heads_are_those_of_the_mean(
    given_records: list[dict[str, Any]], k: int | None, threshold: float, wiring: Any, from_stored: bool
):
    """In the same order, shuffled or not; and they have the attention of each head from the source they had."""
    kind = stored if from_stored else ms.features.graphs
    heads, mean = (
        batch_of(kind(k, threshold=threshold, tokens="answer", wiring=wiring, heads=heads), given_records)
        for heads in ("all", "mean")
    )
    assert heads["edge_attr"].shape == (len(mean["edge_attr"]), 2) and heads["edge_attr"].dtype == np.float32
    assert heads["edge_attr"].mean(axis=1, keepdims=True) == pytest.approx(mean["edge_attr"], abs=1e-6)
    assert all(np.array_equal(heads[name], mean[name]) for name in mean if name != "edge_attr")
    if wiring == "attention":
        source, target = heads["edge_index"]
        found = zip(heads["position"][source], heads["position"][target], heads["batch"][target], strict=True)
        for (j, i, graph), values in zip(found, heads["edge_attr"], strict=True):
            record, layer = divmod(int(graph), 2)
            assert np.array_equal(values, given_records[record]["attention"][layer, :, i, j])


def test_all_heads_of_stored_edges_are_known_for_answers_only():
    with pytest.raises(ValueError, match="answer"):
        stored(heads="all")
    record = record_of(0, tokens=6, prompt=3, answer=2)
    with pytest.raises(ValueError, match=r"record 9: 'edge_heads' \(2, 1, 2, 8\)"):
        batch_of(stored(tokens="answer", heads="all"), [record | {"edge_heads": record["edge_heads"][:, :1]}], [9])


@pytest.mark.parametrize("tokens", ["all", "answer"])
def test_a_store_with_edges_gives_the_graphs_of_one_with_all_attention(
    full: ms.Collection, probe: ms.Collection, tokens: Any
):
    """Up to float16, in which the one keeps weights of heads and the other their mean."""
    whole = make(ms.features.graphs(8, tokens=tokens), full, range(NUM))
    kept = make(stored(8, tokens=tokens), probe, range(NUM))
    rng = np.random.default_rng(0)
    rng.normal(size=DIM)
    projection = rng.normal(size=(DIM, NODE_DIM)) / DIM**0.5  # as make_traces draws it
    assert np.array_equal(kept["ptr"], whole["ptr"]) and np.array_equal(kept["last"], whole["last"])
    assert kept["x"] == pytest.approx(whole["x"] @ projection, abs=0.02)
    for ours, theirs in zip(each_graph(kept), each_graph(whole), strict=True):
        assert ours.answer == theirs.answer
        assert {(a, b): w for a, b, w in ours.edges} == pytest.approx({(a, b): w for a, b, w in theirs.edges}, abs=1e-3)
    assert len(kept["edge_attr"]) > 5 * NUM * LAYERS


@pytest.mark.parametrize(
    ("prompt", "answer", "tokens", "nodes"),
    [
        (3, 2, 6, [2, 3, 4]),  # the token that ends the answer is not part of it
        (3, 2, 5, [2, 3, 4]),  # cut off before there was one
        (3, 0, 4, [2, 3]),  # an empty answer has that token alone
        (1, 1, 3, [0, 1]),
        (1, 0, 2, [0, 1]),
    ],
)
@pytest.mark.parametrize("feature", [ms.features.graphs(tokens="answer"), stored(tokens="answer")])
def test_answer_and_last_token_are_marked(feature: Feature, prompt: int, answer: int, tokens: int, nodes: list[int]):
    record = record_of(5, tokens=tokens, prompt=prompt, answer=answer)
    graphs = list(each_graph(batch_of(feature, [record])))
    assert len(graphs) == 2
    for layer, graph in enumerate(graphs):
        states = record["hidden"][layer + 1]
        assert np.array_equal(graph.x[graph.answer], states[nodes[1:]])
        assert np.array_equal(graph.x[graph.last], states[nodes[-1]])
        assert {b for _, b, _ in graph.edges} <= {len(graph.x) - len(nodes) + place for place in range(len(nodes))}
        assert len({b for _, b, _ in graph.edges}) == len(nodes) - (prompt == 1)  # the first token of all has none


@pytest.mark.parametrize(("prompt", "answer", "tokens"), [(3, 2, 6), (3, 2, 5), (3, 0, 4), (3, 0, 5), (1, 0, 3)])
def test_the_last_token_of_a_graph_is_the_one_the_lstm_reads(prompt: int, answer: int, tokens: int):
    """Also of an empty answer that was ended by a stop string of several tokens."""
    record = record_of(5, tokens=tokens, prompt=prompt, answer=answer)
    read = batch_of(ms.features.layers("last_answer"), [record])["layers"][0, 1:]
    for feature in (ms.features.graphs(tokens="answer"), stored(tokens="answer")):
        batch = batch_of(feature, [record])
        assert np.array_equal(batch["x"][batch["last"]], read)


@pytest.mark.parametrize("make_feature", [ms.features.graphs, stored])
def test_a_record_has_the_same_graphs_in_any_batch(make_feature: Any, full: ms.Collection, probe: ms.Collection):
    collection = probe if make_feature is stored else full
    for wiring in ("attention", "shuffled", "none"):
        feature = make_feature(tokens="answer", wiring=wiring)
        numbers = [7, 31, 2, 2]
        singles = [list(each_graph(make(feature, collection, [number]))) for number in numbers]
        alone = [graph for graphs in singles for graph in graphs]
        together = list(each_graph(make(feature, collection, numbers)))
        assert len(alone) == len(together) == LAYERS * len(numbers)
        for ours, theirs in zip(alone, together, strict=True):
            assert np.array_equal(ours.x, theirs.x) and ours[1:] == theirs[1:]
        taken = make(feature, collection.subset([5, 31, 7]), [1])  # 31 again, by another number
        assert [graph[1:] for graph in each_graph(taken)] == [graph[1:] for graph in singles[1]]


@pytest.mark.parametrize("make_feature", [ms.features.graphs, stored])
@pytest.mark.parametrize("tokens", ["all", "answer"])
def test_records_of_different_models_can_share_a_batch(make_feature: Any, tokens: Any):
    """With other numbers of layers and tokens."""
    given_records = [record_of(seed, tokens=6 + seed, prompt=3, answer=2, layers=2 + seed) for seed in range(3)]
    feature = make_feature(4, tokens=tokens)
    batch = batch_of(feature, given_records)
    assert batch["num_layers"].tolist() == [2, 3, 4]
    found = each_graph(batch)
    for record in given_records:
        for nodes, x, edges, _ in slow_graphs(record, 4, 0.0, False, tokens):
            assert_is(next(found), nodes, x, edges)
    assert next(found, None) is None


def test_states_can_keep_the_precision_they_are_stored_in():
    record = record_of(0, tokens=6, prompt=3, answer=2)
    record["nodes"] = record["nodes"].astype(np.float16)
    kept, whole = (batch_of(stored(dtype=dtype), [record]) for dtype in (None, "float32"))
    assert kept["x"].dtype == np.float16 and np.array_equal(kept["x"], whole["x"])
    assert kept["edge_attr"].dtype == whole["edge_attr"].dtype == np.float32


def test_an_empty_batch_has_no_graphs():
    batch = batch_of(ms.features.graphs(tokens="answer"), [])
    assert batch["ptr"].tolist() == [0] and batch["edge_index"].shape == (2, 0) and len(batch["answer"]) == 0


# -- null graphs


def test_unwired_graphs_have_answer_nodes_and_no_edges(full: ms.Collection, probe: ms.Collection):
    for feature, collection in (
        (ms.features.graphs(tokens="answer", wiring="none"), full),
        (stored(tokens="answer", wiring="none"), probe),
    ):
        batch = make(feature, collection, range(NUM))
        assert batch["edge_index"].shape == (2, 0) and batch["edge_attr"].shape == (0, 1)
        answers = np.repeat(collection.column("answer_len").to_numpy(), LAYERS)
        assert np.array_equal(np.diff(batch["ptr"]), answers + 1)
        assert np.array_equal(np.add.reduceat(batch["answer"], batch["ptr"][:-1], dtype=int), answers)


def tokens_of(record: Mapping[str, Any], layer: int, graph: Graph) -> list[int]:
    """Which tokens the nodes are: states are all different."""
    return [int(np.flatnonzero((record["hidden"][layer + 1] == row).all(axis=1))[0]) for row in graph.x]


@FEW
@given(record=records(), tokens=st.sampled_from(["all", "answer"]), from_stored=st.booleans())
def test_shuffled_graphs_have_as_many_edges_with_the_same_weights_from_earlier_tokens(
    record: dict[str, Any], tokens: Any, from_stored: bool
):
    kind = stored if from_stored else ms.features.graphs
    wired = each_graph(batch_of(kind(3, tokens=tokens), [record]))
    shuffled = each_graph(batch_of(kind(3, tokens=tokens, wiring="shuffled"), [record]))
    for layer, (ours, theirs) in enumerate(zip(wired, shuffled, strict=True)):
        before, after = tokens_of(record, layer, ours), tokens_of(record, layer, theirs)
        assert sorted((before[b], w) for _, b, w in ours.edges) == sorted((after[b], w) for _, b, w in theirs.edges)
        assert all(after[a] < after[b] for a, b, _ in theirs.edges)
        assert len({(a, b) for a, b, _ in theirs.edges}) == len(theirs.edges)
        assert np.array_equal(theirs.x, record["hidden"][layer + 1][after]) and after == sorted(set(after))
        assert after[theirs.last] == before[ours.last]
        kept = {node for node, is_answer in zip(after, theirs.answer, strict=False) if is_answer}
        assert kept == {node for node, is_answer in zip(before, ours.answer, strict=False) if is_answer}


def test_shuffled_sources_are_uniform_over_earlier_tokens():
    record = record_of(0, tokens=7, prompt=5, answer=1, layers=1)
    counts = np.zeros((7, 7))
    feature = ms.features.graphs(2, wiring="shuffled")
    batch = batch_of(feature, [record] * 600, range(1000, 1600))
    for graph in each_graph(batch):
        for source, target, _ in graph.edges:
            counts[target, source] += 1
    for target in range(2, 7):
        assert counts[target, :target].sum() == 1200 and counts[target, target:].sum() == 0
        assert counts[target, :target] == pytest.approx(1200 / target, rel=0.25)


def test_shuffling_differs_between_records_and_is_reproducible():
    record = record_of(0, tokens=12, prompt=8, answer=3)
    feature = ms.features.graphs(4, wiring="shuffled")
    one, other, again = (batch_of(feature, [record], [number])["edge_index"] for number in (3, 4, 3))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


# -- what does not fit


def test_unknown_options_of_graphs_are_refused():
    with pytest.raises(ValueError, match="'shuffle'"):
        ms.features.graphs(wiring="shuffle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'answers'"):
        ms.features.graphs(tokens="answers")  # pyright: ignore[reportArgumentType]


def test_mismatched_stored_edges_are_refused_with_the_record_number():
    record = record_of(0, tokens=6, prompt=3, answer=2) | {"nodes": np.ones((3, 5, 4), np.float32)}
    with pytest.raises(ValueError, match=r"record 9: 'nodes' .*'edges'"):
        batch_of(stored(), [record], [9])
    with pytest.raises(ValueError, match="record 9 has no 'edge_source'"):
        batch_of(stored(), [record | {"edge_source": None}], [9])
    with pytest.raises(ValueError, match="record 9 has no 'prompt_len'"):
        batch_of(stored(tokens="answer"), [record | {"prompt_len": None}], [9])


# -- one graph a record, with all heads


def slow_head_graph(record: Mapping[str, Any], kept: str) -> Any:
    """Nodes with their features, edges with their vectors, value by value."""
    prompt, attention = record["prompt_len"], record["attention"]
    layers, heads, count, _ = attention.shape
    answer = list(range(prompt, prompt + record["answer_len"])) or [prompt]
    looking = [prompt - 1, *answer]
    edges: dict[tuple[int, int], np.ndarray] = {}
    for i in looking:
        for j in range(i):
            values = attention[:, :, i, j].copy()
            if kept != "attention":  # zeros where it is not one of the strongest
                values[~(record["edge_source"][:, i] == j).any(axis=1)] = 0
            values = values.mean(axis=1) if kept == "edges" else values.reshape(-1)
            if values.max() > THRESHOLD:
                edges[j, i] = values
    nodes = sorted({*looking, *(source for source, _ in edges)})
    own = [[float(attention[n, h, i, i]) for n in range(layers) for h in range(heads)] for i in range(count)]
    x = [[*(own[i] if i in looking else [0.0] * layers * heads), float(i in answer)] for i in nodes]
    return nodes, x, edges


@FEW
@given(
    given_records=st.lists(records(), min_size=1, max_size=3),
    kept=st.sampled_from(["attention", "edges", "edge_heads"]),
)
def test_graphs_over_heads_equal_those_made_value_by_value(given_records: list[dict[str, Any]], kept: Any):
    batch = batch_of(HeadGraphFeature(kept), given_records)
    ptr, (source, target) = batch["ptr"].tolist(), batch["edge_index"]
    assert batch["edge_attr"].shape == (len(source), 2 if kept == "edges" else 4)
    assert batch["batch"].tolist() == [row for row in range(len(given_records)) for _ in range(*ptr[row : row + 2])]
    for row, record in enumerate(given_records):
        nodes, x, edges = slow_head_graph(record, kept)
        assert batch["x"][ptr[row] : ptr[row + 1]] == pytest.approx(np.array(x), abs=1e-6)
        assert batch["answer"][ptr[row] : ptr[row + 1]].tolist() == [features[-1] == 1 for features in x]
        own = np.flatnonzero((target >= ptr[row]) & (target < ptr[row + 1]))
        found = {(nodes[source[e] - ptr[row]], nodes[target[e] - ptr[row]]): batch["edge_attr"][e] for e in own}
        assert len(found) == len(own) and set(found) == set(edges)
        for edge, values in edges.items():
            assert found[edge] == pytest.approx(values, abs=1e-6)


def test_an_answer_whose_tokens_look_at_none_has_no_edges_over_heads():
    none, own = np.full((2, 4, 8), -1, np.int32), np.ones((2, 2, 4), np.float32)
    record = {"edge_source": none, "edge_weight": np.zeros((2, 4, 8), np.float32), "self_attention": own}
    batch = batch_of(HeadGraphFeature("edges"), [{**record, "prompt_len": 1, "answer_len": 1}])
    assert batch["edge_index"].shape == (2, 0) and batch["edge_attr"].shape == (0, 2) and batch["x"].shape[1] == 5


def test_graphs_over_heads_can_be_made_from_attention_and_from_edges(full: ms.Collection, probe: ms.Collection):
    """The mean over heads is what edges keep of attention; attention of a token to itself is kept of every head."""
    whole = make(HeadGraphFeature("attention"), full, range(NUM))
    kept = make(HeadGraphFeature("edges"), probe, range(NUM))
    assert whole["x"].shape[1] == kept["x"].shape[1] == LAYERS * 2 + 1
    assert whole["edge_attr"].shape[1] == LAYERS * 2 and kept["edge_attr"].shape[1] == LAYERS
    assert kept["x"][kept["answer"]] == pytest.approx(whole["x"][whole["answer"]], abs=1e-3)
    assert np.count_nonzero(kept["answer"]) == sum(full.column("answer_len").to_pylist())


def test_a_record_has_the_same_graph_over_heads_in_any_batch(probe: ms.Collection):
    feature = HeadGraphFeature("edges")
    numbers = [7, 31, 2]
    together = make(feature, probe, numbers)
    for row, number in enumerate(numbers):
        alone = make(feature, probe, [number])
        first, end = together["ptr"][row : row + 2]
        own = (together["edge_index"][1] >= first) & (together["edge_index"][1] < end)
        assert np.array_equal(together["x"][first:end], alone["x"])
        assert np.array_equal(together["edge_index"][:, own] - first, alone["edge_index"])
        assert np.array_equal(together["edge_attr"][own], alone["edge_attr"])


def test_graphs_over_heads_need_all_their_fields():
    record = record_of(0, tokens=6, prompt=3, answer=2)
    with pytest.raises(ValueError, match="record 4 has no 'self_attention'"):
        batch_of(HeadGraphFeature("edges"), [record | {"self_attention": None}], [4])
