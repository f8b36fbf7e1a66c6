"""Old preprocessed files: every trace is read exactly, one at a time, without torch_geometric, and nothing is run."""

import os
import pickle
import sys
import weakref
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.classic.pickles import read_traces
from millstream.classic.preprocessed import is_preprocessed, read_preprocessed
from millstream.errors import BadSource, SchemaMismatch, UnsafePickle
from millstream.traces.convert import convert, expand
from millstream.traces.store.inspect import compare
from support.effort import num_examples
from support.old_files import Batch, Call, Data, torch_bytes

L, D = 3, 8  # layers, hidden size
FORMATS = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
KINDS = pytest.mark.parametrize("kind", ["lstm", "gnn"])


# -- files as the old scripts wrote them


def graph(number: int, layer: int, *, num_tokens: int | None = None, make: type = Data, **changed: object) -> object:
    random = torch.Generator().manual_seed(100 * number + layer)
    tokens = num_tokens or 4 + number % 3
    num_edges = 2 + (number + layer) % 4
    fields = {
        "x": torch.randn(tokens, D, generator=random).half(),
        "edge_index": torch.randint(tokens, (2, num_edges), generator=random),
        "edge_attr": torch.rand(num_edges, generator=random).half(),
    }
    return make(**fields | changed)


def lstm_content(first: int = 0, count: int = 5) -> dict[str, object]:
    random = torch.Generator().manual_seed(first)
    return {
        "sequences": torch.randn(count, L, D, generator=random).half(),
        "labels": torch.tensor([float(number % 2) for number in range(count)]),
        "question_ids": [f"tc_{first + number}" for number in range(count)],
    }


def gnn_content(first: int = 0, count: int = 5, make: type = Data) -> dict[str, object]:
    return {
        "graphs": [[graph(first + number, layer, make=make) for layer in range(L)] for number in range(count)],
        "labels": torch.tensor([float(number % 2) for number in range(count)]),
        "question_ids": [f"tc_{first + number}" for number in range(count)],
    }


def content_of(kind: str, first: int = 0, count: int = 5) -> dict[str, object]:
    return lstm_content(first, count) if kind == "lstm" else gnn_content(first, count)


def write(folder: Path, content: object, name: str = "preprocessed_0.pt", *, legacy: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(torch_bytes(content, legacy=legacy))
    return folder / name


def write_both(folder: Path, kind: str) -> list[Path]:
    """Two files of five and three traces, one in each format of torch."""
    first = write(folder, content_of(kind, 0, 5), "preprocessed_0.pt")
    return [first, write(folder, content_of(kind, 5, 3), "preprocessed_1.pt", legacy=True)]


def same(a: object, b: object) -> bool:
    """Equal in dtype, shape and every byte."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


def split_graphs(record: dict[str, object]) -> list[dict[str, torch.Tensor]]:
    """The graph of each layer: `x`, `edge_index` and, if the record has weights, `edge_attr`."""
    counts = record["edge_counts"].tolist()
    layers: list[dict[str, torch.Tensor]] = [{"x": torch.as_tensor(x)} for x in record["x"]]
    for name in ("edge_index", "edge_attr"):
        if record[name] is not None:
            for layer, piece in zip(layers, torch.as_tensor(record[name]).split(counts, dim=-1), strict=True):
                layer[name] = piece
    return layers


def assert_is(record: dict[str, object], content: dict[str, object], number: int) -> None:
    """The record equals the trace with this number in the file."""
    assert record["question_id"] == content["question_ids"][number]
    label = content["labels"][number]
    assert record["label"] == label
    assert type(record["label"]) is float
    if "sequences" in content:
        assert set(record) == {"question_id", "label", "layers"}
        assert same(record["layers"], content["sequences"][number])
        return
    assert set(record) == {"question_id", "label", "x", "edge_index", "edge_attr", "edge_counts"}
    graphs = split_graphs(record)
    assert len(graphs) == len(content["graphs"][number])
    for got, want in zip(graphs, content["graphs"][number], strict=True):
        assert all(same(got[field], want._store._mapping[field]) for field in ("x", "edge_index", "edge_attr"))


# -- reading


def test_one_sequence_in_a_list_a_million_times_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"sequences": [torch.zeros(L, D)] * 10**6})
    with pytest.raises(BadSource, match=r"traces in .* are too many"):
        next(read_preprocessed(path))


@KINDS
@FORMATS
def test_every_trace_comes_back_exactly(tmp_path, kind, legacy):
    content = content_of(kind)
    path = write(tmp_path, content, legacy=legacy)
    before = set(sys.modules)
    assert is_preprocessed(path) == kind
    records = list(read_preprocessed(path))
    assert set(sys.modules) == before
    assert len(records) == 5
    for number, record in enumerate(records):
        assert_is(record, content, number)


@FORMATS
def test_sequences_in_a_list_of_tensors_come_back_exactly(tmp_path, legacy):
    content = lstm_content() | {"sequences": [torch.randn(L + number % 2, D) for number in range(5)]}
    path = write(tmp_path, content, legacy=legacy)
    assert is_preprocessed(path) == "lstm"
    records = list(read_preprocessed(path))
    assert len(records) == 5
    for number, record in enumerate(records):
        assert_is(record, content, number)
    convert([path], tmp_path / "store")
    assert ms.open(tmp_path / "store").ids == content["question_ids"]


def test_the_edges_of_all_layers_are_concatenated_and_keep_their_node_numbers(tmp_path):
    graphs = [Data(x=torch.zeros(3, D).half(), edge_index=torch.tensor(edges), edge_attr=torch.ones(len(edges[0]), 1))
              for edges in ([[0, 1], [1, 2]], [[2], [0]], [[0, 0, 1], [0, 1, 1]])]  # fmt: skip
    path = write(tmp_path, {"graphs_by_layer": [graphs], "labels": [1], "question_ids": ["q"]})
    assert is_preprocessed(path) == "gnn"
    [record] = read_preprocessed(path)
    assert record["edge_index"].tolist() == [[0, 1, 2, 0, 0, 1], [1, 2, 0, 0, 1, 1]]
    assert record["edge_counts"].tolist() == [2, 1, 3]
    assert record["edge_attr"].shape == (6,)
    assert record["x"].shape == (3, 3, D)


def test_graphs_without_edges_or_without_edge_attr_are_read(tmp_path):
    empty = {"edge_index": torch.empty(2, 0, dtype=torch.int64), "edge_attr": torch.empty(0)}
    bare = [graph(0, layer, edge_attr=None) for layer in range(2)]
    content = {"graphs": [[graph(0, 0, **empty)], bare], "labels": [0, 0], "question_ids": ["a", "b"]}
    first, second = read_preprocessed(write(tmp_path, content), notify=pytest.fail)
    assert first["edge_index"].shape == (2, 0)
    assert first["edge_counts"].tolist() == [0]
    assert second["edge_attr"] is None
    assert [set(layer) for layer in split_graphs(second)] == [{"x", "edge_index"}] * 2


@KINDS
@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([1.0, float("nan"), 0.0]),
        [1, float("nan"), None],
        [np.float32(1), torch.tensor(0.1), True],
        np.array([0.25, np.nan, 1]),
        torch.tensor([1, 0, 1]),
        None,
    ],
)
def test_labels_are_unchanged_and_missing_ones_stay_missing(tmp_path, kind, labels):
    content = content_of(kind, count=3) | {"labels": labels}
    if labels is None:
        del content["labels"]
    want = [None if label is None else float(label) for label in ([None] * 3 if labels is None else labels)]
    path = write(tmp_path / "old", content)
    assert str([record["label"] for record in read_preprocessed(path)]) == str(want)
    convert([path], tmp_path / "new")
    assert str([ms.open(tmp_path / "new")[number]["label"] for number in range(3)]) == str(want)


def test_traces_and_other_files_are_not_preprocessed_files(tmp_path):
    trace = {"hidden_states": [torch.zeros(2, 3)], "sequences": torch.zeros(1, 2)}
    for legacy in (False, True):
        for value in ([trace], {"traces": [trace]}, {"n": 1, "traces": [trace], "labels": [0]}, trace, 3):
            assert is_preprocessed(write(tmp_path, value, legacy=legacy)) is None
    (tmp_path / "traces.pkl").write_bytes(pickle.dumps(lstm_content()))
    (tmp_path / "labels.csv").write_text("a,b\n")
    assert is_preprocessed(tmp_path / "traces.pkl") is None
    assert is_preprocessed(tmp_path / "labels.csv") is None
    path = write(tmp_path, [trace])
    with pytest.raises(BadSource, match=str(path)):
        list(read_preprocessed(path))


def test_each_field_that_is_left_out_is_named_once(tmp_path):
    content = gnn_content() | {"model": "llama"}
    content["graphs"][3][1]._store._mapping["y"] = torch.zeros(1)
    content["graphs"][4][1]._store._mapping["y"] = torch.zeros(1)
    messages: list[str] = []
    assert len(list(read_preprocessed(write(tmp_path, content), notify=messages.append))) == 5
    assert [text.split(": ")[-1] for text in messages] == ["model", "y"]


# -- memory


@KINDS
@FORMATS
def test_only_the_requested_trace_is_read_and_it_is_freed_when_dropped(tmp_path, kind, legacy, monkeypatch):
    sizes: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(buffers[0].nbytes)
        return preadv(file, buffers, at)

    path = write(tmp_path, content_of(kind), legacy=legacy)
    monkeypatch.setattr(os, "preadv", counted)
    reading = read_preprocessed(path)
    record = next(reading)
    assert len(sizes) == (2 if kind == "lstm" else 1 + 3 * L)  # the labels, and this trace
    assert sum(sizes) <= 5 * 4 + sum(x.nbytes for x in record.values() if hasattr(x, "nbytes"))
    gone = [weakref.ref(x) for x in record.values() if isinstance(x, torch.Tensor)]
    del record
    assert gone and all(tensor() is None for tensor in gone)


# -- into a store


@KINDS
def test_a_store_has_every_trace_and_names_the_axes(tmp_path, kind):
    files = write_both(tmp_path / "old", kind)
    written = convert(expand([str(tmp_path / "old" / "*.pt")]), tmp_path / "new")
    assert written.records == 8
    traces = ms.open(tmp_path / "new")
    for number in range(8):
        content = content_of(kind, 0, 5) if number < 5 else content_of(kind, 5, 3)
        assert_is(dict(traces[number]), content, number if number < 5 else number - 5)
    fields = {name: str(field) for name, field in traces.fields.items()}
    if kind == "lstm":
        assert fields == {"question_id": "string", "label": "double", "layers": "float16[layer, dim]"}
    else:
        assert fields == {
            "question_id": "string",
            "label": "double",
            "x": "float16[layer, token, dim]",
            "edge_index": "int64[end, edge]",
            "edge_attr": "float16[edge]",
            "edge_counts": "int64[layer]",
        }
    found = compare(files[0], tmp_path / "new")
    assert (found.same, found.different, found.only_a) == (5, 0, 0)


@KINDS
def test_an_interrupted_conversion_resumes(tmp_path, kind):
    files = write_both(tmp_path / "old", kind)

    def stop(done: int, note: str) -> None:
        if note == f"{files[1].name}: trace 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(files, tmp_path / "new", progress=stop)
    assert len(ms.open(tmp_path / "new")) == 7
    convert(files, tmp_path / "new")
    traces = ms.open(tmp_path / "new")
    assert traces.ids == [f"tc_{number}" for number in range(8)]
    assert_is(dict(traces[7]), content_of(kind, 5, 3), 2)


def test_files_of_different_kinds_are_refused_before_anything_is_written(tmp_path):
    lstm = write(tmp_path / "lstm_solo", lstm_content())
    gnn = write(tmp_path / "gnn", gnn_content())
    traces = write(tmp_path / "traces", [{"question": "?"}])
    for files in ([lstm, gnn], [gnn, traces], [traces, lstm]):
        with pytest.raises(SchemaMismatch) as caught:
            convert(files, tmp_path / "new")
        assert all(str(file) in str(caught.value) for file in files)
        assert not (tmp_path / "new").exists()


def test_traces_without_question_ids_are_named_after_the_file(tmp_path):
    content = lstm_content(count=2)
    del content["question_ids"]
    convert([write(tmp_path / "old", content)], tmp_path / "new")
    assert ms.open(tmp_path / "new").ids == ["preprocessed_0:0", "preprocessed_0:1"]


# -- broken files


@KINDS
def test_lengths_that_differ_are_reported(tmp_path, kind):
    content = content_of(kind) | {"labels": torch.zeros(4), "question_ids": ["a", "b"]}
    path = write(tmp_path, content)
    name = "sequences" if kind == "lstm" else "graphs"
    with pytest.raises(BadSource, match=f"^{path}: 5 {name}, 4 labels and 2 question_ids"):
        list(read_preprocessed(path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(6, D).half()}, r"\(5, 8\) .* \(6, 8\) in layer 1"),
        ({"x": torch.zeros(5, D)}, "torch.float16 .* torch.float32 in layer 1"),
        ({"x": None}, "x of layer 1"),
        ({"edge_index": torch.tensor([[0, 5], [0, 0]])}, "layer 1 .* 0 to 5"),
        ({"edge_index": torch.tensor([[0, -1], [0, 0]])}, "layer 1 .* -1 to 0"),
        ({"edge_index": torch.zeros(3, 2, dtype=torch.int64)}, r"edge_index of layer 1 .* \(3, 2\)"),
        ({"edge_attr": torch.zeros(9).half()}, r"layer 1 .* edge_attr .* \(9,\)"),
        ({"edge_attr": torch.zeros(2, 3).half()}, r"layer 1 .* edge_attr .* \(2, 3\)"),
        ({"edge_attr": None}, "edge_attr of layer 1"),
    ],
)
def test_layers_that_do_not_match_are_reported(tmp_path, changed, message):
    edges = torch.tensor([[0, 1], [1, 2]])
    weights = torch.ones(2).half()
    layers = [graph(1, 0), graph(1, 1, **{"edge_index": edges, "edge_attr": weights} | changed)]
    path = write(tmp_path, gnn_content(count=2) | {"graphs": [[graph(0, 0)], layers]})
    with pytest.raises(BadSource, match=f"^{path}: .* trace 1: .*{message}"):
        list(read_preprocessed(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lstm_content() | {"sequences": torch.zeros(5, 8)}, r"'sequences' .* \(5, 8\)"),
        (lstm_content() | {"labels": torch.zeros(5, 1)}, "'labels'"),
        (lstm_content() | {"labels": ["yes"] * 5}, "'yes'"),
        (lstm_content() | {"question_ids": [b"a"] * 5}, "b'a'"),
        (lstm_content() | {"question_ids": ["\ud800"] * 5}, "surrogates"),
        (lstm_content() | {"sequences": [torch.zeros(3, 8)] * 4 + [torch.zeros(8)]}, r"trace 4: .*\(8,\)"),
        (lstm_content() | {"sequences": [np.zeros((3, 8))] * 5}, "trace 0: .*ndarray"),
        (lstm_content() | {"sequences": np.zeros((5, 3, 8))}, "'sequences'"),
        (gnn_content() | {"graphs": [1] * 5}, "trace 0: .*graph"),
        (gnn_content() | {"graphs": torch.zeros(5)}, "'graphs'"),
        (gnn_content() | {"graphs": [[]] * 5}, "trace 0: .*layers"),
        (gnn_content() | {"graphs": [[torch.zeros(2)]] * 5}, "trace 0: .*graph"),
    ],
)
def test_content_of_another_layout_is_a_bad_source(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(BadSource, match=message):
        list(read_preprocessed(path))


FILES = {(kind, old): torch_bytes(content_of(kind), legacy=old) for kind in ("lstm", "gnn") for old in (False, True)}


@KINDS
@FORMATS
@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_a_bad_source(tmp_path, kind, legacy, share):
    data = FILES[kind, legacy]
    path = tmp_path / "preprocessed_0.pt"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BadSource, match=f"^{path}: "):
        convert([path], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind_and_format", FILES, ids=str)
@settings(deadline=None, max_examples=num_examples(60))
@given(data=st.data())
def test_flipped_bits_give_data_or_one_of_our_errors(tmp_path_factory, kind_and_format, data):
    flipped = bytearray(FILES[kind_and_format])
    for at in data.draw(st.lists(st.integers(0, len(flipped) * 8 - 1), min_size=1, max_size=3)):
        flipped[at // 8] ^= 1 << at % 8
    path = tmp_path_factory.getbasetemp() / "flipped.pt"
    path.write_bytes(flipped)
    for read in (is_preprocessed, lambda path: list(read_preprocessed(path))):
        with suppress(BadSource, UnsafePickle):
            read(path)


# -- hostile files


def hostile(command: str) -> dict[str, tuple[dict[str, object], str]]:
    """Files that would run something, and the name in the refusal of each."""
    run = Call(os.system, command)
    system = f"'{os.system.__module__}.system'"
    return {
        "in place of sequences": (lstm_content() | {"sequences": run}, system),
        "in place of a label": (lstm_content() | {"labels": [run]}, system),
        "after the graphs": (gnn_content() | {"more": run}, system),
        "inside a graph": (gnn_content(count=1) | {"graphs": [[graph(0, 0, x=run)]]}, system),
        "in place of a graph": (gnn_content(count=1) | {"graphs": [[run]]}, system),
        "another class of torch_geometric": (
            gnn_content(count=1) | {"graphs": [[Batch()]]},
            "'torch_geometric.data.batch.Batch'",
        ),
        "an object of another class": (lstm_content() | {"labels": Path("x")}, "'pathlib"),
        "a graph made with arguments": (gnn_content() | {"more": Call(Data, command)}, "call a GraphClass"),
        "a graph class with a state": (gnn_content() | {"more": Call(Data, state={"x": 1})}, "call a GraphClass"),
    }


@pytest.mark.parametrize("name", hostile("true"))
@FORMATS
def test_malicious_code_is_not_run_and_is_named(tmp_path, name, legacy):
    marker = tmp_path / "ran"
    content, refused = hostile(f"touch {marker}")[name]
    path = write(tmp_path, content, legacy=legacy)
    for read in (read_preprocessed, lambda path: convert([path], tmp_path / "new")):
        with pytest.raises(UnsafePickle) as caught:
            list(read(path))
        assert str(caught.value).startswith(f"{path}: ")
        assert refused in str(caught.value)
    assert not marker.exists()
    assert not (tmp_path / "new").exists()


GRAPH = b"ctorch_geometric.data.data\nData\n"


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        (GRAPH + b"}b", "set the state of a GraphClass"),
        (GRAPH + b")\x81]b", "set the state of a graph to a list"),
        (GRAPH + b"K\x01\x85\x81", "an instance of a GraphClass"),
        (b"ccollections\nOrderedDict\n)\x81", "an instance of the global 'collections.OrderedDict'"),
        (b"cnumpy\nndarray\n)\x81", "an instance of the global 'numpy.ndarray'"),
        (b"csubprocess\nPopen\n)\x81", "'subprocess.Popen'"),
        (b"ctorch.storage\n_load_from_bytes\nC\x01a\x85R", "'torch.storage._load_from_bytes'"),
    ],
)
def test_allowed_globals_cannot_be_misused(tmp_path, program, refused):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}X\x04\x00\x00\x00more" + program + b"s.")
    with pytest.raises(UnsafePickle) as caught:
        list(read_preprocessed(path))
    assert refused in str(caught.value)


def test_graphs_in_a_file_of_traces_are_still_refused(tmp_path):
    for value in ([{"graph": graph(0, 0)}], {"graph": graph(0, 0)}):
        path = write(tmp_path, value)
        assert is_preprocessed(path) is None
        with pytest.raises(UnsafePickle, match="torch_geometric"):
            list(read_traces(path))


# -- the real torch_geometric


@FORMATS
def test_files_of_the_real_torch_geometric_are_the_same_and_come_back_exactly(tmp_path, legacy):
    data = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed (extra: graph)")
    path = tmp_path / "real.pt"
    torch.save(gnn_content(make=data.Data), path, _use_new_zipfile_serialization=not legacy)
    content = gnn_content()
    assert is_preprocessed(path) == "gnn"
    for number, record in enumerate(read_preprocessed(path, notify=pytest.fail)):
        assert_is(record, content, number)
    if not legacy:
        ours = zipfile.ZipFile(write(tmp_path, content, "ours.pt"))
        assert zipfile.ZipFile(path).read("real/data.pkl") == ours.read("archive/data.pkl")
