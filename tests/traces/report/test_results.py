"""From the files of a run to its results: choices on validation, comparisons, findings, damaged files."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

import millstream as ms
from millstream.core.tables import publish_table
from millstream.errors import BadSource
from millstream.report.measures import Difference, draw
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import ModelResult, Results
from support.making_run import MODELS, PROBES, Made, make_run, question_of

FEW = ("gnn", "mean_logprob", "length")
Row = dict[str, object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return read_results(run, resamples=1000)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("few"), models=FEW, num_test=100)


@pytest.fixture
def few(made_once: Path, tmp_path: Path) -> Path:
    """A new run for every test, with its store next to it."""
    for name in ("run", "traces"):
        shutil.copytree(made_once.parent / name, tmp_path / name)
    card = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps(card | {"store": str(tmp_path / "traces")}))
    return tmp_path / "run"


def read(run: Path, resamples: int = 50) -> Results:
    return read_results(run, resamples=resamples)


def model(results: Results, name: str) -> ModelResult:
    return next(model for model in results.models if model.name == name)


def difference(results: Results, a: str, b: str) -> Difference:
    return next(found for found in results.differences if (found.a, found.b) == (a, b))


def scores_of(run: Path, name: str, part: str = "test", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores from the file."""
    table = pq.read_table(run / "predictions.parquet").to_pylist()
    rows = [row for row in table if (row["model"], row["part"], row["seed"]) == (name, part, seed)]
    return np.array([row["label"] for row in rows]), np.array([row["score"] for row in rows])


def rewrite(run: Path, change: Callable[[Row], Row | None]) -> None:
    """Change or drop every row of the predictions."""
    table = pq.read_table(run / "predictions.parquet")
    rows = [new for row in table.to_pylist() if (new := change(row)) is not None]
    publish_table(run / "predictions.parquet", pa.Table.from_pylist(rows, schema=table.schema))


def knows(run: Path, name: str, part: str) -> None:
    """Make a detector perfect on one split."""
    rewrite(
        run, lambda row: row | {"score": 1.0 * row["label"]} if (row["model"], row["part"]) == (name, part) else row
    )


def write_lines(run: Path, lines: Sequence[Row], *, end: str = "") -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + end)


# -- numbers


def test_numbers_are_means_over_seeds_on_the_test_split(run: Path, results: Results):
    areas = [roc_auc_score(*scores_of(run, "gnn", seed=seed)) for seed in range(2)]
    on_val = [roc_auc_score(*scores_of(run, "gnn", "val", seed)) for seed in range(2)]
    gnn = model(results, "gnn")
    assert gnn.auroc.value == pytest.approx(np.mean(areas)) and gnn.auroc_val == pytest.approx(np.mean(on_val))
    assert gnn.auroc_sd == pytest.approx(np.std(areas, ddof=1)) and gnn.seeds == 2
    assert gnn.auroc.low < gnn.auroc.value < gnn.auroc.high
    assert (gnn.fit_s, gnn.score_ms, gnn.trace_kb, gnn.parameters) == (12.5, 1.0, 32.0, 90_000)
    labels, _ = scores_of(run, "gnn")
    assert (results.num_test, results.num_wrong) == (200, labels.sum())
    assert results.prevalence == pytest.approx(labels.mean())


def test_models_are_sorted_by_auroc_and_baselines_have_one_seed(results: Results):
    areas = [model.auroc.value for model in results.models]
    assert areas == sorted(areas, reverse=True) and len(areas) == len(MODELS)
    assert {model.name: model.kind for model in results.models} == {name: made.family for name, made in MODELS.items()}
    assert model(results, "length").auroc_sd is None and model(results, "length").seeds == 1


def test_only_probabilities_have_a_brier_score_before_platt_scaling(results: Results):
    for one in results.models:
        assert (one.brier is not None) == (one.ece is not None) == MODELS[one.name].probabilities
        assert 0 < one.brier_platt < 0.26 and 0 <= one.ece_platt < 0.2


def test_the_threshold_and_the_calibration_are_chosen_on_validation(few: Path):
    before = model(read(few), "gnn")
    labels, scores = scores_of(few, "gnn")
    other, _ = scores_of(few, "gnn", seed=1)
    assert before.f1.value == pytest.approx(
        np.mean([f1_score(labels, scores >= before.threshold), f1_score(other, _ >= second_threshold(few))])
    )
    rewrite(few, lambda row: row | {"score": row["score"] / 2} if row["part"] == "test" else row)  # type: ignore
    after = model(read(few), "gnn")
    assert after.threshold == before.threshold
    assert after.auroc == before.auroc
    assert after.recall < before.recall and after.f1.value < before.f1.value
    assert after.brier_platt > before.brier_platt + 0.05


def second_threshold(run: Path) -> float:
    labels, scores = scores_of(run, "gnn", "val", 1)
    return max(np.unique(scores), key=lambda threshold: f1_score(labels, scores >= threshold))


def test_results_are_deterministic_and_independent_of_row_order(few: Path):
    first = read(few)
    assert read(few) == first
    table = pq.read_table(few / "predictions.parquet")
    publish_table(few / "predictions.parquet", table.take(np.random.default_rng(0).permutation(table.num_rows)))
    again = read(few)
    assert [again.differences, again.findings, again.mistakes] == [first.differences, first.findings, first.mistakes]
    assert sorted(again.models, key=lambda one: one.name) == sorted(first.models, key=lambda one: one.name)


def test_an_interval_is_of_the_mean_over_seeds_on_the_same_draws(few: Path):
    both = [scores_of(few, "gnn", seed=seed) for seed in range(2)]
    labels = both[0][0].astype(np.int8)
    questions = np.unique([question_of(number) for number in range(300, 400)], return_inverse=True)[1]
    counts = np.concatenate(list(draw(labels, questions, resamples=60)))
    areas = [[roc_auc_score(*one, sample_weight=row) for one in both] for row in counts]
    precisions = [[average_precision_score(*one, sample_weight=row) for one in both] for row in counts]
    gnn = model(read(few, 60), "gnn")
    for interval, values in ((gnn.auroc, areas), (gnn.aupr, precisions)):
        assert [interval.low, interval.high] == pytest.approx(np.quantile(np.mean(values, axis=1), [0.025, 0.975]))


def test_the_later_of_duplicate_scores_counts(few: Path):
    first = read(few)
    table = pq.read_table(few / "predictions.parquet")
    stale = table.set_column(6, "score", pa.chunked_array([-table.column("score").to_numpy()]))
    publish_table(few / "predictions.parquet", pa.concat_tables([stale, table]))
    assert read(few) == first


def test_questions_are_resampled_not_records(few: Path):
    alone = model(read(few, 400), "gnn").auroc
    # Ten records a question, all alike in label and score, but with other numbers: nothing new is known.
    table = pq.read_table(few / "predictions.parquet")
    records = table.column("record").to_numpy()
    copies = [table.set_column(1, "record", pa.chunked_array([records * 10 + copy])) for copy in range(10)]
    publish_table(few / "predictions.parquet", pa.concat_tables(copies))
    many = model(read(few, 400), "gnn").auroc
    assert many.high - many.low == pytest.approx(alone.high - alone.low, rel=0.01)


# -- comparisons


def test_the_best_baseline_and_the_best_probe_are_chosen_on_validation(tmp_path: Path):
    run = make_run(tmp_path, models=("gnn", "probe_first_answer", "probe_last_answer", "length"), num_test=100, seeds=1)
    knows(run, "probe_first_answer", "val")
    knows(run, "probe_last_answer", "test")
    found = read(run)
    assert found.models[0].name == "probe_last_answer"
    pairs = {(one.a, one.b) for one in found.differences}
    assert pairs == {("gnn", "probe_first_answer"), ("gnn", "length"), ("probe_first_answer", "length")}
    assert "best probe" in found.findings[1] and "probe_first_answer" in found.findings[1]
    assert {mistake.detector for mistake in found.mistakes} == {"probe_first_answer"}


def test_the_best_trained_detector_is_chosen_on_validation(tmp_path: Path):
    run = make_run(tmp_path, models=("gnn", "lstm", "length"), num_test=100, seeds=1)
    knows(run, "lstm", "val")
    knows(run, "gnn", "test")
    assert "lstm, has AUROC" in read(run).findings[0]


def test_every_comparison_is_made_once(results: Results):
    pairs = [(found.a, found.b) for found in results.differences]
    best = max((model(results, name) for name in PROBES), key=lambda probe: probe.auroc_val).name
    trained = ("gnn", "lstm", "gvae")
    expected = {(one, other) for one in trained for other in (best, "length", "mean_logprob", "token_stats")}
    expected |= {("gnn", "lstm"), ("gnn", "gvae"), ("lstm", "gvae"), (best, "length"), (best, "mean_logprob")}
    expected |= {(one, f"{one}_{null}") for one in ("gnn", "gvae") for null in ("shuffled", "unwired")}
    assert set(pairs) == expected and len(pairs) == len(expected)


def test_a_difference_is_paired(results: Results):
    for found in results.differences:
        a, b = model(results, found.a).auroc, model(results, found.b).auroc
        assert found.value.value == pytest.approx(a.value - b.value)
        assert found.value.low <= found.value.value <= found.value.high
    found = difference(results, "gnn", "gnn_unwired").value
    a, b = model(results, "gnn").auroc, model(results, "gnn_unwired").auroc
    assert found.high - found.low < 0.9 * np.hypot(a.high - a.low, b.high - b.low)


def test_every_p_is_corrected_for_all_comparisons(results: Results):
    ranked = sorted(results.differences, key=lambda found: found.p)
    assert ranked[0].p_holm == pytest.approx(min(1, len(ranked) * ranked[0].p))
    for number, (found, following) in enumerate(pairwise(ranked), start=1):
        expected = max(found.p_holm, min(1, (len(ranked) - number) * following.p))
        assert following.p_holm == pytest.approx(expected)
    assert all(found.differs == (found.p_holm < 0.05) for found in ranked)
    assert any(found.p < 0.05 and not found.differs for found in ranked)


# -- findings


def made(**signals: float) -> dict[str, Made]:
    families = {"gnn": "trained", "gnn_shuffled": "null", "gnn_unwired": "null"}
    return {name: Made(families.get(name, "baseline"), name, signal) for name, signal in signals.items()}


def test_the_first_finding_is_the_best_detector_and_its_margin_over_baselines(tmp_path: Path):
    found = read(make_run(tmp_path, models=made(gnn=2.6, mean_logprob=1.0, length=0.4)), 400)
    by = difference(found, "gnn", "mean_logprob")
    first = found.findings[0]
    assert by.differs and f"{model(found, 'gnn').auroc}" in first
    assert (
        f"beats mean_logprob ({model(found, 'mean_logprob').auroc.value:.3f}) by {by.value}, p <= {by.p_holm:.3f}"
        in first
    )
    assert "beats length" in first


def test_findings_report_a_best_detector_that_does_not_beat_a_baseline(tmp_path: Path):
    found = read(make_run(tmp_path, models=made(gnn=1.5, mean_logprob=1.5, probe_last_answer=3.5)), 400)
    by = difference(found, "gnn", "mean_logprob")
    assert not by.differs
    assert "does NOT beat mean_logprob" in found.findings[0] and f"{by.value:+.3f}" in found.findings[0]
    worse = difference(found, "gnn", "probe_last_answer").value
    assert "gnn is WORSE than probe_last_answer" in found.findings[1] and f"{-worse}" in found.findings[1]


@pytest.mark.parametrize(
    ("shuffled", "unwired", "num_beaten"),
    [(0.8, 0.8, 2), (2.0, 2.0, 0), (0.8, 2.4, 1)],
)
def test_structure_matters_only_if_both_null_models_are_beaten(
    tmp_path: Path, shuffled: float, unwired: float, num_beaten: int
):
    models = made(gnn=2.0, gnn_shuffled=shuffled, gnn_unwired=unwired)
    found = read(make_run(tmp_path, models=models), 400)
    (sentence,) = (one for one in found.findings if "ttention structure" in one)
    assert sentence.count("it beats") == num_beaten and sentence.count("does NOT beat") == 2 - num_beaten
    assert sentence.startswith("Attention structure matters to gnn") == (num_beaten == 2)
    assert ("NOT shown" in sentence) == (num_beaten == 0)


def sentence_with(found: Results, word: str) -> str:
    return next((one for one in found.findings if word in one), "")


def test_confounds_exclusions_and_seeds_are_findings(results: Results):
    assert f"{model(results, 'length').auroc}" in sentence_with(results, "confound")
    assert {"14", "814", "11", "3"} <= set(re.findall(r"\d+", sentence_with(results, "ambiguous")))
    sd = model(results, "gnn").auroc_sd
    assert f"{sd:.3f}" in sentence_with(results, "seeds")
    assert not sentence_with(results, "resamples") and not sentence_with(results, "small")


def test_small_tests_few_resamples_and_single_seeds_are_findings(tmp_path: Path):
    found = read(make_run(tmp_path, models=FEW, num_test=30, seeds=1), 20)
    interval = model(found, "gnn").auroc
    assert f"±{(interval.high - interval.low) / 2:.3f}" in sentence_with(found, "small")
    assert "0.19" in sentence_with(found, "resamples") and sentence_with(found, "trained with one seed")


def test_uninformative_length_is_not_a_confound(few: Path):
    rewrite(few, lambda row: row | {"score": 1.0 * (row["record"] % 3)} if row["model"] == "length" else row)  # type: ignore
    assert not sentence_with(read(few), "confound")


def test_a_run_of_baselines_reports_that_nothing_was_trained(tmp_path: Path):
    found = read(make_run(tmp_path, models=("length", "mean_logprob", "probe_last_answer"), num_test=100))
    assert found.findings[0].startswith("No trained detector")
    assert "probe_last_answer" in found.findings[1]


# -- texts


def test_auroc_by_length_has_up_to_four_ranges_covering_all_answers(run: Path, results: Results):
    ranges = model(results, "gnn").by_length
    assert len(ranges) == 4
    lengths = np.array(ms.open(run.parent / "traces").column("answer_len").to_pylist())[600:]  # type: ignore
    for name, num_questions, area in ranges:
        low, _, high = name.partition("-")
        inside = (lengths >= int(low)) & (lengths <= int(high or low))
        areas = [roc_auc_score(*(part[inside] for part in scores_of(run, "gnn", seed=seed))) for seed in range(2)]
        assert area == pytest.approx(np.mean(areas))
        assert 0.85 * inside.sum() < num_questions <= inside.sum()
    ends = [tuple(map(int, name.split("-"))) for name, _, _ in ranges]
    assert ends[0][0] == lengths.min() and ends[-1][-1] == lengths.max()
    assert all(one[-1] + 1 == following[0] for one, following in pairwise(ends))


def test_a_range_of_one_class_has_no_auroc(few: Path, tmp_path: Path):
    lengths = ms.open(tmp_path / "traces").column("answer_len").to_pylist()  # type: ignore
    longest = max(lengths)
    rewrite(few, lambda row: row | {"label": 0} if lengths[row["record"]] >= longest - 2 else row)  # type: ignore
    assert model(read(few), "gnn").by_length[-1][2] is None


def test_mistakes_are_the_most_confident_errors_of_the_best_detector(results: Results):
    mistakes = results.mistakes
    assert len(mistakes) == 12 and {mistake.detector for mistake in mistakes} == {"gnn"}
    errors = [abs(mistake.probability - (mistake.verdict == "wrong")) for mistake in mistakes]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0.5
    assert {mistake.verdict for mistake in mistakes} == {"right", "wrong"}
    for mistake in mistakes:
        assert mistake.answer.startswith(mistake.verdict)
        number = mistake.answer.split()[1]
        assert mistake.question == f"What is <b>{number}</b> & why?"
        assert mistake.references == [f"right {number}", f"Right {number}"]
        assert mistake.id in (f"q{number}", f"q{int(number) - 1}")


def without_texts(found: Results) -> None:
    assert all(list(one.by_length) == [] for one in found.models)
    assert found.mistakes and all(mistake.id.startswith("q") for mistake in found.mistakes)
    assert {(m.question, m.answer, tuple(m.references)) for m in found.mistakes} == {("", "", ())}


def test_a_run_without_its_store_has_results_but_no_texts(few: Path, tmp_path: Path):
    shutil.rmtree(tmp_path / "traces")
    without_texts(read(few))


def test_a_store_without_texts_is_enough(few: Path, tmp_path: Path):
    ids = ms.open(tmp_path / "traces").column("question_id").to_pylist()  # type: ignore
    shutil.rmtree(tmp_path / "traces")
    with ms.TraceWriter(tmp_path / "traces") as writer:
        writer.extend({"question_id": name, "vector": np.zeros(2)} for name in ids)
    without_texts(read(few))


@pytest.mark.parametrize("num_records", [400, 10])
def test_texts_of_another_store_at_the_same_path_are_not_used(few: Path, tmp_path: Path, num_records: int):
    shutil.rmtree(tmp_path / "traces")
    with ms.TraceWriter(tmp_path / "traces") as writer:
        writer.extend({"question_id": f"x{n}", "question": "another", "answer_len": 3} for n in range(num_records))
    without_texts(read(few))


# -- metrics


def test_settings_metrics_and_probe_curves_are_passed_on(run: Path, results: Results):
    assert results.config["seeds"] == 2 and results.environment["cores"] == 2 and results.data["label_rule"] == "em"
    assert results.metrics.memory[1] == (1.0, 800_000_001) and results.metrics.budget == 10**9
    assert dict(results.missing) == {"p_true": "the store has no field p_true"}
    assert results.path == run
    curve = results.probe_layers["last_answer"]
    assert set(results.probe_layers) == {name.removeprefix("probe_") for name in PROBES}
    assert (list(curve.x), list(curve.y)) == ([0, 1, 2, 3], MODELS["probe_last_answer"].chosen["auroc_by_layer"])
    epochs = [line["epoch"] for line in results.metrics.history if (line["model"], line["seed"]) == ("gnn", 1)]
    assert epochs == [0, 1, 2]


def test_the_later_of_duplicate_lines_counts_and_an_incomplete_last_line_is_ignored(few: Path):
    lines = [json.loads(line) for line in (few / "metrics.jsonl").read_text().splitlines()]
    fit = next(line for line in lines if line["kind"] == "fit" and line["model"] == "length")
    epoch = {"kind": "epoch", "model": "gnn", "seed": 0, "epoch": 1, "loss": 0.123}
    write_lines(few, [epoch, fit | {"fit_s": 99.0}], end='{"kind": "fit", "model": "gn')
    found = read(few)
    assert [line["loss"] for line in found.metrics.history if line["epoch"] == 1 and line["seed"] == 0] == [0.123]
    assert len(found.metrics.history) == 6
    assert model(found, "length").fit_s == 99.0


def test_only_finished_detectors_and_seeds_have_results(few: Path):
    lines = [json.loads(line) for line in (few / "metrics.jsonl").read_text().splitlines()]
    unfinished = {("gnn", 1), ("length", 0)}
    kept = [line for line in lines if line["kind"] != "fit" or (line["model"], line["seed"]) not in unfinished]
    scored_later = next(line for line in lines if line["kind"] == "fit") | {"model": "lstm"}
    (few / "metrics.jsonl").write_text("")
    write_lines(few, [*kept, scored_later])
    found = read(few)
    assert {one.name: one.seeds for one in found.models} == {"gnn": 1, "mean_logprob": 1}
    assert [(one.a, one.b) for one in found.differences] == [("gnn", "mean_logprob")]


def test_a_detector_with_nan_scores_is_listed_as_missing(few: Path):
    bad = float("nan")
    rewrite(
        few, lambda row: row | {"score": bad} if (row["model"], row["seed"], row["record"]) == ("gnn", 1, 350) else row
    )
    found = read(few)
    assert "1 scores of seed 1" in found.missing["gnn"]
    assert "gnn" not in {one.name for one in found.models}


# -- missing and damaged files


def fails(run: Path, *parts: str) -> None:
    is_named(run, "Next: ", f"millstream train data=STORE out={run}", *parts)


def is_named(run: Path, *parts: str) -> None:
    with pytest.raises(BadSource) as raised:
        read(run)
    for part in (str(run), *parts):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_finished_detectors_is_rejected_with_the_next_command(few: Path, tmp_path: Path):
    fails(tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.yaml")
    shutil.copy(few / "predictions.parquet", tmp_path / "kept")
    (few / "predictions.parquet").unlink()
    fails(few, "no detector is finished yet")
    (few / "predictions.parquet").mkdir()
    is_named(few, "predictions.parquet: is damaged (it is not a file)")
    (few / "predictions.parquet").rmdir()
    shutil.copy(tmp_path / "kept", few / "predictions.parquet")
    (few / "metrics.jsonl").write_text('{"kind": "memory", "time_s": 1, "bytes": 5}\n')
    fails(few, "no detector is finished yet")


@pytest.mark.parametrize("name", ["config.yaml", "data.json", "env.json", "predictions.parquet", "metrics.jsonl"])
def test_a_damaged_file_is_named(few: Path, name: str):
    (few / name).write_text("{[ no\n {[ no\n")
    is_named(few, name, "damaged")


@pytest.mark.parametrize("name", ["data.json", "env.json"])
def test_a_missing_or_wrong_file_is_named(few: Path, name: str):
    (few / name).write_text("[1, 2]")
    is_named(few, name, "list")
    (few / name).unlink()
    is_named(few, name, "no such file")


def test_an_incomplete_line_is_named(few: Path):
    write_lines(few, [{"kind": "fit", "model": "gnn", "seed": 0}])
    is_named(few, "metrics.jsonl: line", "'family'")


def test_predictions_with_missing_columns_or_records_are_damaged(few: Path):
    table = pq.read_table(few / "predictions.parquet")
    rewrite(few, lambda row: None if (row["model"], row["record"]) == ("length", 333) else row)
    fails(few, "length, seed 0", "test records")
    publish_table(few / "predictions.parquet", table.filter(pc.field("part") == "val"))
    fails(few, "test split", "no records")
    publish_table(few / "predictions.parquet", table.drop_columns(["score"]))
    fails(few, "predictions.parquet", "score")


def test_a_split_of_one_class_cannot_be_compared(few: Path):
    rewrite(few, lambda row: row | {"label": 0} if row["part"] == "val" else row)
    fails(few, "val split", "only right answers")
