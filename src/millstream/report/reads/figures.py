"""What a run of classifiers found, as figures: a panel for each part where parts differ. Knows nothing of HTML."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import ticker

from millstream.report.cells import shown
from millstream.report.drawing import (
    DASHES,
    DOTTED,
    INK,
    LINES,
    Drawing,
    Look,
    history_drawings,
    legend,
    memory_drawing,
    new_axes,
    style,
    thinned,
    write_drawings,
)
from millstream.report.reads.matrix import matrix_drawings
from millstream.report.reads.results import PRECISION, VAL, ModelResult, ReadResults
from millstream.report.results import Curve

_HISTORY = {
    "loss": ("Training loss", "loss", "Over the epochs; a line for each classifier and seed."),
    "val_macro_f1": ("Validation macro F1", "macro F1", "Over the epochs; a line for each classifier and seed."),
    "records_per_s": ("Throughput of training", "reads a second", "Over the epochs; a line for each one and seed."),
}


def draw(results: ReadResults) -> list[Drawing]:
    """Every figure of the report, in its order; of matrices, those of the best model."""
    looks = _looks(results.models)
    names = part_names(results.parts)
    with style():
        return [
            *matrix_drawings(results, names),
            *(_of_coverage(results, part, names[part], looks) for part in results.parts),
            *(_of_threshold(results, part, names[part]) for part in results.parts),
            *(_of_calibration(results, part, names[part], looks) for part in results.parts),
            _of_parts(results, looks),
            *history_drawings(results.history, _HISTORY, looks, what="classifier"),
            _of_speed(results.models, looks),
            memory_drawing(results.memory, results.budget),
        ]


def write_figures(results: ReadResults, folder: Path) -> list[Path]:
    """Every figure that there is data for, as .svg and .png."""
    return write_drawings(draw(results), folder)


def part_names(parts: Sequence[str]) -> dict[str, str]:
    """Names of parts, which are those of files, as they may be in the name of a file or an id: each another one."""
    names: dict[str, str] = {}
    for part in parts:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", part)
        while name in names.values():
            name += "_"
        names[part] = name
    return names


def _looks(models: Sequence[ModelResult]) -> dict[str, Look]:
    """Colours for the first seven, the best on validation as a whole line; the rest is grey."""
    looks = {model.name: Look() for model in models}
    for place, (colour, name) in enumerate(zip(LINES, looks, strict=False)):
        looks[name] = Look(colour, "-" if not place else DASHES[(place - 1) % len(DASHES)], 1.7, True)
    return looks


def _of_parts(results: ReadResults, looks: Mapping[str, Look]) -> Drawing:
    title, caption = "Macro F1 by part", "With 95 % intervals over the reads of each part."
    if not results.models:
        return Drawing("parts", title, caption, None, "no classifier was judged")
    figure, axes = new_axes("part", "macro F1")
    for place, model in enumerate(results.models):
        found = [model.parts[part].macro_f1 for part in results.parts]
        shift = 0.3 * ((place + 0.5) / len(results.models) - 0.5)  # side by side, not on top of each other
        x = [number + shift for number in range(len(found))]
        values = np.array([one.value for one in found])
        ends = np.abs(np.array([[one.low for one in found], [one.high for one in found]]) - values)
        options = looks[model.name].options(model.name) | {"linestyle": "none"}
        axes.errorbar(x, values, yerr=ends, marker="o", markersize=4, **options)
    axes.set_xticks(range(len(results.parts)), [_clipped(part) for part in results.parts])
    axes.set_xlim(-0.5, len(results.parts) - 0.5)
    axes.set_ylim(None, min(1.005, axes.get_ylim()[1]))
    _legend(figure, axes, results.models, looks)
    return Drawing("parts", title, caption, figure)


def _of_coverage(results: ReadResults, part: str, name: str, looks: Mapping[str, Look]) -> Drawing:
    title = f"Precision and coverage on {part}"
    caption = (
        f"When only calls above a threshold are kept. Dots: at the threshold with precision {PRECISION} on validation. "
        "Dotted: that precision."
    )
    if not results.models:
        return Drawing(f"coverage-{name}", title, caption, None, "no classifier was judged")
    figure, axes = new_axes("coverage: share of all reads that are called", "precision")
    axes.plot((0, 1), (PRECISION, PRECISION), color=INK, linewidth=0.9, linestyle=DOTTED)
    for model in results.models:
        found, look = model.parts[part], looks[model.name]
        curve = Curve(found.called.coverage.tolist(), found.called.precision.tolist())
        axes.plot(*thinned(curve), **look.options(model.name))
        if found.coverage and found.precision is not None:
            axes.plot([found.coverage], [found.precision], marker="o", markersize=5, color=look.colour, zorder=4)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(_lowest(results), 1.01)
    _legend(figure, axes, results.models, looks)
    return Drawing(f"coverage-{name}", title, caption, figure)


def _lowest(results: ReadResults) -> float:
    """A bit below every precision of every part, so that their figures have one scale; a few first reads aside."""
    called = [found.called for model in results.models for found in model.parts.values()]
    lowest = min(float(np.min(one.precision[one.coverage >= min(0.02, one.coverage[-1])])) for one in called)
    return max(0.0, min(lowest, PRECISION) - 0.02)


def _of_calibration(results: ReadResults, part: str, name: str, looks: Mapping[str, Look]) -> Drawing:
    title = f"Calibration on {part}"
    caption = (
        "Share of right calls against their probability, in bins of equal counts; reads of known classes. "
        "Dotted: perfect."
    )
    models = [model for model in results.models if len(model.parts[part].calibration.x)]
    if not models:
        return Drawing(f"calibration-{name}", title, caption, None, "no read of a known class was called")
    figure, axes = new_axes("probability of the call", "share of right calls")
    axes.plot((0, 1), (0, 1), color=INK, linewidth=0.9, linestyle=DOTTED)
    for model in models:
        curve = model.parts[part].calibration
        axes.plot(curve.x, curve.y, **looks[model.name].options(model.name), marker="o", markersize=3)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    _legend(figure, axes, models, looks)
    return Drawing(f"calibration-{name}", title, caption, figure)


def _of_threshold(results: ReadResults, part: str, name: str) -> Drawing:
    title = f"Threshold on {part}"
    if not results.models:
        return Drawing(f"threshold-{name}", title, "", None, "no classifier was judged")
    best = results.models[0]
    caption = f"What {best.name} calls, and how rightly, from which probability on."
    found = best.parts[part].called
    figure, axes = new_axes("threshold of the probability", "share")
    lines = {"coverage": found.coverage, "precision": found.precision, "recall": found.recall}
    for place, (label, values) in enumerate(lines.items()):
        options = Look(LINES[place], "-" if not place else DASHES[place - 1], 1.7, True).options(label)
        # Below the lowest probability all is called, as it is there.
        x, y = thinned(Curve([*found.threshold.tolist(), 0.0], [*values.tolist(), float(values[-1])]))
        axes.plot(x, y, **options)
    if best.threshold:  # 0 is none
        axes.axvline(best.threshold, color=INK, linewidth=0.9, linestyle=DOTTED)
        caption += f" Dotted: {shown(best.threshold)}, which has precision {PRECISION} on validation."
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    legend(figure, axes)
    return Drawing(f"threshold-{name}", title, caption, figure)


def _of_speed(models: Sequence[ModelResult], looks: Mapping[str, Look]) -> Drawing:
    title, caption = "Speed and macro F1", "On validation, against the reads that are scored in a second."
    if not models:
        return Drawing("speed", title, caption, None, "no classifier was judged")
    figure, axes = new_axes("reads a second, scoring", "macro F1 on validation")
    for model in models:
        options = looks[model.name].options(model.name) | {"linestyle": "none"}
        axes.plot([model.score_reads_per_s], [model.parts[VAL].macro_f1.value], marker="o", markersize=6, **options)
    speeds = [model.score_reads_per_s for model in models]
    axes.set_xscale("log")
    axes.set_xlim(min(speeds) / 2, max(speeds) * 2)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if max(speeds) < 20 * min(speeds) else (1,)))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    _legend(figure, axes, models, looks)
    return Drawing("speed", title, caption, figure)


def _legend(figure: Any, axes: Any, models: Sequence[ModelResult], looks: Mapping[str, Look]) -> None:
    legend(figure, axes, grey=any(not looks[model.name].named for model in models))


def _clipped(text: str) -> str:
    return text if len(text) <= 18 else f"{text[:17]}…"
