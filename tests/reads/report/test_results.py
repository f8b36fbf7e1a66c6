"""From the files of a run of classifiers to its results: choices on validation, findings, damaged files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import accuracy_score, f1_score

from millstream.core.tables import publish_table
from millstream.errors import BadSource
from millstream.reads.report import report_on
from millstream.reads.report.evaluate import read_results
from millstream.reads.report.results import ModelResult, ReadResults, class_rows, confused_pairs
from millstream.training.folder import kind_of
from support.making_read_run import EVIL, MODELS, Made, make_read_run

Row = dict[str, object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_read_run(tmp_path_factory.mktemp("reads"), seeds=2, num_reads=1500)


@pytest.fixture(scope="module")
def results(run: Path) -> ReadResults:
    return read_results(run)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_read_run(tmp_path, num_reads=100)


def read(run: Path) -> ReadResults:
    return read_results(run, resamples=50)


def model(results: ReadResults, name: str) -> ModelResult:
    return next(model for model in results.models if model.name == name)


def rows_of(run: Path, name: str, part: str, seed: int = 0) -> dict[str, np.ndarray]:
    rows = pq.read_table(run / "predictions.parquet").to_pylist()
    mine = [row for row in rows if (row["model"], row["part"], row["seed"]) == (name, part, seed)]
    return {key: np.array([row[key] for row in mine]) for key in mine[0]}


def rewrite(run: Path, change: Callable[[Row], Row | None]) -> None:
    table = pq.read_table(run / "predictions.parquet")
    rows = [new for row in table.to_pylist() if (new := change(row)) is not None]
    publish_table(run / "predictions.parquet", pa.Table.from_pylist(rows, schema=table.schema))


def finding(results: ReadResults, *words: str) -> str:
    """The first finding with all these words; empty if there is none."""
    return next((one for one in results.findings if all(word in one for word in words)), "")


# -- numbers


def test_numbers_are_means_over_seeds_and_equal_scikit_learn(run: Path, results: ReadResults):
    for part in ("val", "known", "heldout"):
        accuracy, macro_f1, genus = [], [], []
        for seed in range(2):
            rows = rows_of(run, "cnn", part, seed)
            known = rows["label"] >= 0
            labels, found = rows["label"][known], rows["class"][known]
            accuracy.append(accuracy_score(labels, found))
            macro_f1.append(f1_score(labels, found, average="macro"))
            genus.append(f1_score(labels // 2, rows["genus"][known], average="macro"))
        found = model(results, "cnn").splits[part]
        assert found.accuracy.value == pytest.approx(np.mean(accuracy))
        assert found.macro_f1.value == pytest.approx(np.mean(macro_f1))
        assert found.macro_f1_sd == pytest.approx(np.std(macro_f1, ddof=1))
        assert found.macro_f1.low < found.macro_f1.value < found.macro_f1.high
        assert {one.rank: one.num_taxa for one in found.ranks} == {"species": 6, "genus": 3}
        assert found.ranks[1].macro_f1.value == pytest.approx(np.mean(genus))
        assert found.ranks[0].macro_f1 == found.macro_f1


def test_the_best_model_is_chosen_on_validation_even_if_worse_on_test(results: ReadResults):
    assert [one.name for one in results.models] == ["cnn", "kmer-linear"]
    cnn, linear = (one.splits["heldout"].macro_f1.value for one in results.models)
    assert cnn < linear
    assert "cnn" in results.findings[0] and f"{results.models[0].splits['known'].macro_f1}" in results.findings[0]
    assert finding(results, "On heldout, cnn", "WORSE", "kmer-linear") and finding(
        results, "On known, cnn beats kmer-linear"
    )


def test_the_threshold_is_chosen_on_validation_and_used_on_all_splits(run: Path, results: ReadResults):
    rows = rows_of(run, "cnn", "val")
    right, chances = rows["class"] == rows["label"], rows["probability"]
    enough = [one for one in np.unique(chances) if right[chances >= one].mean() >= 0.95]
    threshold = results.models[0].threshold
    assert threshold == pytest.approx(min(enough))
    coverage, precision, unknown = [], [], []
    for seed in range(2):
        on_val, test = rows_of(run, "cnn", "val", seed), rows_of(run, "cnn", "heldout", seed)
        right = on_val["class"] == on_val["label"]
        own = min(p for p in np.unique(on_val["probability"]) if right[on_val["probability"] >= p].mean() >= 0.95)
        called = test["probability"] >= own
        coverage.append(called.mean())
        precision.append((test["class"] == test["label"])[called].mean())
        unknown.append(called[test["label"] < 0].mean())
    targets = {one.precision: one for one in results.models[0].splits["heldout"].targets}
    at = targets[0.95].at
    assert at is not None and at.coverage == coverage[0] and targets[0.95].threshold == threshold
    kept = [one.at.coverage for one in targets.values() if one.at is not None]
    assert kept == sorted(kept, reverse=True) and list(targets) == [0.9, 0.95, 0.99, 0.999]
    found = results.models[0].splits["heldout"]
    assert (found.coverage, found.precision) == pytest.approx((np.mean(coverage), np.mean(precision)))
    assert found.unknown_called == pytest.approx(np.mean(unknown))


def test_reads_of_no_known_class_are_counted(results: ReadResults):
    found = results.models[0].splits["heldout"]
    assert (found.num_reads, found.num_unknown, found.num_classes) == (1500, 20, 6)
    assert results.models[0].splits["val"].num_unknown == 0
    assert finding(results, "20 of 1,500 on known", "20 of 1,500 on heldout")


def test_unclassified_reads_count_as_missed(small: Path):
    before = read(small).models[0].splits["known"]
    rewrite(small, lambda row: row | {"probability": 0.0} if row["record"] % 4 == 0 and row["model"] == "cnn" else row)
    rows, found = rows_of(small, "cnn", "known"), model(read(small), "cnn").splits["known"]
    known, none = rows["label"] >= 0, rows["probability"] == 0
    labels, classes = rows["label"][known], np.where(none, -1, rows["class"])[known]
    assert (found.unclassified, before.unclassified) == (0.25, 0)
    assert found.accuracy.value == pytest.approx((labels == classes).mean())
    assert found.accuracy.value < before.accuracy.value
    assert found.macro_f1.value == pytest.approx(f1_score(labels, classes, labels=range(6), average="macro"))
    assert found.ranks[1].accuracy.value == pytest.approx(((labels // 2 == classes // 2) & (classes >= 0)).mean())
    assert found.confidence == pytest.approx(rows["probability"][known].mean())
    for row, label in zip(class_rows(read(small), found), range(6), strict=True):
        assert row.assigned == ((rows["class"] == label) & ~none).sum()
        assert row.recall == pytest.approx((classes == label)[labels == label].mean())
    pairs = confused_pairs(read(small), found, most=100)
    assert sum(one.reads for one in pairs) == ((rows["class"] != rows["label"]) & ~none).sum()
    assert finding(read(small), "cnn leaves", "25.0% of reads on known", "count as missed")
    assert not finding(read(small), "kmer-linear leaves")


def test_a_model_that_classifies_nothing_is_reported(small: Path):
    rewrite(small, lambda row: row | {"probability": 0.0} if row["model"] == "cnn" else row)
    found = model(read(small), "cnn").splits["known"]
    assert (found.unclassified, found.accuracy.value, found.macro_f1.value) == (1, 0, 0)
    assert report_on(read(small)).write(small / "report.html").exists()


def test_test_splits_come_first_and_their_gap_is_a_finding(results: ReadResults):
    assert list(results.splits) == ["known", "heldout", "val"] and list(results.tests) == ["known", "heldout"]
    (one,) = results.gaps
    gap = one.difference
    a, b = (results.models[0].splits[part].macro_f1 for part in ("known", "heldout"))
    assert gap.value == pytest.approx(a.value - b.value) and gap.low > 0.3
    width = gap.high - gap.low
    assert width == pytest.approx(np.hypot(a.high - a.low, b.high - b.low), rel=0.15)
    assert (one.first, one.second, one.num_classes) == ("known", "heldout", 6)
    assert one.macro_f1 == pytest.approx((a.value, b.value))
    assert finding(results, "lower on heldout than on known", f"{gap}")


def test_a_gap_is_over_the_classes_that_both_splits_have(small: Path):
    rewrite(small, lambda row: None if (row["part"], row["label"]) == ("heldout", 2) else row)
    (gap,) = read(small).gaps
    rows, found = rows_of(small, "cnn", "known"), read(small).models[0].splits["known"]
    known = rows["label"] >= 0
    shared = f1_score(rows["label"][known], rows["class"][known], labels=[0, 1, 3, 4, 5], average="macro")
    assert gap.num_classes == 5 and gap.macro_f1[0] == pytest.approx(shared) != found.macro_f1.value
    assert finding(read(small), "5 shared classes")


def test_costs_come_from_the_training_log(results: ReadResults):
    cnn = model(results, "cnn")
    assert (cnn.fit_s, cnn.score_reads_per_s, cnn.train_reads_per_s) == (30.5, 9000, 4050)
    assert (cnn.waiting, cnn.memory, cnn.parameters, cnn.seeds) == (pytest.approx(0.02), 480_000_000, 10_000, 2)
    assert results.metrics.memory[-1] == (8.0, 500_000_008) and results.metrics.budget == 10**9


def test_every_p_is_corrected_for_all_comparisons(results: ReadResults):
    pairs = [(one.a, one.b, one.split) for one in results.differences]
    assert pairs == [("cnn", "kmer-linear", "known"), ("cnn", "kmer-linear", "heldout")]
    assert all(one.differs and one.p < one.p_holm == pytest.approx(2 * one.p) for one in results.differences)


def test_class_rows_and_confused_pairs_equal_scikit_learn(run: Path, results: ReadResults):
    rows = rows_of(run, "cnn", "heldout")
    found = results.models[0].splits["heldout"]
    for label, row in enumerate(class_rows(results, found)):
        known = rows["label"] >= 0
        assert row.f1 == pytest.approx(f1_score(rows["label"][known] == label, rows["class"][known] == label))
        assert row.support == (rows["label"] == label).sum() and row.assigned == (rows["class"] == label).sum()
        assert row.unknown == ((rows["class"] == label) & ~known).sum() and row.training == 400 * (label + 1)
        assert row.confused_with.startswith(results.classes[label ^ 1].name)
    first, *_ = pairs = confused_pairs(results, found, most=10)
    assert [one.reads for one in pairs] == sorted((one.reads for one in pairs), reverse=True)
    label = next(label for label, one in enumerate(results.classes) if one.name == first.name)
    mine = rows["class"][rows["label"] == label]
    assert first.reads == (mine == label ^ 1).sum() and first.share == pytest.approx((mine == label ^ 1).mean())
    assert first.same_genus == "yes"


# -- findings


def test_validation_on_training_genomes_is_a_finding(tmp_path: Path, small: Path):
    flattering = make_read_run(tmp_path / "held", held_out="reads")
    assert finding(read(flattering), "training genomes", "data.val=FILE")
    assert not finding(read(small), "training genomes")


def test_empty_absent_imbalanced_and_never_assigned_classes_are_findings(tmp_path: Path):
    never = {"cnn": replace(MODELS["cnn"], never=(4,))}
    found = read(make_read_run(tmp_path, models=never, empty=(5,), absent=(1,)))
    assert finding(found, "no training reads", "Genus2 species5")
    assert finding(found, f"heldout has no reads of class {EVIL}", "over the other 5")
    assert finding(found, "cnn assigns no reads to class Genus2 species4 on heldout")
    assert finding(found, "imbalanced", "400 to 2,000")
    split = found.models[0].splits["heldout"]
    assert split.num_classes == 5 and 0 < split.macro_f1.value < 0.8
    rows = class_rows(found, split)
    assert rows[4].f1 == 0 and np.isnan(rows[4].precision) and np.isnan(rows[1].f1)


def test_one_test_split_is_compared_with_validation_and_none_is_a_finding(tmp_path: Path):
    one = read(make_read_run(tmp_path / "one", parts=("val", "known")))
    assert [(gap.first, gap.second) for gap in one.gaps] == [("val", "known")]
    none = read(make_read_run(tmp_path / "none", parts=("val",)))
    assert not none.gaps and not none.differences and "no test split" in none.findings[1]


def test_one_model_without_ranks_is_enough(tmp_path: Path):
    found = read(make_read_run(tmp_path, models={"cnn": MODELS["cnn"]}, ranks=()))
    assert found.findings[0].startswith("The only classifier")
    assert not found.ranks and not found.models[0].splits["val"].ranks and not found.differences
    assert not finding(found, "genus") and finding(found, "trained with one seed")


def test_a_model_that_is_never_precise_enough_has_no_threshold(tmp_path: Path):
    found = read(make_read_run(tmp_path, models={"poor": Made("poor", {"val": 0.0, "known": 0.0})}))
    assert found.models[0].threshold is None and found.models[0].splits["known"].coverage is None
    assert finding(found, "No threshold", "poor")


def test_a_model_that_is_precise_enough_with_all_reads_classified_needs_no_threshold(tmp_path: Path):
    found = read(make_read_run(tmp_path, models={"good": Made("good", {"val": 0.98, "known": 0.9})}))
    split = found.models[0].splits["known"]
    assert found.models[0].threshold == 0 and split.coverage == split.unknown_called == 1
    assert finding(found, "good", "without a threshold, so none is set")


def test_read_pairs_are_counted_as_pairs(tmp_path: Path):
    found = read(make_read_run(tmp_path, mates=2))
    assert found.what == "read pairs" and finding(found, "Read pairs", "20 of 600")


def test_a_class_without_a_taxon_is_left_out_at_that_rank(small: Path):
    card = json.loads((small / "data.json").read_text())
    card["classes"][0]["genus"] = -1
    (small / "data.json").write_text(json.dumps(card))
    rows = rows_of(small, "cnn", "known")
    kept = rows["label"] > 0
    genus = read(small).models[0].splits["known"].ranks[1]
    assert genus.accuracy.value == pytest.approx((rows["genus"] == rows["label"] // 2)[kept].mean())


# -- missing and damaged files


def test_requested_models_that_are_not_finished_are_missing(tmp_path: Path):
    run = make_read_run(tmp_path, configured="cnn,kmer-linear,lstm,hf")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "missing", "model": "hf", "why": "no such folder"}) + "\n")
    missing = read(run).missing
    assert set(missing) == {"lstm", "hf"} and "not finished" in missing["lstm"] and missing["hf"] == "no such folder"


def test_predictions_of_an_unfinished_model_do_not_count(small: Path):
    lines = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["kind"], line.get("model")) != ("fit", "cnn")]
    (small / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = read(small)
    assert [one.name for one in found.models] == ["kmer-linear"] and "cnn" in found.missing


def test_nan_probabilities_are_reported_as_missing(small: Path):
    rewrite(small, lambda row: row | {"probability": float("nan")} if row["model"] == "cnn" else row)
    assert "seed 0 gave 300 probabilities" in read(small).missing["cnn"]
    rewrite(small, lambda row: row | {"probability": float("nan")})
    assert not read(small).models and len(read(small).findings) == 1


def fails(run: Path, *parts: str) -> None:
    with pytest.raises(BadSource) as raised:
        read(run)
    for part in (str(run), "Next: millstream train data.train=FILE mapping=TABLE", *parts):
        assert part in str(raised.value)


def test_damaged_and_unfinished_runs_are_rejected_with_the_next_command(small: Path):
    assert kind_of(small) == "reads"
    rewrite(small, lambda row: None if (row["model"], row["record"]) == ("cnn", 3) else row)
    fails(small, "predictions.parquet", "kmer-linear", "known")
    rewrite(small, lambda row: row | {"class": 6})
    fails(small, "predictions.parquet", "kmer-linear", "6")
    (small / "metrics.jsonl").write_text("")
    fails(small, "classifier")
    table = pq.read_table(small / "predictions.parquet").drop_columns(["class"])
    publish_table(small / "predictions.parquet", table)
    fails(small, "predictions.parquet", "class")
    card = json.loads((small / "data.json").read_text())
    (small / "data.json").write_text(json.dumps(card | {"classes": [{"name": "x"}]}))
    fails(small, "data.json", "KeyError: 'class_id'")
