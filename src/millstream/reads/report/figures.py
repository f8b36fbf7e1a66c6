"""The figures of a report on classifiers, some per split; each drawn once for both the page and files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from millstream.reads.report.predictions import PRECISION, VAL
from millstream.reads.report.results import GENUS, NO_CLASS, ModelResult, ReadResults, SplitResult
from millstream.report.drawing import (
    DASHES,
    DOTTED,
    INK,
    LINES,
    MAX_LINES,
    Drawing,
    Look,
    axes_of,
    curve_drawing,
    history_drawings,
    legend,
    looks_of,
    memory_drawing,
    new_axes,
    overview_drawing,
    style,
)
from millstream.report.measures import Curve
from millstream.report.tables import clipped, shown

MAX_CLASSES = 40  # a larger matrix is unreadable: the most confused pairs are in a table
_NUMBERED = 12  # up to this many classes, cells show numbers
_FAINTEST = 0.002  # smaller shares are not drawn
_MISSING = "no classifier was evaluated"
_HISTORY = {
    "loss": ("Training loss", "loss", "Per epoch; one line per classifier and seed."),
    "val_macro_f1": ("Validation macro F1", "macro F1", "Per epoch; one line per classifier and seed."),
    "records_per_s": ("Training throughput", "reads per second", "Per epoch; one line per classifier and seed."),
}


def draw(results: ReadResults) -> list[Drawing]:
    """Every figure of the report, in its order, of the best models on validation; confusion matrices of the best."""
    results = replace(results, models=results.models[:MAX_LINES])
    names = [model.name for model in results.models]
    looks = looks_of(solid=names[:1], dashed=names[1:])
    ids = split_ids(results.splits)
    split = results.splits[0] if results.splits else VAL
    values = {model.name: model.splits[split].macro_f1 for model in results.models}
    caption = f"On {split}, with 95 % intervals over its {results.what}: the best classifiers on validation."
    with style():
        return [
            overview_drawing("Macro F1", caption, "macro F1", values, looks=looks, chance=None),
            *_matrices(results, ids),
            *(_coverage(results, split, ids[split], looks) for split in results.splits),
            *(_thresholds(results, split, ids[split]) for split in results.splits),
            *(_calibration(results, split, ids[split], looks) for split in results.splits),
            _splits(results, looks),
            *history_drawings(results.metrics.history, _HISTORY, looks, what="classifier"),
            _speed(results.models, looks),
            memory_drawing(results.metrics.memory, results.metrics.budget),
        ]


def split_ids(splits: Sequence[str]) -> dict[str, str]:
    """Split names, which come from file names, as unique ids."""
    ids: dict[str, str] = {}
    for split in splits:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", split)
        while name in ids.values():
            name += "_"
        ids[split] = name
    return ids


def _coverage(results: ReadResults, split: str, id: str, looks: Mapping[str, Look]) -> Drawing:
    drawing = curve_drawing(
        (
            f"coverage-{id}",
            f"Precision and coverage on {split}",
            "When only reads above a threshold are classified. Dots: at the threshold with precision "
            f"{PRECISION} on validation. Dotted: that precision.",
        ),
        ("coverage: share of all reads that are classified", "precision"),
        {
            model.name: Curve(curve.coverage.tolist(), curve.precision.tolist())
            for model in results.models
            for curve in [model.splits[split].thresholds]
        },
        looks,
        missing=_MISSING,
        reference=((0, 1), (PRECISION, PRECISION)),
        x_range=(0, 1.01),
        y_range=(_lowest_precision(results), 1.01),
    )
    for model in results.models:
        found = model.splits[split]
        if found.coverage and found.precision is not None:
            options = {"marker": "o", "markersize": 5, "color": looks[model.name].colour, "zorder": 4}
            axes_of(drawing).plot([found.coverage], [found.precision], **options)
    return drawing


def _lowest_precision(results: ReadResults) -> float:
    """Slightly below the lowest precision of all splits, so that figures share a scale; ignores the first few reads."""
    curves = [found.thresholds for model in results.models for found in model.splits.values()]
    lowest = [float(np.min(one.precision[one.coverage >= min(0.02, one.coverage[-1])])) for one in curves]
    return max(0.0, min([PRECISION, *lowest]) - 0.02)


def _thresholds(results: ReadResults, split: str, id: str) -> Drawing:
    about = f"threshold-{id}", f"Threshold on {split}"
    if not results.models:
        return Drawing(*about, "", None, _MISSING)
    best = results.models[0]
    caption = f"Reads that {best.name} classifies, and how well, from each probability up."
    if best.threshold:  # 0: none is needed
        caption += f" Dotted: {shown(best.threshold)}, with precision {PRECISION} on validation."
    found = best.splits[split].thresholds
    lines = {"coverage": found.coverage, "precision": found.precision, "recall": found.recall}
    drawing = curve_drawing(
        (*about, caption),
        ("threshold of the probability", "share"),
        # Below the lowest probability nothing changes.
        {
            name: Curve([*found.threshold.tolist(), 0.0], [*some.tolist(), float(some[-1])])
            for name, some in lines.items()
        },
        {name: Look(LINES[at], ("-", *DASHES)[at]) for at, name in enumerate(lines)},
        x_range=(0, 1.01),
        y_range=(0, 1.02),
    )
    if best.threshold:
        axes_of(drawing).axvline(best.threshold, color=INK, linewidth=0.9, linestyle=DOTTED)
    return drawing


def _calibration(results: ReadResults, split: str, id: str, looks: Mapping[str, Look]) -> Drawing:
    curves = {model.name: model.splits[split].calibration for model in results.models}
    return curve_drawing(
        (
            f"calibration-{id}",
            f"Calibration on {split}",
            "Share of correct classifications against their probability, in bins of equal counts; reads of known "
            "classes. Dotted: perfect.",
        ),
        ("probability of the assigned class", "share of correct classifications"),
        {name: curve for name, curve in curves.items() if len(curve.x)},
        looks,
        missing="no read of a known class was classified",
        reference=((0, 1), (0, 1)),
        marker=3,
        x_range=(0, 1.01),
        y_range=(0, 1.02),
    )


def _splits(results: ReadResults, looks: Mapping[str, Look]) -> Drawing:
    about = "parts", "Macro F1 by split", "With 95 % intervals over the reads of each split."
    if not results.models:
        return Drawing(*about, None, _MISSING)
    figure, axes = new_axes("split", "macro F1")
    for place, model in enumerate(results.models):
        found = [model.splits[split].macro_f1 for split in results.splits]
        shift = 0.3 * ((place + 0.5) / len(results.models) - 0.5)  # side by side, not on top of each other
        values = np.array([one.value for one in found])
        ends = np.abs(np.array([[one.low for one in found], [one.high for one in found]]) - values)
        options = looks[model.name].options(model.name) | {"linestyle": "none"}
        axes.errorbar(np.arange(len(found)) + shift, values, yerr=ends, marker="o", markersize=4, **options)
    axes.set_xticks(range(len(results.splits)), [clipped(split, 18) for split in results.splits])
    axes.set_xlim(-0.5, len(results.splits) - 0.5)
    axes.set_ylim(None, min(1.005, axes.get_ylim()[1]))
    legend(figure, axes)
    return Drawing(*about, figure)


def _speed(models: Sequence[ModelResult], looks: Mapping[str, Look]) -> Drawing:
    about = "speed", "Speed and macro F1", "Macro F1 on validation against reads scored per second."
    if not models:
        return Drawing(*about, None, _MISSING)
    figure, axes = new_axes("reads scored per second", "macro F1 on validation")
    for model in models:
        options = looks[model.name].options(model.name) | {"linestyle": "none"}
        axes.plot([model.score_reads_per_s], [model.splits[VAL].macro_f1.value], marker="o", markersize=6, **options)
    speeds = [model.score_reads_per_s for model in models]
    axes.set_xscale("log")
    axes.set_xlim(min(speeds) / 2, max(speeds) * 2)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if max(speeds) < 20 * min(speeds) else (1,)))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    legend(figure, axes)
    return Drawing(*about, figure)


def _matrices(results: ReadResults, ids: Mapping[str, str]) -> list[Drawing]:
    about = "confusion", "Confusion matrices", ""
    if not results.models:
        return [Drawing(*about, None, _MISSING)]
    if len(results.classes) > MAX_CLASSES:
        why = f"{len(results.classes)} classes are too many for a matrix; the most confused pairs are in the table"
        return [Drawing(*about, None, why)]
    best = results.models[0]
    return [_matrix(results, split, best.splits[split], ids[split]) for split in results.splits]


def _matrix(results: ReadResults, split: str, found: SplitResult, id: str) -> Drawing:
    """A row per class, its reads as shaded cells; classes of a genus are neighbours."""
    size = len(results.classes)
    order = sorted(range(size), key=lambda label: (results.classes[label].taxa.get(GENUS, -1), label))
    counts = found.confusion.dense(size)[np.ix_([*order, size], [*order, size])]
    num_columns = size + bool(counts[:, size].any())
    counts = counts[: size + bool(found.num_unknown), :num_columns]
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [clipped(results.classes[label].name, 26) for label in order]
    rows = [*names, *([NO_CLASS] if found.num_unknown else [])]
    columns = [*names, "unclassified"][:num_columns]
    inches = 2.3 + 0.235 * max(size, 10)
    figure, axes = new_axes("assigned class", "true class", (inches + 0.3, inches))
    _shade(axes, share)
    if size <= _NUMBERED:
        for row, column in zip(*np.nonzero(share >= 0.005), strict=True):
            text = f"{100 * share[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, num_columns - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(num_columns), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelsize=8)
    axes.grid(visible=False)
    axes.set_aspect("equal")
    caption = "Each row is a true class; the stronger the colour, the larger the share of its reads."
    caption += " Numbers are percent." if size <= _NUMBERED else ""
    caption += " Classes of a genus are next to each other." if GENUS in results.ranks else ""
    return Drawing(f"confusion-{id}", f"{results.models[0].name} on {split}", caption, figure)


def _shade(axes: Any, share: np.ndarray) -> None:
    """Two colours with varying opacity, which the page replaces on a dark background."""
    drawn = [(int(row), int(column)) for row, column in zip(*np.nonzero(share >= _FAINTEST), strict=True)]
    cells = [Rectangle((column - 0.48, row - 0.48), 0.96, 0.96) for row, column in drawn]
    right, wrong = to_rgb(LINES[0]), to_rgb(LINES[1])
    # The square root makes rare errors visible: one read in a hundred.
    depths = [0.12 + 0.68 * float(np.sqrt(share[cell])) for cell in drawn]
    colours = [
        (*(right if row == column else wrong), depth) for (row, column), depth in zip(drawn, depths, strict=True)
    ]
    axes.add_collection(PatchCollection(cells, facecolors=colours, edgecolors="none", match_original=False))
