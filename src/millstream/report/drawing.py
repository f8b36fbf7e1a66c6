"""How figures look and are kept, whatever is compared: colours, axes, legends, and those of any training."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from millstream.console import format_bytes
from millstream.errors import MissingExtra
from millstream.report.results import Curve
from millstream.store.layout import publish

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtra("Figures need the package 'matplotlib': pip install 'millstream[report]'") from None

# Colours on light ground, and what the page puts in their place on dark ground. The lines are told apart by people with
# any kind of colour blindness (after Okabe and Ito, evened in lightness), and by their dashes.
PALETTE = {
    "ink": ("#1b1d21", "#e3e5e8"),
    "grid": ("#dfe1e5", "#33373d"),
    "grey": ("#b3b7bd", "#5b6068"),
    "line0": ("#0072b2", "#5ab4e6"),
    "line1": ("#d55e00", "#ff9452"),
    "line2": ("#00896a", "#35cba3"),
    "line3": ("#b0509b", "#e39bd2"),
    "line4": ("#8a6d00", "#e3c443"),
    "line5": ("#3b3fb5", "#a3a7ff"),
    "line6": ("#7a4a2b", "#cfa284"),
}
INK, GRID, GREY, *LINES = (light for light, _ in PALETTE.values())
DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
DOTTED: Any = (0, (1, 2))
_MAX_POINTS = 160  # of a line: no eye sees more in a figure of this size, and the page stays small
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
    """A figure and its words; `missing` says why there is none."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""

    def svg(self, *, transparent: bool = False) -> str:
        """The figure as SVG whose bytes depend on nothing but what is drawn."""
        figure: Any = self.figure
        text = io.StringIO()
        with style({"svg.hashsalt": self.name}):
            figure.savefig(text, format="svg", transparent=transparent, metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # what is laid out stays so, and laying out is most of the work
        return text.getvalue()

    def png(self) -> bytes:
        figure: Any = self.figure
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=200)
        return data.getvalue()


_NO_METADATA: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def write_drawings(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Every figure that there is data for, as .svg and .png on white ground."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Path, bytes] = {}
    for drawing in drawings:
        if drawing.figure:
            files[folder / f"{drawing.name}.svg"] = drawing.svg().encode()
            files[folder / f"{drawing.name}.png"] = drawing.png()
    for file, data in files.items():
        publish(file, data)
    return list(files)


def style(more: Mapping[str, object] | None = None) -> AbstractContextManager[None]:
    return cast(Any, matplotlib).rc_context({**_STYLE, **(more or {})})


@dataclass(frozen=True)
class Look:
    """How the lines of a model are drawn in every figure; without a name in the legend it is one of the grey."""

    colour: str = GREY
    dashes: Any = "-"
    width: float = 0.8
    named: bool = False

    def options(self, label: str) -> dict[str, Any]:
        own = {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width}
        return {**own, "zorder": 3 if self.named else 2, "label": label if self.named else "_"}


def new_axes(x: str, y: str, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, Any]:
    """Empty axes, of a size in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.add_subplot()  # its methods are only half typed
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    return figure, axes


def legend(figure: Any, axes: Any, *, grey: bool = False) -> None:
    """Below the axes, where no line can run through it; one entry for all that is grey."""
    if grey:
        axes.plot([], [], color=GREY, linewidth=0.8, label="others")
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=2)


def history_drawings(
    history: Sequence[Mapping[str, object]],
    kinds: Mapping[str, tuple[str, str, str]],
    looks: Mapping[str, Look],
    *,
    what: str = "detector",
) -> list[Drawing]:
    """A figure for each number that was logged every epoch; its title, its unit and its caption are in `kinds`."""
    drawings: list[Drawing] = []
    order = {name: place for place, name in enumerate(looks)}
    for key, (title, unit, caption) in kinds.items():
        lines: dict[tuple[str, object], list[tuple[float, float]]] = {}
        for epoch in history:
            x, y = epoch.get("epoch"), epoch.get(key)
            if isinstance(x, int | float) and isinstance(y, int | float):
                lines.setdefault((str(epoch.get("model")), epoch.get("seed")), []).append((x, y))
        missing = f"no {what} of this run logged it" if history else f"no {what} was trained over epochs"
        if not lines:
            drawings.append(Drawing(key, title, caption, None, missing))
            continue
        figure, axes = new_axes("epoch", unit)
        named: set[str] = set()
        for (name, _), points in sorted(lines.items(), key=lambda line: order.get(line[0][0], len(order))):
            look = looks.get(name, Look())
            options = look.options(name if name not in named else "_") | {"linewidth": 1.2 if look.named else 0.8}
            named.add(name)
            axes.plot(*zip(*points, strict=True), **options, marker="o", markersize=2)
        axes.xaxis.get_major_locator().set_params(integer=True)
        epochs = {x for points in lines.values() for x, _ in points}
        if len(epochs) == 1:
            axes.set_xlim(min(epochs) - 1, min(epochs) + 1)  # else the one tick would be among fractions
        axes.yaxis.get_major_locator().set_params(integer=key == "active_units")
        legend(figure, axes, grey=any(not looks.get(name, Look()).named for name in named))
        drawings.append(Drawing(key, title, caption, figure))
    return drawings


def memory_drawing(memory: Sequence[tuple[float, int]], budget: int | None) -> Drawing:
    title, caption = "Memory", "Resident memory of the run over time."
    if not memory:
        return Drawing("memory", title, caption, None, "the run logged no memory")
    longest = max(seconds for seconds, _ in memory)
    unit, scale = ("minutes", 60) if longest > 300 else ("seconds", 1)
    figure, axes = new_axes(f"{unit} since the start", "GB")
    x, y = thinned(Curve([s / scale for s, _ in memory], [b / 1e9 for _, b in memory]))
    axes.plot(x, y, color=LINES[0], linewidth=1.5, label="in use")
    if budget is not None:
        axes.axhline(budget / 1e9, color=LINES[1], linewidth=1.2, linestyle="--", label="budget")
        caption = f"Resident memory of the run over time, and its budget of {format_bytes(budget)}."
    axes.set_ylim(0, None)
    legend(figure, axes)
    return Drawing("memory", title, caption, figure)


def thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Every n-th point, and always the last."""
    step = max(1, len(curve.x) // _MAX_POINTS)
    keep = sorted({*range(0, len(curve.x), step), len(curve.x) - 1})
    return [float(curve.x[place]) for place in keep], [float(curve.y[place]) for place in keep]
