"""What a model sees of a record is the same in whatever batch, order or process it comes."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.buffers import Pool
from millstream.dataset.batch import Feature, fetch_batch
from millstream.dataset.padding import stack

REGEX = r"lbl\|(?P<class_id>\d+)"


@pytest.fixture
def reads(tmp_path: Path) -> ms.Reads:
    rng = np.random.default_rng(0)
    file = tmp_path / "reads.fa"
    lines = [f">lbl|{i % 4}\n{''.join(rng.choice(list('ACGTNacgt'), 40 + i % 30))}\n" for i in range(200)]
    file.write_text("".join(lines))
    opened = ms.open(file, header_regex=REGEX)
    assert isinstance(opened, ms.Reads)
    return opened


def test_tokens_come_with_the_columns_named(reads: ms.Reads):
    feature = ms.features.tokens("kmer(4)", columns=["class_id"], max_length=20, pad="max_length")
    batch = feature(reads.fetch([5, 1, 2], feature.fields))
    assert np.asarray(batch["input_ids"]).shape == (3, 20) == np.asarray(batch["attention_mask"]).shape
    assert np.asarray(batch["class_id"]).tolist() == [1, 1, 2]


def test_a_record_comes_out_the_same_in_any_batch_and_other_epochs_differ(reads: ms.Reads):
    feature = ms.features.tokens("base", crop_length=30, reverse_complement=0.5, mask=0.1, n="random", seed=3)
    alone = [np.asarray(feature(reads.fetch([i], feature.fields), epoch=1)["input_ids"])[0] for i in range(50)]
    order = np.random.default_rng(1).permutation(50)
    together = np.asarray(feature(reads.fetch(order, feature.fields), epoch=1)["input_ids"])
    assert all((together[place] == alone[number]).all() for place, number in enumerate(order))
    later = np.asarray(feature(reads.fetch(np.arange(50), feature.fields), epoch=2)["input_ids"])
    assert sum((later[i] == alone[i]).all() for i in range(50)) < 10


def test_feature_and_reads_go_to_another_process_together(reads: ms.Reads):
    feature = ms.features.tokens("kmer(3)", columns=["class_id"], reverse_complement=True)
    again, same = pickle.loads(pickle.dumps((feature, reads)))
    ours, theirs = feature(reads.fetch([7], feature.fields)), again(same.fetch([7], again.fields))
    assert all(np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])) for name in ours)


def test_protein_is_refused_by_base_tokenizers_with_the_letters_found(tmp_path: Path):
    file = tmp_path / "protein.fa"
    file.write_text(">p\nMKVLEEQFHI\n")
    feature = ms.features.tokens("base")
    proteins = ms.open(file)
    assert isinstance(proteins, ms.Reads) and proteins[0].sequence == "MKVLEEQFHI"
    with pytest.raises(ms.errors.BadSource, match=r"[EFILQ]"):
        feature(proteins.fetch([0], feature.fields))


# -- traces


def record(number: int) -> dict[str, object]:
    """Two layers and an embedding, 3 to 7 tokens, three heads, causal attention."""
    rng = np.random.default_rng(number)
    tokens = 3 + number % 5
    attention = np.tril(rng.random((2, 3, tokens, tokens), np.float32))
    return {
        "question_id": f"q{number}",
        "question": f"Wer mahlt {number}?",
        "prompt_len": 1 + number % 3,
        "score": number / 4,
        "verdict": None if number == 6 else "right",
        "hidden": rng.normal(size=(3, tokens, 4)).astype(np.float16),
        "attention": attention / attention.sum(axis=-1, keepdims=True),
        "vector": np.full(5, number, np.float32),
        "map": rng.normal(size=(1 + number % 3, 1 + number % 2, 2)).astype(np.float32),
        "grade": torch.arange(1 + number % 4).to(torch.bfloat16) + number,
        "maybe": None if number in (4, 5) else np.ones(3, np.float32),
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Traces:
    path = tmp_path_factory.mktemp("features") / "traces"
    with ms.TraceWriter(path, shard_records=7, schema={"hidden": "float16[layer, token, dim]"}) as writer:
        writer.extend(record(number) for number in range(20))
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened


def make(feature: Feature, collection: ms.Collection, numbers: Sequence[int], **chance: int) -> dict[str, Any]:
    return dict(feature(fetch_batch(collection, np.array(numbers, np.int64), feature.fields), **chance))


def padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The slow way to put arrays into one: value by value."""
    shape = [max(array.shape[axis] for array in arrays) for axis in range(arrays[0].ndim)]
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in enumerate(arrays):
        for place in np.ndindex(array.shape):
            out[(row, *place)] = array[place]
    return out


NUMBERS = [11, 2, 7, 13, 0]


# -- fields


def test_fields_of_one_shape_are_stacked_and_texts_are_lists(traces: ms.Traces):
    batch = make(ms.features.fields("vector", "score", "question", "verdict"), traces, [6, 2])
    assert list(batch) == ["vector", "score", "question", "verdict"]
    assert np.array_equal(batch["vector"], [[6] * 5, [2] * 5]) and batch["score"].tolist() == [1.5, 0.5]
    assert batch["question"] == ["Wer mahlt 6?", "Wer mahlt 2?"]
    assert batch["verdict"] == [None, "right"]


@pytest.mark.parametrize("name", ["hidden", "map", "attention"])
def test_fields_of_other_shapes_are_padded_with_a_mask_of_what_is_real(traces: ms.Traces, name: str):
    batch = make(ms.features.fields(name), traces, NUMBERS)
    arrays: list[Any] = [record(number)[name] for number in NUMBERS]
    assert batch[name].dtype == arrays[0].dtype
    assert np.array_equal(batch[name], padded(arrays))
    ragged = [axis for axis in range(arrays[0].ndim) if len({array.shape[axis] for array in arrays}) > 1]
    real = padded([np.ones([array.shape[axis] for axis in ragged], np.bool_) for array in arrays])
    assert batch[f"{name}_mask"].dtype == np.bool_
    assert np.array_equal(batch[f"{name}_mask"], real)


def test_what_was_in_memory_before_does_not_show_in_the_padding(traces: ms.Traces):
    pool = Pool(64 << 20)
    wide = np.tile(np.float32(7), (300, 100))
    with pool.use():
        for lengths in ([300, 300], [300, 10], [10, 300, 200]):
            arrays = [wide[:length] for length in lengths]
            out, mask = stack(arrays)
            for row, length in enumerate(lengths):
                assert (np.asarray(out)[row, :length] == 7).all() and not np.asarray(out)[row, length:].any()
            del out, mask


def test_without_padding_arrays_stay_a_list(traces: ms.Traces):
    batch = make(ms.features.fields("map", "vector", pad=False), traces, NUMBERS)
    assert isinstance(batch["map"], list) and "map_mask" not in batch
    for found, number in zip(batch["map"], NUMBERS, strict=True):
        assert np.array_equal(found, np.asarray(record(number)["map"]))
    assert batch["vector"].shape == (5, 5)


def test_dtypes_that_numpy_lacks_stay_as_they_are(traces: ms.Traces):
    batch = make(ms.features.fields("grade"), traces, [3, 0, 5])
    assert batch["grade"].dtype == torch.bfloat16
    assert batch["grade"].float().tolist() == [[3, 4, 5, 6], [0, 0, 0, 0], [5, 6, 0, 0]]
    assert batch["grade_mask"].tolist() == [[True] * 4, [True, False, False, False], [True, True, False, False]]
    alike = make(ms.features.fields("grade"), traces, [3, 7])
    assert alike["grade"].dtype == torch.bfloat16 and "grade_mask" not in alike
    listed = make(ms.features.fields("grade", pad=False), traces, [3, 0])["grade"]
    assert [row.float().tolist() for row in listed] == [[3, 4, 5, 6], [0]]


def test_layers_of_a_field_can_be_picked(traces: ms.Traces):
    batch = make(ms.features.fields("hidden[2,-3]"), traces, [4, 9])
    for row, number in enumerate([4, 9]):
        hidden: Any = record(number)["hidden"]
        assert np.array_equal(batch["hidden"][row], hidden[[2, 0]])


def test_all_fields_come_when_none_is_named(traces: ms.Traces):
    batch = make(ms.features.fields(), traces, [1, 2])
    assert set(traces.field_names) <= set(batch)
    assert set(batch) - set(traces.field_names) == {"hidden_mask", "attention_mask", "map_mask", "grade_mask"}


def test_a_record_without_a_tensor_is_refused_by_number(traces: ms.Traces):
    with pytest.raises(ValueError, match="record 4 has no 'maybe'"):
        make(ms.features.fields("maybe"), traces, [1, 4, 5])
    with pytest.raises(ValueError, match="record 5 has no 'maybe'"):
        make(ms.features.fields("maybe"), traces.subset([3, 5]), [0, 1])


def test_letters_of_reads_come_as_bytes_a_row_a_read(reads: ms.Reads):
    batch = make(ms.features.fields("sequence", "class_id"), reads, [3, 1, 33])
    for row, mask, number in zip(batch["sequence"], batch["sequence_mask"], [3, 1, 33], strict=True):
        text = reads[number].sequence.encode()
        assert row[: len(text)].tobytes() == text and not row[len(text) :].any()
        assert mask.tolist() == [True] * len(text) + [False] * (len(row) - len(text))
    assert batch["class_id"].tolist() == [3, 1, 1]
    alike = make(ms.features.fields("sequence"), reads, [3, 33])
    assert alike["sequence"].shape == (2, 43) and "sequence_mask" not in alike
    assert list(make(ms.features.fields("class_id"), reads, [3])) == ["class_id"]


# -- layers


def at_token(number: int, token: str | int) -> np.ndarray:
    """One vector a layer of a record, the slow way."""
    states: Any = record(number)["hidden"]
    prompt: Any = record(number)["prompt_len"]
    rows: list[list[float]] = []
    for layer in states.astype(np.float64):
        tokens = [list(vector) for vector in layer]
        if token in ("mean", "mean_answer"):
            wanted = tokens if token == "mean" else tokens[prompt:]
            rows.append([sum(values) / len(wanted) for values in zip(*wanted, strict=True)])
        else:
            places = {"first": 0, "last": len(tokens) - 1, "last_prompt": prompt - 1, "first_answer": prompt}
            rows.append(tokens[places[token] if isinstance(token, str) else token])
    return np.array(rows)


@pytest.mark.parametrize("token", ["first", "last", "mean", "last_prompt", "first_answer", "mean_answer", 0, 2, -1, -3])
def test_layers_are_the_states_at_the_token_asked_for(traces: ms.Traces, token: Any):
    numbers = [number for number in range(20) if token not in ("first_answer", "mean_answer") or number % 15 != 14]
    numbers = [number for number in numbers if 3 + number % 5 > 1 + number % 3]
    layers = make(ms.features.layers(token), traces, numbers)["layers"]
    assert layers.dtype == np.float32 and layers.shape == (len(numbers), 3, 4)
    expected = np.stack([at_token(number, token) for number in numbers])
    assert layers == pytest.approx(expected, abs=1e-6)


def test_layers_can_be_picked_and_have_the_dtype_asked_for(traces: ms.Traces):
    feature = ms.features.layers("last", layers=[-1, 0], dtype="float16")
    layers = make(feature, traces, NUMBERS)["layers"]
    assert layers.dtype == np.float16
    assert np.array_equal(
        layers, np.stack([at_token(number, "last")[[-1, 0]] for number in NUMBERS]).astype(np.float16)
    )
    assert make(ms.features.layers("mean", layers=[1]), traces, [3])["layers"].shape == (1, 1, 4)


def test_only_what_is_needed_is_fetched():
    assert ms.features.layers("last").fields == ["hidden"]
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
        (5, 1, "record 0: has 3 tokens, 0 of them prompt: no token 5"),
        (-4, 1, "no token -4"),
        ("last_prompt", 0, "record 0: has 3 tokens, 0 of them prompt: no token 'last_prompt'"),
        ("first_answer", 3, "record 0: has 3 tokens, 3 of them prompt: no token 'first_answer'"),
        ("mean_answer", 3, "no token 'mean_answer'"),
    ],
)
def test_a_token_that_a_record_does_not_have_is_refused_by_number(
    tmp_path: Path, token: Any, prompt: int, message: str
):
    with ms.TraceWriter(tmp_path / "t") as writer:
        writer.append({"question_id": "q", "hidden": np.ones((2, 3, 4), np.float32), "prompt_len": prompt})
    with pytest.raises(ValueError, match=message):
        make(ms.features.layers(token), ms.open(tmp_path / "t"), [0])


def test_layers_of_what_has_none_are_refused(traces: ms.Traces, reads: ms.Reads):
    with pytest.raises(ValueError, match="'middle': there is first, last"):
        ms.features.layers("middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"record 3: 'vector' has 1 axes, expected \[layer, token, dim\]"):
        make(ms.features.layers(field="vector"), traces, [3])
    with pytest.raises(ValueError, match="these records are reads"):
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
def test_graphs_are_those_made_one_by_one(traces: ms.Traces, k: int | None, threshold: float, self_loops: bool):
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


def test_edges_lead_from_the_token_attended_to_within_one_graph(traces: ms.Traces):
    batch = make(ms.features.graphs(3), traces, NUMBERS)
    source, target = batch["edge_index"]
    assert (source < target).all()
    assert np.array_equal(batch["batch"][source], batch["batch"][target])
    assert np.bincount(target).max() == 3
    assert batch["edge_index"].dtype == np.int64 and batch["x"].dtype == np.float32


def test_attention_without_heads_and_states_without_an_embedding_make_the_same_graphs(
    traces: ms.Traces, tmp_path: Path
):
    with ms.TraceWriter(tmp_path / "t") as writer:
        for number in NUMBERS:
            full: dict[str, Any] = record(number)
            attention = full["attention"].mean(axis=1, dtype=np.float32)
            writer.append({"question_id": str(number), "hidden": full["hidden"][1:], "attention": attention})
    ours = make(ms.features.graphs(2), traces, NUMBERS)
    theirs = make(ms.features.graphs(2), ms.open(tmp_path / "t"), list(range(5)))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_graphs_of_what_does_not_go_together_are_refused_by_number(tmp_path: Path, reads: ms.Reads):
    with ms.TraceWriter(tmp_path / "t") as writer:
        hidden = np.ones((2, 3, 4), np.float32)
        writer.append({"question_id": "a", "hidden": hidden, "attention": np.ones((2, 1, 5, 5), np.float32)})
        writer.append({"question_id": "b", "hidden": hidden, "attention": None})
    traces = ms.open(tmp_path / "t")
    with pytest.raises(ValueError, match=r"record 0: 'hidden' \(2, 3, 4\) and 'attention' \(2, 1, 5, 5\) do not go"):
        make(ms.features.graphs(), traces, [0])
    with pytest.raises(ValueError, match="record 1 has no 'attention'"):
        make(ms.features.graphs(), traces, [1])
    with pytest.raises(ValueError, match="k=0: at least one edge"):
        ms.features.graphs(0)
    with pytest.raises(ValueError, match="these records are reads"):
        ms.features.graphs()(reads.fetch([0]))


# -- each


def noisy(given: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    vector: Any = given["vector"]
    return {"noisy": vector + rng.normal(size=5), "cut": vector[: rng.integers(1, 5)], "id": given["question_id"]}


def test_each_gives_what_the_function_makes_of_every_record(traces: ms.Traces):
    feature = ms.features.each(
        lambda given, rng: {"double": np.asarray(given["vector"]) * 2, "half": float(given["score"]) / 2},  # pyright: ignore
        fields=["vector", "score"],
    )
    batch = make(feature, traces, [8, 3])
    assert batch["double"].tolist() == [[16] * 5, [6] * 5] and batch["half"].tolist() == [1, 0.375]


def test_each_draws_from_seed_epoch_and_record_alone(traces: ms.Traces):
    feature = ms.features.each(noisy, fields=["vector", "question_id"])
    whole = make(feature, traces, list(range(20)), seed=3, epoch=2)
    shuffled = np.random.default_rng(0).permutation(20)
    other = make(feature, traces, shuffled.tolist(), seed=3, epoch=2)
    assert np.array_equal(other["noisy"], whole["noisy"][shuffled])
    assert other["id"] == [f"q{number}" for number in shuffled]
    part = traces.subset([17, 4, 9])
    assert np.array_equal(make(feature, part, [2, 0], seed=3, epoch=2)["noisy"], whole["noisy"][[9, 17]])
    for chance in ({"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}):
        assert not np.isclose(make(feature, traces, list(range(20)), **chance)["noisy"], whole["noisy"]).any()
    drawn = whole["noisy"] - np.arange(20)[:, None]
    assert len(np.unique(drawn.round(9))) == 100


def test_each_pads_what_it_is_given_unless_told_not_to(traces: ms.Traces):
    padded_batch = make(ms.features.each(noisy, fields=["vector", "question_id"]), traces, [1, 2, 3, 4])
    assert padded_batch["cut"].shape == padded_batch["cut_mask"].shape
    listed = make(ms.features.each(noisy, fields=["vector", "question_id"], pad=False), traces, [1, 2, 3, 4])
    assert [len(row) for row in listed["cut"]] == padded_batch["cut_mask"].sum(axis=1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_each_may_give_tensors_of_any_dtype_and_length(traces: ms.Traces, dtype: torch.dtype):
    def tensors(given: dict[str, Any], rng: np.random.Generator) -> dict[str, object]:
        return {"x": torch.ones(given["prompt_len"], 2, dtype=dtype), "one": torch.tensor(1, dtype=dtype)}

    feature = ms.features.each(tensors, fields=["prompt_len"])
    batch = make(feature, traces, [0, 2, 1])
    assert batch["x"].dtype == dtype and batch["x"].shape == (3, 3, 2)
    assert batch["x_mask"].tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert (batch["x"][..., 0].bool() == torch.tensor(batch["x_mask"])).all()
    assert batch["one"].tolist() == [1, 1, 1]


def test_each_sees_the_letters_of_reads(reads: ms.Reads):
    feature = ms.features.each(
        lambda given, rng: {"gc": sum(map(str(given["sequence"]).count, "GC"))}, fields=["sequence", "class_id"]
    )
    found = make(feature, reads, [5, 9])["gc"].tolist()
    assert found == [sum(map(reads[number].sequence.count, "GC")) for number in (5, 9)]
