"""Notebooks show collections, splits and runs as tables."""

from pathlib import Path

import numpy as np

import millstream as ms


def test_a_collection_shows_its_first_records_escaped_and_without_reading_tensors(tmp_path: Path):
    with ms.TraceWriter(tmp_path / "store") as writer:
        for number in range(5):
            record = {"question_id": f"q{number}", "question": "<b>" + "why " * 50, "score": np.float32(1 / 3)}
            writer.append({**record, "hidden": np.zeros((4, 600), np.float32), "tokens": np.arange(number)})
    traces = ms.open(tmp_path / "store")
    html = traces._repr_html_()
    assert "5 records" in html and "<b>why" not in html and "&lt;b&gt;why" in html and "..." in html
    assert "<td>q2</td>" in html and "<td>q3</td>" not in html
    assert "0.3333" in html and "int64 [2]" in html and "larger fields: hidden" in html
    half = ms.split(traces, {"a": 0.5, "b": 0.5})
    assert "<td>q4</td>" in traces.subset([4])._repr_html_() and "<th>share</th>" in half._repr_html_()
    assert "0 of 5 records" in traces.subset([])._repr_html_()


def test_reads_show_their_columns(tmp_path: Path):
    (tmp_path / "reads.fa").write_text(">a x\nACGT\n>b\n" + "G" * 5000 + "\n")
    html = ms.open(tmp_path / "reads.fa")._repr_html_()
    assert "2 reads" in html and "<td>name</td><td>a</td><td>b</td>" in html and "larger fields: sequence" in html


def test_a_run_without_results_says_so(tmp_path: Path):
    from millstream.training.run import Run

    assert "is not a run" in Run(tmp_path, [])._repr_html_()
