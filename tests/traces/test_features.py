"""Layers and graphs of a trace equal those of a slow reference, in any batch and order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from support.featuring import NUMBERS, make, record, write_reads, write_traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    return write_traces(tmp_path_factory.mktemp("features") / "traces")


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    return write_reads(tmp_path_factory.mktemp("features") / "reads.fa")


# -- layers


def at_token(number: int, token: str | int) -> np.ndarray:
    """One vector per layer of a record, by a slow reference."""
    states: Any = record(number)["hidden"]
    prompt: Any = record(number)["prompt_len"]
    rows: list[list[float]] = []
    for layer in states.astype(np.float64):
        tokens = [list(vector) for vector in layer]
        if token in ("mean", "mean_answer"):
            wanted = tokens if token == "mean" else tokens[prompt:]
            rows.append([sum(values) / len(wanted) for values in zip(*wanted, strict=True)])
        else:
            positions = {"first": 0, "last": len(tokens) - 1, "last_prompt": prompt - 1, "first_answer": prompt}
            rows.append(tokens[positions[token] if isinstance(token, str) else token])
    return np.array(rows)


@pytest.mark.parametrize("token", ["first", "last", "mean", "last_prompt", "first_answer", "mean_answer", 0, 2, -1, -3])
def test_layers_are_the_states_at_the_given_token(traces: ms.Traces, token: Any):
    numbers = [number for number in range(20) if token not in ("first_answer", "mean_answer") or number % 15 != 14]
    numbers = [number for number in numbers if 3 + number % 5 > 1 + number % 3]
    layers = make(ms.features.layers(token), traces, numbers)["layers"]
    assert layers.dtype == np.float32 and layers.shape == (len(numbers), 3, 4)
    expected = np.stack([at_token(number, token) for number in numbers])
    assert layers == pytest.approx(expected, abs=1e-6)


def test_layers_can_keep_the_precision_they_are_stored_in(traces: ms.Traces):
    kept, whole = (
        make(ms.features.layers("last", dtype=dtype), traces, NUMBERS)["layers"] for dtype in (None, "float32")
    )
    assert kept.dtype == traces.fetch([0], ["hidden"])["hidden"][0].dtype and np.array_equal(kept, whole)


def test_layers_can_be_selected_and_have_the_given_dtype(traces: ms.Traces):
    feature = ms.features.layers("last", layers=[-1, 0], dtype="float16")
    layers = make(feature, traces, NUMBERS)["layers"]
    assert layers.dtype == np.float16
    assert np.array_equal(
        layers, np.stack([at_token(number, "last")[[-1, 0]] for number in NUMBERS]).astype(np.float16)
    )
    assert make(ms.features.layers("mean", layers=[1]), traces, [3])["layers"].shape == (1, 1, 4)


def test_only_the_needed_fields_are_fetched():
    assert ms.features.layers("last").fields == ["hidden"]
    assert ms.features.layers(2, field="states").fields == ["states[:, 2]"]
    assert ms.features.layers(2, field="states", layers=[8, -1]).fields == ["states[[8,-1], 2]"]
    assert ms.features.layers("mean_answer", field="states", layers=[8, -1]).fields == ["states[8,-1]", "prompt_len"]


def test_states_of_a_dtype_that_numpy_lacks_become_floats(tmp_path: Path):
    states = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    with ms.TraceWriter(tmp_path / "t") as writer:
        writer.append({"question_id": "q", "hidden": states})
    layers = make(ms.features.layers("last"), ms.open(tmp_path / "t"), [0])["layers"]
    assert layers.tolist() == [states[:, -1].float().tolist()]


@pytest.mark.parametrize(
    ("token", "prompt", "message"),
    [
        (5, 1, "record 0 has 3 indices in axis 1 of 'hidden', requested 5"),
        (-4, 1, "record 0 has 3 indices in axis 1 of 'hidden', requested -4"),
        ("last_prompt", 0, "record 0: no token 'last_prompt' in its 3 tokens"),
        ("first_answer", 3, "record 0: .*first_answer"),
        ("mean_answer", 3, "record 0: .*mean_answer"),
    ],
)
def test_a_missing_token_is_refused_with_the_record_number(tmp_path: Path, token: Any, prompt: int, message: str):
    with ms.TraceWriter(tmp_path / "t") as writer:
        writer.append({"question_id": "q", "hidden": np.ones((2, 3, 4), np.float32), "prompt_len": prompt})
    with pytest.raises((ValueError, IndexError), match=message):
        make(ms.features.layers(token), ms.open(tmp_path / "t"), [0])


def test_layers_of_records_without_hidden_states_are_refused(traces: ms.Traces, reads: ms.Reads):
    with pytest.raises(ValueError, match="middle"):
        ms.features.layers("middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="record 3: 'vector'"):
        make(ms.features.layers(field="vector"), traces, [3])
    with pytest.raises(ValueError, match="reads"):
        ms.features.layers()(reads.fetch([0]))


# -- graphs


def graphs_of(numbers: Sequence[int], k: int | None, threshold: float, self_loops: bool) -> dict[str, Any]:
    """Graph after graph, token by token."""
    x: list[list[float]] = []
    edges: dict[tuple[int, int], float] = {}
    owner: list[int] = []
    ptr = [0]
    for number in numbers:
        hidden, attention = (np.asarray(record(number)[name]) for name in ("hidden", "attention"))
        for layer in range(2):
            first = len(x)
            x += hidden[layer + 1].astype(np.float64).tolist()  # hidden[0] is the embedding
            for i in range(hidden.shape[1]):
                strength = {
                    j: sum(float(attention[layer, head, i, j]) for head in range(3)) / 3
                    for j in range(i + 1 if self_loops else i)
                }
                kept = [j for j in strength if strength[j] > threshold]
                kept = sorted(kept, key=lambda j: -strength[j])[: len(kept) if k is None else k]
                edges |= {(first + j, first + i): strength[j] for j in kept}
            owner += [len(ptr) - 1] * hidden.shape[1]
            ptr.append(len(x))
    return {"x": x, "edges": edges, "batch": owner, "ptr": ptr, "last": [end - 1 for end in ptr[1:]]}


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.15])
@pytest.mark.parametrize("k", [1, 2, 8, None])
def test_graphs_of_a_batch_equal_graphs_made_one_by_one(
    traces: ms.Traces, k: int | None, threshold: float, self_loops: bool
):
    feature = ms.features.graphs(k, threshold=threshold, self_loops=self_loops)
    batch = make(feature, traces, NUMBERS)
    slow = graphs_of(NUMBERS, k, threshold, self_loops)
    assert batch["x"] == pytest.approx(np.array(slow["x"]), abs=1e-6)
    for name in ("batch", "ptr", "last"):
        assert batch[name].tolist() == slow[name]
    assert batch["num_layers"].tolist() == [2] * len(NUMBERS)
    found = list(zip(*batch["edge_index"].tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == set(slow["edges"])
    assert batch["edge_attr"].shape == (len(found), 1)
    assert batch["edge_attr"][:, 0] == pytest.approx(np.array([slow["edges"][edge] for edge in found]), abs=1e-6)


def test_edges_point_from_the_attended_token_within_one_graph(traces: ms.Traces):
    batch = make(ms.features.graphs(3), traces, NUMBERS)
    source, target = batch["edge_index"]
    assert (source < target).all()
    assert np.array_equal(batch["batch"][source], batch["batch"][target])
    assert np.bincount(target).max() == 3
    assert batch["edge_index"].dtype == np.int64 and batch["x"].dtype == np.float32


def test_averaged_attention_and_states_without_embedding_give_the_same_graphs(traces: ms.Traces, tmp_path: Path):
    with ms.TraceWriter(tmp_path / "t") as writer:
        for number in NUMBERS:
            full: dict[str, Any] = record(number)
            attention = full["attention"].mean(axis=1, dtype=np.float32)
            writer.append({"question_id": str(number), "hidden": full["hidden"][1:], "attention": attention})
    ours = make(ms.features.graphs(2), traces, NUMBERS)
    theirs = make(ms.features.graphs(2), ms.open(tmp_path / "t"), list(range(5)))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_graphs_of_mismatched_fields_are_refused_with_the_record_number(tmp_path: Path, reads: ms.Reads):
    with ms.TraceWriter(tmp_path / "t") as writer:
        hidden = np.ones((2, 3, 4), np.float32)
        writer.append({"question_id": "a", "hidden": hidden, "attention": np.ones((2, 1, 5, 5), np.float32)})
        writer.append({"question_id": "b", "hidden": hidden, "attention": None})
    traces = ms.open(tmp_path / "t")
    with pytest.raises(ValueError, match=r"record 0: 'hidden' \(2, 3, 4\) and 'attention' \(2, 1, 5, 5\)"):
        make(ms.features.graphs(), traces, [0])
    with pytest.raises(ValueError, match="record 1 has no 'attention'"):
        make(ms.features.graphs(), traces, [1])
    with pytest.raises(ValueError, match="k=0"):
        ms.features.graphs(0)
    with pytest.raises(ValueError, match="reads"):
        ms.features.graphs()(reads.fetch([0]))
