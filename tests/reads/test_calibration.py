"""Thresholds for an expected precision: what they promise, and what says that they cannot."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from numpy.typing import NDArray

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.reads.calibration import CALIBRATION, PRECISIONS, Calibration, calibrate, thresholds_at
from millstream.reads.kraken import Assignments
from millstream.reads.mapping import Classes, load_classes, load_mapping
from millstream.training.folder import SCORES
from support.classifying import make_run
from support.commands import run_here

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")

GENERA = load_classes(load_mapping({"class_id": list(range(6)), "name": list("abcdef"), "genus": list("GGHHII")}))
LEVELS = ("class", "genus")


def scores_of(posterior_BC: NDArray[np.floating], labels: NDArray[np.int64], classes: Classes = GENERA) -> pa.Table:
    """What the run of a classifier with these posteriors stores."""
    genera = classes.ranks[0].of_class
    of_genus = np.stack([posterior_BC[:, genera == genus].sum(1) for genus in range(genera.max() + 1)], axis=1)
    return pa.table(
        {
            "label": labels.astype(np.int32),
            "class": posterior_BC.argmax(1).astype(np.int32),
            "probability": posterior_BC.max(1).astype(np.float32),
            "genus": of_genus.argmax(1).astype(np.int32),
            "genus_probability": of_genus.max(1).astype(np.float32),
        }
    )


def draw(rng: np.random.Generator, size: int, unknown: float = 0.0) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Overconfident posteriors of reads, which sometimes leave the species of a genus open; and their classes."""
    posterior = rng.dirichlet(np.full(6, 0.15), size)
    blurred = posterior.reshape(-1, 3, 2).sum(2).repeat(2, axis=1) / 2
    posterior = np.where(rng.random(size)[:, None] < 0.4, blurred, posterior)
    labels = (posterior.cumsum(1) < rng.random(size)[:, None]).sum(1).clip(max=5)
    labels[rng.random(size) < unknown] = -1
    sharper = posterior**1.5
    return sharper / sharper.sum(1, keepdims=True), labels


def assigned(calibration: Calibration, precision: float, scores: pa.Table) -> Mapping[str, tuple[int, int]]:
    """The number of reads that classification assigns at each level, and how many of these are right."""
    assignments = Assignments(GENERA)
    values = thresholds_at(precision, calibration, where="run", name="net").values
    found = {name: torch.from_numpy(scores.column(name).to_numpy().copy()) for name in scores.column_names[1:]}
    numbers, _ = assignments.choose(found, values)
    labels = scores.column("label").to_numpy()
    is_class, is_genus = numbers < 6, (numbers >= 6) & (numbers != assignments.unclassified)
    genera = np.append(GENERA.ranks[0].of_class, -1)[labels]
    return {
        "class": (int(is_class.sum()), int((is_class & (numbers == labels)).sum())),
        "genus": (int(is_genus.sum()), int((is_genus & (numbers - 6 == genera)).sum())),
    }


@pytest.mark.parametrize("unknown", [0.0, 0.1])
def test_new_reads_are_assigned_with_the_expected_precision_at_every_rank(unknown: float):
    rng = np.random.default_rng(0)
    calibration = calibrate(scores_of(*draw(rng, 20_000, unknown)), GENERA)
    fresh = scores_of(*draw(rng, 20_000, unknown))
    seen: list[int] = []
    for precision in (0.8, 0.9, 0.95) if not unknown else (0.8,):
        found = assigned(calibration, precision, fresh)
        for level in LEVELS:
            count, right = found[level]
            assert count > 500, level
            assert precision - 0.02 < right / count < precision + 0.02, (precision, level)  # no more is given up
        seen.append(sum(count for count, _ in found.values()))
    assert seen == sorted(seen, reverse=True)


def test_on_the_validation_reads_themselves_the_precision_is_reached():
    scores = scores_of(*draw(np.random.default_rng(1), 3_000, unknown=0.02))
    calibration = calibrate(scores, GENERA)
    for place, precision in enumerate(PRECISIONS):
        if calibration.at(precision) is not None:
            found = assigned(calibration, precision, scores)
            for level in LEVELS:
                count, right = found[level]
                assert count == 0 or right / count >= precision
                assert count == round(3_000 * calibration.shares[level][place])


def test_reads_of_no_known_class_count_as_wrong():
    posterior = np.eye(6)[np.arange(600) % 6]
    labels = np.arange(600) % 6
    assert calibrate(scores_of(posterior, labels), GENERA).best == 0.998  # 600 of 601
    labels[::4] = -1
    assert calibrate(scores_of(posterior, labels), GENERA).best == 0.74  # 450 of 601


def test_a_genus_is_calibrated_on_reads_that_no_class_takes():
    """All 400 reads together are right about the genus in 90 %, those left without a class only in 60 %."""
    posterior = np.zeros((400, 6))
    posterior[:300, 0] = 1.0
    posterior[300:, :2] = 0.5, 0.4
    labels = np.zeros(400, np.int64)
    labels[300:330], labels[330:370] = 1, 3
    calibration = calibrate(scores_of(posterior, labels), GENERA)
    place = PRECISIONS.index(0.85)
    assert (calibration.thresholds["class"][place], calibration.thresholds["genus"][place]) == (1.0, None)
    labels[330:370] = 1
    calibration = calibrate(scores_of(posterior, labels), GENERA)
    assert calibration.thresholds["class"][place] == 1.0
    assert calibration.thresholds["genus"][place] == pytest.approx(0.9)


def test_few_reads_do_not_promise_much_and_reads_without_evidence_nothing():
    posterior, labels = np.eye(6)[np.zeros(50, np.int64)], np.zeros(50, np.int64)
    assert calibrate(scores_of(posterior, labels), GENERA).best == 0.98  # 50 of 51
    with pytest.raises(BadSetting, match=r"--precision 0\.99: net .* 0\.98 on the 50 validation reads of run"):
        thresholds_at(0.99, calibrate(scores_of(posterior, labels), GENERA), where="run", name="net")
    nothing = calibrate(scores_of(np.zeros((50, 6)), labels), GENERA)
    assert nothing.best is None
    with pytest.raises(BadSetting, match=r"--precision 0\.1: "):
        thresholds_at(0.1, nothing, where="run", name="net")


# -- runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    return make_run(tmp_path_factory.mktemp("calibration"))


def written(run: Path) -> dict[str, Any]:
    return json.loads((run / CALIBRATION).read_text())


def test_a_run_has_its_calibration_and_gets_it_back_without_training(made: tuple[list[Path], Path]):
    files, run = made
    before, scores = written(run), run / "checkpoints" / "kmer-linear-0" / SCORES
    stamp = scores.stat().st_mtime_ns
    assert [*before] == ["kmer-linear-0"] and before["kmer-linear-0"]["held_out"] == "files"
    others = json.dumps({"kmer-linear-0": before["kmer-linear-0"] | {"scores_crc32c": 0, "num_reads": 7}})
    (run / CALIBRATION).write_text(others)  # as of a model that was trained again
    ms.train(**yaml.safe_load((run / "config.yaml").read_text()))
    assert written(run) == before
    for damaged in ("", "{", '{"kmer-linear-0": {}}', "{}"):
        (run / CALIBRATION).unlink() if not damaged else (run / CALIBRATION).write_text(damaged)
        with pytest.raises(BadSource, match=r"kmer-linear seed 0 .*millstream train .*config\.yaml out="):
            ms.classify(run, files[0], run.parent / "none.tsv", precision=0.9)
    ms.train(**yaml.safe_load((run / "config.yaml").read_text()))
    assert written(run) == before
    assert scores.stat().st_mtime_ns == stamp


def test_classify_takes_a_precision_instead_of_a_threshold(made: tuple[list[Path], Path], tmp_path: Path):
    files, run = made
    own = written(run)["kmer-linear-0"]
    place = own["precisions"].index(0.95)
    least = own["thresholds"]["class"][place]
    code, _, messages = run_here("classify", run, files[2], "-o", tmp_path / "out.tsv", "--precision", "0.943")
    assert code == 0 and "precision 0.95 is expected, from 300 validation reads" in messages
    ms.classify(run, files[2], tmp_path / "same.tsv", threshold=least)
    assert (tmp_path / "out.tsv").read_bytes() == (tmp_path / "same.tsv").read_bytes()
    with pytest.raises(BadSetting, match=r"threshold=0\.5 and precision=0\.9: "):
        ms.classify(run, files[2], tmp_path / "both.tsv", threshold=0.5, precision=0.9)
    with pytest.raises(BadSetting, match=r"--precision 0\.9999: kmer-linear reaches at most 0\.99"):
        ms.classify(run, files[2], tmp_path / "none.tsv", precision=0.9999)
    assert not (tmp_path / "none.tsv").exists()
