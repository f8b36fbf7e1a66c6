"""Confusion matrices: which class is called which, as a figure of shaded cells for each part."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from millstream.report.drawing import INK, LINES, Drawing, new_axes
from millstream.report.reads.per_class import NO_CLASS
from millstream.report.reads.results import GENUS, PartResult, ReadResults

MAX_CLASSES = 40  # more cannot be told apart in a figure: the most confused pairs are in a table
_NUMBERED = 12  # up to so many classes, cells have numbers
_FAINTEST = 0.002  # a share that is not drawn
_MAX_NAME = 26


def matrix_drawings(results: ReadResults, names: Mapping[str, str]) -> list[Drawing]:
    """Of the best model, for each part."""
    if not results.models:
        return [Drawing("confusion", "Confusion matrices", "", None, "no classifier was judged")]
    if len(results.classes) > MAX_CLASSES:
        why = f"{len(results.classes)} classes are too many to tell apart; the most confused pairs are in the table"
        return [Drawing("confusion", "Confusion matrices", "", None, why)]
    best = results.models[0]
    return [_matrix(results, part, best.parts[part], names[part]) for part in results.parts]


def _matrix(results: ReadResults, part: str, found: PartResult, name: str) -> Drawing:
    order = _order(results)
    size = len(order)
    counts = found.confusion.dense(size)[[*order, size]][:, order]
    counts = counts if found.num_unknown else counts[:size]
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [results.classes[label].name for label in order] + ([NO_CLASS] if found.num_unknown else [])
    inches = 2.3 + 0.235 * max(size, 10)
    figure, axes = new_axes("called", "class", (inches + 0.3, inches))
    _shade(axes, share)
    if size <= _NUMBERED:
        for row, column in zip(*np.nonzero(share >= 0.005), strict=True):
            text = f"{100 * share[row, column]:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(size), [_clipped(results.classes[label].name) for label in order], rotation=90)
    axes.set_yticks(range(len(rows)), [_clipped(row) for row in rows])
    axes.tick_params(length=0, labelsize=8)
    axes.grid(visible=False)
    axes.set_aspect("equal")
    numbers = " Numbers are percent." if size <= _NUMBERED else ""
    ranked = " Classes of a genus are neighbours." if GENUS in results.ranks else ""
    caption = (
        f"Each row is all reads of a class; the stronger the colour, the more of them are called so.{numbers}{ranked}"
    )
    return Drawing(f"confusion-{name}", f"{results.models[0].name} on {part}", caption, figure)


def _order(results: ReadResults) -> list[int]:
    """Classes of one genus together, as they come."""
    return sorted(range(len(results.classes)), key=lambda label: (results.classes[label].taxa.get(GENUS, -1), label))


def _shade(axes: Any, share: np.ndarray) -> None:
    """One colour, more or less of it, so that the page can put its own in its place on dark ground."""
    drawn = [(int(row), int(column)) for row, column in zip(*np.nonzero(share >= _FAINTEST), strict=True)]
    cells = [Rectangle((column - 0.48, row - 0.48), 0.96, 0.96) for row, column in drawn]
    right, wrong = to_rgb(LINES[0]), to_rgb(LINES[1])
    # The root lifts what is rare: one read in a hundred can be seen.
    shades = [((right if row == column else wrong), float(np.sqrt(share[row, column]))) for row, column in drawn]
    colours = [(*colour, 0.12 + 0.68 * depth) for colour, depth in shades]
    axes.add_collection(PatchCollection(cells, facecolors=colours, edgecolors="none", match_original=False))


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"
