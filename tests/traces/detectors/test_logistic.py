"""Streaming regressions find what scikit-learn finds, and choose on validation alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import millstream as ms
from millstream.report.measures import auroc
from millstream.traces.detectors.logistic import Inputs, Logistic
from millstream.training.task import FitResources

# N records, G groups, F features

Part = tuple[np.ndarray, np.ndarray]  # inputs [N, G, F], labels [N]


def write(path: Path, x_NGF: np.ndarray, labels: np.ndarray) -> ms.Collection:
    with ms.TraceWriter(path) as writer:
        writer.extend(
            {"question_id": str(i), "x": x.astype(np.float32), "truth": int(label)}
            for i, (x, label) in enumerate(zip(x_NGF, labels, strict=True))
        )
    return ms.labelled(ms.open(path), column="truth")


def detector(**means: int) -> Logistic:
    inputs = Inputs(ms.features.fields("x"), lambda batch: batch["x"], axis="layer")
    return Logistic(FitResources(**means), inputs=inputs)


def draw(rng: np.random.Generator, num: int, way_F: np.ndarray, mix_FF: np.ndarray) -> Part:
    z = rng.normal(size=(num, len(way_F)))
    labels = (z @ way_F + 0.7 * rng.normal(size=num) > 0.4).astype(int)
    return (5 + 0.3 * (z @ mix_FF))[:, None], labels


@pytest.mark.parametrize(("num", "width"), [(1200, 20), (150, 300)])
def test_it_matches_scikit_learn_on_the_test_split(tmp_path: Path, num: int, width: int):
    rng = np.random.default_rng(num)
    way = rng.normal(size=width) * (rng.random(width) < 0.3)
    way /= np.linalg.norm(way)
    mix = np.diag(0.2 + rng.random(width)) + 0.1 * rng.normal(size=(width, width))  # correlated, of several scales
    train, val, test = (draw(rng, size, way, mix) for size in (num, 200, 600))
    parts = [write(tmp_path / str(i), *part) for i, part in enumerate((train, val, test))]
    found = detector()
    found.fit(parts[0], parts[1])
    mean, std = train[0].mean(axis=0), train[0].std(axis=0)
    peer = LogisticRegression(C=float(str(found.chosen["C"])), class_weight="balanced", max_iter=1000)
    peer.fit(((train[0] - mean) / std)[:, 0], train[1])
    theirs = peer.predict_proba(((test[0] - mean) / std)[:, 0])[:, 1]
    ours = found.score(parts[2])
    assert auroc(test[1], ours) == pytest.approx(auroc(test[1], theirs), abs=0.012)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.98
    assert auroc(test[1], ours) > (0.8 if num > width else 0.6)
    if num > width:  # where there is one solution, the probabilities are calibrated alike
        assert np.abs(ours - theirs).mean() < 0.03


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[ms.Collection, ms.Collection, Part]:
    """Group 0 predicts the label in both splits, group 1 with opposite signs in train and val, group 2 is constant."""
    rng = np.random.default_rng(5)

    def part(num: int, ways: tuple[float, float]) -> Part:
        labels = rng.integers(0, 2, num)
        x = rng.normal(size=(num, 3, 4))
        for group, way in enumerate(ways):
            x[:, group, 1] += way * labels
        x[:, 2] = 3.0
        return x, labels

    path = tmp_path_factory.mktemp("small")
    train, val = part(240, (1.5, 3.0)), part(80, (1.5, -3.0))
    return write(path / "train", *train), write(path / "val", 10 * val[0] - 7, val[1]), train


@pytest.fixture(scope="module")
def fitted(small: tuple[ms.Collection, ms.Collection, Part]) -> Logistic:
    found = detector(seed=3)
    found.fit(small[0], small[1])
    return found


def test_the_group_is_chosen_on_the_validation_split(
    small: tuple[ms.Collection, ms.Collection, Part], fitted: Logistic
):
    by_layer = fitted.chosen["auroc_by_layer"]
    assert isinstance(by_layer, list) and len(by_layer) == 3
    assert fitted.chosen["layer"] == 0 and fitted.chosen["val_auroc"] == by_layer[0] > 0.7
    assert by_layer[1] < 0.1 and by_layer[2] == 0.5
    assert fitted.chosen["val_auroc"] == pytest.approx(auroc(_labels(small[1]), fitted.score(small[1])), abs=1e-3)


def test_inputs_are_scaled_by_the_training_split_only(
    small: tuple[ms.Collection, ms.Collection, Part], fitted: Logistic
):
    x = small[2][0][:, 0]
    np.testing.assert_allclose(fitted.arrays["mean"], x.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(fitted.arrays["factor"], 1 / x.std(axis=0), rtol=1e-4)


def test_scores_are_probabilities_in_the_order_of_the_collection(
    small: tuple[ms.Collection, ms.Collection, Part], fitted: Logistic
):
    train, _, (_, labels) = small
    scores = fitted.score(train)
    assert scores.shape == (240,) and scores.dtype == np.float64 and 0 <= scores.min() < scores.max() <= 1
    assert auroc(labels, scores) > 0.8
    order = np.random.default_rng(0).permutation(240)[:77]
    again = detector(batch_size=10)
    again.arrays = fitted.arrays  # all that it learned
    np.testing.assert_allclose(again.score(train.subset(order)), scores[order], rtol=1e-5)
    assert fitted.score(train.subset([])).shape == (0,)


def test_the_same_seed_gives_the_same_regression(small: tuple[ms.Collection, ms.Collection, Part], fitted: Logistic):
    again = detector(seed=3)
    again.fit(small[0], small[1])
    assert again.chosen == fitted.chosen
    assert all(np.array_equal(again.arrays[name], fitted.arrays[name]) for name in fitted.arrays)


def test_the_scale_of_inputs_and_constant_inputs_make_no_difference(tmp_path: Path):
    rng = np.random.default_rng(1)
    x, labels = draw(rng, 300, np.array([1.0, 0, 0]), np.eye(3))
    x[..., 2] = 1e4
    scores: list[np.ndarray] = []
    for scale in (1.0, 2.0**-20):
        part = write(tmp_path / str(scale), x * scale, labels)
        found = detector()
        found.fit(part.subset(range(200)), part.subset(range(200, 250)))
        scores.append(found.score(part.subset(range(250, 300))))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3)
    assert auroc(labels[250:], scores[0]) > 0.75


def test_rare_classes_have_the_same_total_weight_as_frequent_ones(tmp_path: Path):
    rng = np.random.default_rng(2)
    labels = (np.arange(600) % 12 == 0).astype(int)
    x = rng.normal(size=(600, 1, 2)) + labels[:, None, None]
    part = write(tmp_path / "rare", x, labels)
    found = detector()
    found.fit(part.subset(range(400)), part.subset(range(400, 600)))
    assert 0.3 < found.score(part).mean() < 0.6  # without, it would be near the share of one in twelve


def test_a_split_with_one_class_and_nan_inputs_are_refused(tmp_path: Path):
    x = np.zeros((6, 1, 2))
    part = write(tmp_path / "one", x, np.array([0, 1, 0, 0, 0, 1]))
    with pytest.raises(ValueError, match=r"validation.*\[0\]"):
        detector().fit(part.subset([0, 1, 5]), part.subset([2, 3]))
    with pytest.raises(ValueError, match="training"):
        detector().fit(part.subset([]), part)
    x[1] = np.nan
    bad = write(tmp_path / "bad", x, np.array([0, 1, 0, 0, 0, 1]))
    with pytest.raises(ValueError, match="NaN"):
        detector().fit(bad, bad)


def _labels(collection: ms.Collection) -> np.ndarray:
    return collection.column("label").to_numpy()


def test_folds_fitted_together_are_those_fitted_alone(small: tuple[ms.Collection, ms.Collection, Part]):
    train = small[0]
    folds = [
        (train.subset(range(160)), train.subset(range(160, 240))),
        (train.subset(range(60, 240)), train.subset(range(60))),
    ]
    together, alone = [detector(), detector()], [detector(), detector()]
    Logistic.fit_together(together, train, folds)
    for one, other, fold in zip(together, alone, folds, strict=True):
        other.fit(*fold)
        assert one.chosen == other.chosen
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in other.arrays)


def test_inputs_that_fit_into_memory_are_computed_once(small: tuple[ms.Collection, ms.Collection, Part]):
    calls: list[int] = []

    def groups(batch: Mapping[str, object]) -> Tensor:
        calls.append(1)
        return cast(Tensor, batch["x"])

    for memory, most in ((100_000_000, 4), (100_000, 10_000)):  # a first record, and all of each split
        calls.clear()
        found = Logistic(FitResources(memory=memory), inputs=Inputs(ms.features.fields("x"), groups))
        found.fit(small[0], small[1])
        assert 4 <= len(calls) <= most and (memory > 10**6) == (len(calls) == 4)
        assert auroc(_labels(small[1]), found.score(small[1])) > 0.7
