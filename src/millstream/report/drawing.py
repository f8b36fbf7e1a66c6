"""How figures look and are saved, for any kind of model: palette, axes, legends, curves, training and memory."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from millstream.core.console import format_bytes
from millstream.errors import MissingExtra
from millstream.report import STYLE_SHEET
from millstream.report.measures import Curve, Interval, spaced

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtra("Figures need the package 'matplotlib': pip install 'millstream[report]'") from None

# Each colour for light and dark backgrounds, from the style sheet shared by report and explorer. Lines are
# distinguishable with any kind of colour blindness (after Okabe and Ito, with even lightness), and by their dashes.
PALETTE: dict[str, tuple[str, str]] = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--(\w+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLE_SHEET.read_text()
    )
}
INK, GRID = (PALETTE[name][0] for name in ("ink", "grid"))
LINES = [light for name, (light, _) in PALETTE.items() if name.startswith("line")]
DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
DOTTED: Any = (0, (1, 2))
MAX_LINES = 5  # models in a figure
OVERVIEW = "overview"  # the name of the figure that a page begins with
_MAX_POINTS = 160  # per line: more would not be visible, and the page stays small
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.4,
    "legend.labelspacing": 0.3,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and caption; `missing` says why there is none."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""

    def svg(self, *, transparent: bool = False) -> str:
        """The figure as SVG; the same drawing gives the same bytes."""
        figure: Any = self.figure
        text = io.StringIO()
        with style({"svg.hashsalt": self.name}):
            figure.savefig(text, format="svg", transparent=transparent, metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # the layout is done, and it is most of the work
        return text.getvalue()

    def png(self) -> bytes:
        figure: Any = self.figure
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=200)
        return data.getvalue()


_NO_METADATA: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def drawing_files(drawings: Iterable[Drawing]) -> dict[str, bytes]:
    """Every figure that has data, as .svg and .png on a white background."""
    files: dict[str, bytes] = {}
    for drawing in drawings:
        if drawing.figure:
            files[f"{drawing.name}.svg"] = drawing.svg().encode()
            files[f"{drawing.name}.png"] = drawing.png()
    return files


def style(more: Mapping[str, object] | None = None) -> AbstractContextManager[None]:
    return cast(Any, matplotlib).rc_context({**_STYLE, **(more or {})})


@dataclass(frozen=True)
class Look:
    """How the lines of a model are drawn in every figure."""

    colour: str
    dashes: Any = "-"
    width: float = 1.7

    def options(self, label: str) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width, "zorder": 3, "label": label}


def looks_of(*, solid: Sequence[str], dashed: Sequence[str]) -> dict[str, Look]:
    """A colour for each line, of which there are at most `MAX_LINES`."""
    styles = [*((name, "-") for name in solid)]
    styles += [(name, DASHES[place % len(DASHES)]) for place, name in enumerate(dashed)]
    return {name: Look(colour, dashes) for colour, (name, dashes) in zip(LINES, styles, strict=False)}


def new_axes(x: str, y: str, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, Any]:
    """Empty axes; the size is in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.add_subplot()  # its methods are only partly typed
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    return figure, axes


def axes_of(drawing: Drawing) -> Any:
    """The axes of an existing figure, to add to."""
    figure: Any = drawing.figure
    return figure.axes[0]


def legend(figure: Any, axes: Any) -> None:
    """A legend below the axes, where no line crosses it."""
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=2)


def curve_drawing(
    about: tuple[str, str, str],
    axes_titles: tuple[str, str],
    curves: Mapping[str, Curve],
    looks: Mapping[str, Look],
    *,
    missing: str = "",
    labels: Mapping[str, str] | None = None,
    reference: tuple[tuple[float, float], tuple[float, float]] | None = None,
    marker: float = 0,
    x_range: tuple[float | None, float | None] | None = None,
    y_range: tuple[float | None, float | None] | None = None,
) -> Drawing:
    """One line per model; `about` is the figure's name, title and caption; `reference` is a dotted line."""
    if not curves:
        return Drawing(*about, None, missing)
    figure, axes = new_axes(*axes_titles)
    if reference is not None:
        axes.plot(*reference, color=INK, linewidth=0.9, linestyle=DOTTED)
    markers = {"marker": "o", "markersize": marker} if marker else {}
    for name, curve in curves.items():
        axes.plot(*thinned(curve), **looks[name].options((labels or {}).get(name, name)), **markers)
    if x_range is not None:
        axes.set_xlim(*x_range)
    if y_range is not None:
        axes.set_ylim(*y_range)
    legend(figure, axes)
    return Drawing(*about, figure)


def overview_drawing(
    title: str,
    caption: str,
    axis: str,
    values: Mapping[str, Interval],
    *,
    looks: Mapping[str, Look],
    chance: float | None,
) -> Drawing:
    """What to see first: one number per model with its interval, as dots below each other."""
    if not values:
        return Drawing(OVERVIEW, title, caption, None, "nothing was compared")
    figure, axes = new_axes(axis, "", (5.4, 0.7 + 0.3 * len(values)))
    for place, (name, value) in enumerate(values.items()):
        colour = looks[name].colour
        axes.plot([value.low, value.high], [place, place], color=colour, linewidth=2)
        axes.plot([value.value], [place], color=colour, marker="o", markersize=7)
        at = {"xytext": (6, 0), "textcoords": "offset points"}
        axes.annotate(f"{value.value:.3f}", (value.high, place), va="center", **at)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    if chance is not None:
        axes.axvline(chance, color=INK, linewidth=0.9, linestyle=DOTTED)
    return Drawing(OVERVIEW, title, caption, figure)


def history_drawings(
    history: Sequence[Mapping[str, object]],
    kinds: Mapping[str, tuple[str, str, str]],
    looks: Mapping[str, Look],
    *,
    what: str,
) -> list[Drawing]:
    """A figure per number logged each epoch; `kinds` has its title, unit and caption. `what` is the kind of model."""
    drawings: list[Drawing] = []
    for key, (title, unit, caption) in kinds.items():
        lines: dict[tuple[str, object], list[tuple[float, float]]] = {}
        for epoch in history:
            x, y = epoch.get("epoch"), epoch.get(key)
            if isinstance(x, int | float) and isinstance(y, int | float):
                lines.setdefault((str(epoch.get("model")), epoch.get("seed")), []).append((x, y))
        missing = f"no {what} of this run logged it" if history else f"no {what} was trained in epochs"
        if not lines:
            drawings.append(Drawing(key, title, caption, None, missing))
            continue
        figure, axes = new_axes("epoch", unit)
        logged = {name: None for name, _ in lines}
        names = sorted(logged, key=lambda name: (name not in looks, list(looks).index(name) if name in looks else 0))
        for place, name in enumerate(names[:MAX_LINES]):
            options = looks.get(name, Look(LINES[place])).options(name) | {"linewidth": 1.2}
            for points in (some for (one, _), some in lines.items() if one == name):
                axes.plot(*zip(*points, strict=True), **options, marker="o", markersize=2)
                options["label"] = "_"  # one entry for all seeds
        axes.xaxis.get_major_locator().set_params(integer=True)
        epochs = {x for points in lines.values() for x, _ in points}
        if len(epochs) == 1:
            axes.set_xlim(min(epochs) - 1, min(epochs) + 1)  # else its tick would be among fractions
        is_count = all(float(y).is_integer() for points in lines.values() for _, y in points)
        axes.yaxis.get_major_locator().set_params(integer=is_count)
        legend(figure, axes)
        drawings.append(Drawing(key, title, caption, figure))
    return drawings


def memory_drawing(memory: Sequence[tuple[float, int]], budget: int | None) -> Drawing:
    title, caption = "Memory", "Resident memory during the run."
    if not memory:
        return Drawing("memory", title, caption, None, "the run logged no memory")
    longest = max(seconds for seconds, _ in memory)
    unit, scale = ("minutes", 60) if longest > 300 else ("seconds", 1)
    figure, axes = new_axes(f"{unit} since start", "GB")
    x, y = thinned(Curve([s / scale for s, _ in memory], [b / 1e9 for _, b in memory]))
    axes.plot(x, y, color=LINES[0], linewidth=1.5, label="in use")
    if budget is not None:
        axes.axhline(budget / 1e9, color=LINES[1], linewidth=1.2, linestyle="--", label="budget")
        caption = f"Resident memory during the run, and its budget of {format_bytes(budget)}."
    axes.set_ylim(0, None)
    legend(figure, axes)
    return Drawing("memory", title, caption, figure)


def thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Points at even steps, with the first and the last."""
    kept = spaced(len(curve.x), _MAX_POINTS)
    return np.asarray(curve.x, np.float64)[kept].tolist(), np.asarray(curve.y, np.float64)[kept].tolist()
