"""Measures of tokens equal scikit-learn's, spans are matched one to one, and intervals resample questions."""

import csv
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

pytest.importorskip("matplotlib")

from millstream.core.tables import publish_table, read_table
from millstream.errors import BadSource
from millstream.traces.label import label
from millstream.traces.report import report
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import Results
from millstream.traces.report.tokens import runs_of, span_hits
from millstream.traces.store.traces import Traces
from support.commands import run_here
from support.making_spans import write_spans
from support.training import SHORT

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory", "quick_fits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, roughly_measured_memory: None, quick_fits: None) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_spans(folder / "s", 90)
    label(folder / "s", rule="spans")
    settings = {**SHORT, "train": 0.4, "val": 0.2, "seeds": 2}
    code, _, errors = run_here(
        *("train", f"data={folder / 's'}", f"out={folder / 'run'}"),
        "model=token-probe,token-lstm,token-logprob,token-entropy,mean_logprob",
        *(f"{name}={value}" for name, value in settings.items()),
    )
    assert code == 0, errors
    return folder / "run"


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return read_results(run, resamples=300)


def tokens_of(run: Path, model: str, part: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Labels and scores of the labelled tokens, and the labels of each record."""
    rows = [
        row
        for row in pq.read_table(run / "predictions.parquet").to_pylist()
        if (row["model"], row["part"], row["seed"]) == (model, part, seed)
    ]
    each = [np.array([-1 if one is None else one for one in row["token_labels"]]) for row in rows]
    labels, scores = np.concatenate(each), np.concatenate([row["token_scores"] for row in rows])
    return labels[labels >= 0], scores[labels >= 0], each


def test_numbers_equal_those_of_scikit_learn(run: Path, results: Results):
    assert results.tokens is not None
    found = {model.name: model for model in results.tokens.models}
    assert set(found) == {"token-probe", "token-lstm", "token-logprob", "token-entropy"}
    for name, model in found.items():
        seeds = range(model.seeds)
        assert model.seeds == (2 if name == "token-lstm" else 1)
        test, val = ([tokens_of(run, name, part, seed) for seed in seeds] for part in ("test", "val"))
        assert model.auroc.value == pytest.approx(np.mean([roc_auc_score(y, s) for y, s, _ in test]))
        assert model.auroc_val == pytest.approx(np.mean([roc_auc_score(y, s) for y, s, _ in val]))
        assert model.aupr.value == pytest.approx(np.mean([average_precision_score(y, s) for y, s, _ in test]))
        best = [max(np.unique(s), key=lambda t, y=y, s=s: (round(f1_score(y, s >= t), 9), t)) for y, s, _ in val]
        assert model.threshold == pytest.approx(best[0])  # of validation alone
        f1s = [f1_score(y, s >= t) for (y, s, _), t in zip(test, best, strict=True)]
        assert model.f1.value == pytest.approx(np.mean(f1s))
        for interval in (model.auroc, model.aupr, model.f1, model.span_f1):
            assert 0 <= interval.low <= interval.value + 0.02 and interval.value - 0.02 <= interval.high <= 1
    labels, _, _ = tokens_of(run, "token-probe", "test")
    assert (results.tokens.num_tokens, results.tokens.num_wrong) == (len(labels), labels.sum())
    assert found["token-probe"].auroc.value > 0.9 and found["token-probe"].span_f1.value > 0.4


def test_tokens_of_all_folds_are_pooled(tmp_path: Path):
    write_spans(tmp_path / "s", 60)
    label(tmp_path / "s", rule="spans")
    settings = {**SHORT, "seeds": 1, "folds": 3, "model": "token-probe,token-logprob"}
    code, _, errors = run_here(
        *("train", f"data={tmp_path / 's'}", f"out={tmp_path / 'run'}"),
        *(f"{name}={value}" for name, value in settings.items()),
    )
    assert code == 0, errors
    found = read_results(tmp_path / "run", resamples=100).tokens
    labels, _, each = tokens_of(tmp_path / "run", "token-probe", "test")
    assert len(each) == len(Traces(tmp_path / "s"))  # every record is in the test split of one fold
    assert found is not None and (found.num_tokens, found.num_wrong) == (len(labels), labels.sum())
    assert found.num_spans == sum(int((np.diff(one == 1, prepend=False) & (one == 1)).sum()) for one in each)
    best = max(found.models, key=lambda model: model.auroc.value)
    assert best.name == "token-probe" and best.auroc.value > 0.9 and best.span_f1.value > 0.4
    assert best.auroc.low < best.auroc.value < best.auroc.high


def test_intervals_of_levels_of_scores_are_those_of_scores(run: Path, results: Results):
    """Against a bootstrap over questions with every token."""
    rows = [
        row
        for row in pq.read_table(run / "predictions.parquet").to_pylist()
        if (row["model"], row["part"]) == ("token-logprob", "test")
    ]
    by_question: dict[str, list[dict]] = {}
    for row in rows:
        by_question.setdefault(row["question_id"], []).append(row)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(300):
        some = [
            row
            for number in rng.integers(0, len(by_question), len(by_question))
            for row in [*by_question.values()][number]
        ]
        pairs = [
            (y, s)
            for row in some
            for y, s in zip(row["token_labels"], row["token_scores"], strict=True)
            if y is not None
        ]
        drawn.append(roc_auc_score(*zip(*pairs, strict=True)))
    assert results.tokens is not None
    (model,) = [one for one in results.tokens.models if one.name == "token-logprob"]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert model.auroc.low == pytest.approx(low, abs=0.012) and model.auroc.high == pytest.approx(high, abs=0.012)


def slow_runs(chosen: list[bool], records: list[int]) -> list[set[int]]:
    runs: list[set[int]] = []
    for place, one in enumerate(chosen):
        if one and place and chosen[place - 1] and records[place] == records[place - 1]:
            runs[-1].add(place)
        elif one:
            runs.append({place})
    return runs


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=30))
def test_spans_match_if_they_share_more_than_half_of_their_tokens(tokens: list[tuple[bool, bool, int]]):
    tokens.sort(key=lambda one: one[2])
    flagged, wrong, records = ([one[side] for one in tokens] for side in range(3))
    place = np.array(records, np.int64)
    predicted, true = (runs_of(np.array(some, np.bool_), place) for some in (flagged, wrong))
    slow, slow_true = slow_runs(flagged, records), slow_runs(wrong, records)
    assert predicted.lengths.tolist() == [len(one) for one in slow]
    hits = [records[min(a)] for a in slow for b in slow_true if 2 * len(a & b) > len(a | b)]
    assert sorted(span_hits(predicted, true).tolist()) == sorted(hits)


def test_the_report_has_a_table_of_tokens_a_finding_and_files(run: Path, results: Results, tmp_path: Path):
    made = report(run)
    page = made.write_page(tmp_path / "report.html", []).read_text()
    assert '<section id="tokens"' in page and page.index('id="comparison"') < page.index('id="tokens"')
    assert "token-lstm" in page and "span F1" in page
    assert any("wrong tokens" in finding and "token-logprob" in finding for finding in made.results.findings)
    assert "wrong tokens" in made.text and "labelled test tokens are wrong" in made.text
    rows = list(csv.DictReader(made.tables()["tokens.csv"].splitlines()))
    assert {row["name"] for row in rows} == {model.name for model in results.tokens.models}  # pyright: ignore
    assert "token_differences.csv" in made.tables()
    assert json.loads(json.dumps(asdict(results.tokens)))["num_spans"] > 0  # pyright: ignore


def test_evaluated_records_have_the_same_section(run: Path):
    import millstream as ms

    again = read_results(ms.evaluate(run), resamples=50)
    assert again.tokens is not None
    assert {m.name: m.auroc.value for m in again.tokens.models} == pytest.approx(
        {m.name: m.auroc.value for m in read_results(run, resamples=50).tokens.models}  # pyright: ignore
    )


def test_a_run_without_token_detectors_has_no_section_and_damaged_scores_are_named(run: Path, tmp_path: Path):
    import shutil

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    table = read_table(copy / "predictions.parquet")
    publish_table(copy / "predictions.parquet", table.select([n for n in table.schema.names if "token_" not in n]))
    assert read_results(copy, resamples=20).tokens is None
    assert 'id="tokens"' not in report(copy).write_page(tmp_path / "report.html", []).read_text()
    short = [None if one is None else one[:-1] for one in table.column("token_scores").to_pylist()]
    place = table.schema.names.index("token_scores")
    broken = table.set_column(place, "token_scores", pa.chunked_array([pa.array(short, pa.list_(pa.float32()))]))
    publish_table(copy / "predictions.parquet", broken)
    with pytest.raises(BadSource, match="token scores of token-"):
        read_results(copy, resamples=20)
