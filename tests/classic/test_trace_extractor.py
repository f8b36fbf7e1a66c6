"""The old extractor's flags: 500 traces per batch, the old names of files and fields, and resuming."""

import json
from pathlib import Path

import pytest

from support.extras import need

need("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import make_model

    return make_model("gpt2", tmp_path_factory.mktemp("model") / "gpt2")


def test_an_extraction_resumes_and_the_old_loader_reads_it(model, tmp_path, monkeypatch, capsys):
    from millstream.classic import TraceBatchLoader
    from millstream.classic.trace_extractor import main

    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"tc_{i}", "question": f"what is {i}?", "answer": "x", "aliases": ["x", "y"]} for i in range(25)]
    Path("trivia_qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model-id", str(model), "--dataset", "trivia_qa.jsonl", "--batch-size", "10", "max_new_tokens=4"]
    main([*flags, "--num-samples", "20"])
    sealed = {file.name: file.stat().st_mtime_ns for file in Path("traces_data").glob("*.arrow")}
    main(flags)
    assert "20 of 25" in capsys.readouterr().err
    for name, written in sealed.items():  # saved batches are not rewritten
        assert (Path("traces_data") / name).stat().st_mtime_ns == written
    assert [f"trivia_qa_traces_batch_{n:04d}.arrow" for n in range(3)] == sorted(
        file.name for file in Path("traces_data").glob("trivia_qa*")
    )
    loader = TraceBatchLoader()
    assert (len(loader), loader.get_total_traces()) == (3, 25)
    trace = loader.get_trace_by_global_id(12)
    assert trace is not None
    assert (trace["global_example_id"], trace["batch_number"], trace["example_id"]) == (12, 1, 2)
    assert trace["ground_truth_answers"] == ["x", "y"]
    layers, tokens = trace["hidden_states"].shape[0], len(trace["tokens"])
    assert (layers, trace["attentions"].shape) == (4, (3, 4, tokens, tokens))
    lengths = [len(trace["tokens"]) - trace["prompt_length"] for trace in loader.iter_traces()]
    assert lengths == loader.answer_lengths() and max(lengths) <= 4


def test_global_example_id_is_the_row_in_the_dataset_whatever_the_order_of_extraction(model, tmp_path, monkeypatch):
    from millstream.classic import TraceBatchLoader, extract_batch_subset
    from millstream.classic.trace_extractor import main

    monkeypatch.chdir(tmp_path)
    lengths = [30, 1, 1, 20, 1, 40, 2, 10]  # questions of similar length are traced together
    rows = [{"id": f"tc_{i}", "question": f"what is {i}" + " so" * n} for i, n in enumerate(lengths)]
    rows.insert(3, rows[1])  # a repeated row is left out, but counts
    Path("trivia_qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(["--model-id", str(model), "--dataset", "trivia_qa.jsonl", "--batch-size", "4", "max_new_tokens=2"])
    loader = TraceBatchLoader()
    traces = list(loader.iter_traces())
    assert [trace["global_example_id"] for trace in traces] != sorted(trace["global_example_id"] for trace in traces)
    assert all(rows[trace["global_example_id"]]["id"] == trace["question_id"] for trace in traces)
    extract_batch_subset([1], "part")
    for stored in (loader, TraceBatchLoader("part")):
        for trace in stored.iter_traces():
            assert stored.get_trace_by_global_id(trace["global_example_id"])["question_id"] == trace["question_id"]
    assert loader.get_trace_by_global_id(3) is None


def test_a_wrong_flag_or_setting_is_one_line(tmp_path, monkeypatch, capsys):
    from millstream.classic.trace_extractor import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["--model-id", "x", "teir=full"])
    assert capsys.readouterr().err.startswith("trace_extractor: teir=full: ")
