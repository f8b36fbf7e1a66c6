"""Hidden states that vLLM and speculators wrote, and datasets of Hugging Face, become traces; damage is one line."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

import millstream as ms
from millstream.errors import BadSource, MillstreamError
from millstream.traces.convert import convert, expand
from millstream.traces.llm.questions import read_questions
from support.commands import run_here

LAYERS, DIM = 3, 4


def hidden_of(i: int) -> torch.Tensor:
    """The states of request i, [token, layer, dim], as vLLM writes them."""
    return torch.randn(5 + i, LAYERS, DIM, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)


def write_requests(folder: Path, count: int = 12) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        save_file({"hidden_states": hidden_of(i), "token_ids": torch.arange(5 + i)}, folder / f"hs_{i}.safetensors")
        (folder / f"hs_{i}.safetensors.lock").touch()


def save_dataset(
    rows: list[dict[str, object]], folder: Path, *, files: int = 2, schema: pa.Schema | None = None
) -> None:
    """As `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for name, chosen in zip(names, np.array_split(np.arange(len(rows)), files), strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table.take(chosen), max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def dataset_rows(count: int = 5) -> list[dict[str, object]]:
    return [
        {
            "id": f"q{i}",
            "question": f"Question {i}?",
            "answers": ["yes", "sí"],
            "response": "ja 👍",
            "input_ids": list(range(4 + i)),
            "loss_mask": [0, 1, 0] + [1] * (1 + i),
            "hidden_states": hidden_of(i)[: 4 + i].float().tolist(),  # 4 + i tokens
            "logprobs": [-0.5] * (1 + i),
            "score": i / 2,
        }
        for i in range(count)
    ]


def test_files_of_one_request_each_share_shards_in_the_order_of_their_numbers(tmp_path: Path):
    write_requests(tmp_path / "hidden")
    written = convert(expand([str(tmp_path / "hidden")]), tmp_path / "store")
    traces = ms.open(tmp_path / "store")
    assert written.records == 12 and len(traces.shards) == 1
    assert traces.column("question_id").to_pylist() == [f"hs_{i}" for i in range(12)]
    assert str(traces.fields["hidden"]) == "bfloat16[layer, token, dim]"
    for i, trace in enumerate(traces):
        assert torch.equal(trace["hidden"], hidden_of(i).permute(1, 0, 2))
        assert trace["tokens"].tolist() == list(range(5 + i))


def test_a_conversion_of_requests_resumes_after_the_last_one(tmp_path: Path):
    write_requests(tmp_path / "hidden")
    files = expand([str(tmp_path / "hidden")])
    broken, data = files[7], files[7].read_bytes()
    broken.write_bytes(b"\xff" * len(data))
    with pytest.raises(BadSource, match=broken.name):
        convert(files, tmp_path / "store")
    broken.write_bytes(data)
    convert(files, tmp_path / "store")
    assert ms.open(tmp_path / "store").column("question_id").to_pylist() == [f"hs_{i}" for i in range(12)]


def test_speculators_keeps_the_mask_of_the_answer_in_the_dataset_above(tmp_path: Path):
    rows = [{"input_ids": list(range(5 + i)), "loss_mask": [0, 0, 0] + [1] * (1 + i) + [0]} for i in range(3)]
    save_dataset(rows, tmp_path / "data")
    write_requests(tmp_path / "data" / "hidden_states", 3)
    convert(expand([str(tmp_path / "data" / "hidden_states")]), tmp_path / "store")
    traces = ms.open(tmp_path / "store")
    assert [(trace["prompt_len"], trace["answer_len"]) for trace in traces] == [(3, 1), (3, 2), (3, 3)]
    assert traces[1]["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0]
    save_file({"hidden_states": hidden_of(1), "token_ids": torch.zeros(6, dtype=torch.int64)},
              tmp_path / "data" / "hidden_states" / "hs_1.safetensors")  # fmt: skip
    with pytest.raises(BadSource, match="row 1"):
        convert(expand([str(tmp_path / "data" / "hidden_states")]), tmp_path / "other")


def test_the_older_files_of_speculators_become_the_same_traces(tmp_path: Path):
    for i in range(11):
        states = [hidden_of(i)[:, layer] for layer in range(LAYERS)]
        mask = torch.tensor([0, 0, 0] + [1] * (2 + i))
        torch.save(
            {"input_ids": torch.arange(5 + i), "hidden_states": states, "loss_mask": mask}, tmp_path / f"data_{i}.pt"
        )
    convert(expand([str(tmp_path / "*.pt")]), tmp_path / "store")
    traces = ms.open(tmp_path / "store")
    assert len(traces.shards) == 1 and str(traces.fields["hidden"]) == "bfloat16[layer, token, dim]"
    assert traces.column("question_id").to_pylist() == [f"data_{i}" for i in range(11)]
    for i, trace in enumerate(traces):
        assert torch.equal(trace["hidden"], hidden_of(i).permute(1, 0, 2))
        assert (trace["prompt_len"], trace["answer_len"]) == (3, 2 + i)
    torch.save({"input_ids": torch.arange(4), "hidden_states": states, "loss_mask": mask}, tmp_path / "data_0.pt")
    with pytest.raises(BadSource, match=r"data_0\.pt: hidden_states"):
        convert([tmp_path / "data_0.pt"], tmp_path / "other")


def test_a_dataset_becomes_traces_with_our_names_and_layers_first(tmp_path: Path):
    save_dataset(dataset_rows(), tmp_path / "data")
    convert(expand([str(tmp_path / "data")]), tmp_path / "store")
    traces = ms.open(tmp_path / "store")
    assert len(traces) == 5
    for i, (trace, row) in enumerate(zip(traces, dataset_rows(), strict=True)):
        texts = ("question_id", "question", "aliases", "generated_answer", "score")
        assert [trace[name] for name in texts] == [f"q{i}", row["question"], ["yes", "sí"], "ja 👍", i / 2]
        assert np.array_equal(trace["hidden"], np.asarray(row["hidden_states"], np.float32).transpose(1, 0, 2))
        assert trace["tokens"].dtype == np.int32 and trace["tokens"].tolist() == row["input_ids"]
        assert (trace["prompt_len"], trace["answer_len"]) == (3, 1 + i)  # the last run of the mask
        assert trace["logprobs"].tolist() == row["logprobs"]


def test_a_dataset_may_have_layers_first_or_one_layer_or_only_texts(tmp_path: Path):
    rows = dataset_rows()
    for row in rows:
        row["hidden_states"] = np.asarray(row["hidden_states"]).transpose(1, 0, 2).tolist()
    save_dataset(rows, tmp_path / "layers")
    convert(expand([str(tmp_path / "layers")]), tmp_path / "layers_store")
    assert [trace["hidden"].shape for trace in ms.open(tmp_path / "layers_store")] == [
        (3, 4 + i, DIM) for i in range(5)
    ]
    for row in rows:
        row["hidden_states"] = cast_list(row["hidden_states"])[0]
    save_dataset(rows, tmp_path / "one")
    convert(expand([str(tmp_path / "one")]), tmp_path / "one_store")
    assert [trace["hidden"].shape for trace in ms.open(tmp_path / "one_store")] == [(1, 4 + i, DIM) for i in range(5)]
    texts = [{name: row[name] for name in ("id", "question", "answers")} for row in rows]
    save_dataset(texts, tmp_path / "texts", files=1)
    convert(expand([str(tmp_path / "texts")]), tmp_path / "texts_store")
    assert ms.open(tmp_path / "texts_store").column("aliases").to_pylist() == [["yes", "sí"]] * 5


def cast_list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def test_a_row_with_as_many_tokens_as_layers_follows_the_others(tmp_path: Path):
    rows = dataset_rows()
    square = {
        **rows[0],
        "input_ids": [7, 8, 9],
        "loss_mask": [0, 0, 1],
        "hidden_states": hidden_of(9)[:3].float().tolist(),
    }
    save_dataset([square, *rows], tmp_path / "data")
    convert(expand([str(tmp_path / "data")]), tmp_path / "store")
    assert np.array_equal(ms.open(tmp_path / "store")[0]["hidden"], hidden_of(9)[:3].float().permute(1, 0, 2))
    save_dataset([square], tmp_path / "square", files=1)
    with pytest.raises(BadSource, match="as many tokens as layers"):
        convert(expand([str(tmp_path / "square")]), tmp_path / "other")


def test_a_dataset_is_a_source_of_questions(tmp_path: Path):
    save_dataset(dataset_rows(), tmp_path / "data")
    found = read_questions(tmp_path / "data").questions
    assert [one.id for one in found] == [f"q{i}" for i in range(5)]
    assert found[0].aliases == ("yes", "sí") and found[0].given is not None and found[0].given.text == "ja 👍"


def test_what_save_to_disk_writes_is_converted(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_list(dataset_rows()).save_to_disk(str(tmp_path / "data"), num_shards=2)
    convert(expand([str(tmp_path / "data")]), tmp_path / "store")
    assert [trace["hidden"].shape for trace in ms.open(tmp_path / "store")] == [(3, 4 + i, DIM) for i in range(5)]


def test_a_folder_with_both_and_one_with_splits_are_refused(tmp_path: Path):
    save_dataset(dataset_rows(), tmp_path / "data")
    save_file({"hidden_states": hidden_of(0), "token_ids": torch.arange(5)}, tmp_path / "data" / "a.safetensors")
    with pytest.raises(BadSource, match=r"a\.safetensors"):
        expand([str(tmp_path / "data")])
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for refuse in (lambda: expand([str(tmp_path / "splits")]), lambda: read_questions(tmp_path / "splits")):
        with pytest.raises(BadSource, match=r"splits/train"):
            refuse()


def of_tensors(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda file: save_file(tensors, file)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda file: file.write_bytes(b""), "not a valid safetensors"),
        (lambda file: file.write_bytes(b"\xff" * 64), "not a valid safetensors"),
        (lambda file: file.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"), "not a valid safetensors"),
        (lambda file: file.write_bytes(b"\x02" + b"\0" * 7 + b"{}"), "none"),
        (of_tensors(**{"model.embed.weight": torch.zeros(2, 2)}), r"model\.embed\.weight"),
        (of_tensors(hidden_states=torch.zeros(3, 2, 4), token_ids=torch.arange(5)), r"\[3, 2, 4\]"),
        (of_tensors(hidden_states=torch.zeros(3, 2, 4, dtype=torch.int8), token_ids=torch.arange(3)), "I8"),
        (of_tensors(hidden_states=torch.zeros(3), token_ids=torch.arange(3)), r"\[3\]"),
        (of_tensors(hidden_states=torch.zeros(2, 1, 1), token_ids=torch.tensor([-1, 0])), "whole numbers"),
        (of_tensors(hidden_states=torch.zeros(2, 1, 1), token_ids=torch.ones(2)), "whole numbers"),
        (of_tensors(hidden_states=torch.zeros(2, 1, 1), token_ids=torch.arange(2), loss_mask=torch.ones(3)), "_mask"),
    ],
)
def test_a_damaged_file_of_a_request_is_one_line(tmp_path: Path, write: Callable[[Path], None], what: str):
    write(tmp_path / "a.safetensors")
    with pytest.raises(BadSource, match=what) as raised:
        convert([tmp_path / "a.safetensors"], tmp_path / "store")
    assert str(tmp_path / "a.safetensors") in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("state.json", b"{", "state.json: damaged"),
        ("state.json", b"[]", "state.json: damaged"),
        ("state.json", b'{"_data_files": [{"filename": "../secret.arrow"}]}', "no Arrow file"),
        ("state.json", b'{"_data_files": [{"filename": "gone.arrow"}]}', "no such file"),
        ("state.json", b'{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', "datasets 2"),
        ("state.json", b'{"_data_files": []}', "no rows"),
        ("data-00001-of-00002.arrow", b"", "not a valid Arrow"),
        ("data-00001-of-00002.arrow", b"\xff" * 100, "not a valid Arrow"),
    ],
)
def test_a_damaged_dataset_is_one_line(tmp_path: Path, name: str, data: bytes, what: str):
    save_dataset(dataset_rows(), tmp_path / "data")
    (tmp_path / "data" / name).write_bytes(data)
    code, _, errors = run_here("convert", tmp_path / "data", tmp_path / "store")
    assert code == 1 and what in errors.splitlines()[-1] and "Traceback" not in errors
    with pytest.raises(BadSource, match=what):
        read_questions(tmp_path / "data")


def test_every_cut_and_every_changed_byte_of_an_arrow_file_is_refused_or_read(tmp_path: Path):
    save_dataset(dataset_rows(2), tmp_path / "data", files=1)
    file = next((tmp_path / "data").glob("*.arrow"))
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(data), 150).tolist():
        for number, other in enumerate((data[:place], data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])):
            file.write_bytes(other)
            with suppress(MillstreamError):
                convert([file], tmp_path / f"store{place}{number}")


def test_ragged_columns_and_too_little_memory_name_the_row(tmp_path: Path):
    rows = dataset_rows(2)
    rows[1]["hidden_states"] = [[[1.0, 2.0], [1.0]]] * 5
    save_dataset(rows, tmp_path / "ragged", files=1)
    with pytest.raises(BadSource, match=r"row 2, column 'hidden_states'"):
        convert(expand([str(tmp_path / "ragged")]), tmp_path / "store")
    save_dataset(dataset_rows(2), tmp_path / "data", files=1)
    with pytest.raises(BadSource, match="more memory"):
        convert(expand([str(tmp_path / "data")]), tmp_path / "small", memory=100)
