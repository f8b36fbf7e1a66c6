"""What a run found, as figures: each is drawn once, for the page and for files. Knows nothing of HTML."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from millstream.console import format_bytes
from millstream.errors import MissingExtra
from millstream.report.results import Curve, ModelResult, Results
from millstream.report.tables import shown
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
_DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_DOTTED: Any = (0, (1, 2))
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
        with _style({"svg.hashsalt": self.name}):
            figure.savefig(text, format="svg", transparent=transparent, metadata=_NO_METADATA)
        return text.getvalue()

    def png(self) -> bytes:
        figure: Any = self.figure
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=200)
        return data.getvalue()


_NO_METADATA: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def draw(results: Results) -> list[Drawing]:
    """Every figure of the report, in its order."""
    looks = _looks(results.models)
    with _style():
        return [
            *_of_curves(results, looks),
            *_of_history(results.history, looks),
            _of_layers(results.probe_layers),
            _of_lengths(results.models, looks),
            _of_memory(results),
        ]


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Every figure that there is data for, as .svg and .png on white ground."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Path, bytes] = {}
    for drawing in draw(results):
        if drawing.figure:
            files[folder / f"{drawing.name}.svg"] = drawing.svg().encode()
            files[folder / f"{drawing.name}.png"] = drawing.png()
    for file, data in files.items():
        publish(file, data)
    return list(files)


def _style(more: Mapping[str, object] | None = None) -> AbstractContextManager[None]:
    return cast(Any, matplotlib).rc_context({**_STYLE, **(more or {})})


@dataclass(frozen=True)
class _Look:
    """How the lines of a detector are drawn in every figure; without a name in the legend it is one of the grey."""

    colour: str = GREY
    dashes: Any = "-"
    width: float = 0.8
    named: bool = False

    def options(self, label: str) -> dict[str, Any]:
        own = {"color": self.colour, "linestyle": self.dashes, "linewidth": self.width}
        return {**own, "zorder": 3 if self.named else 2, "label": label if self.named else "_"}


def _looks(models: Sequence[ModelResult]) -> dict[str, _Look]:
    """Colours for all that were trained and the three baselines that were best on validation; the rest is grey."""
    trained = [model.name for model in models if model.kind == "trained"][: len(LINES)]
    baselines = sorted((m for m in models if m.kind == "baseline"), key=lambda m: m.auroc_val, reverse=True)
    best = [model.name for model in baselines][: min(3, len(LINES) - len(trained))]
    looks = {model.name: _Look() for model in models}
    for colour, name in zip(LINES, trained + best, strict=False):
        looks[name] = _Look(colour, "-" if name in trained else _DASHES[best.index(name)], 1.7, True)
    return looks


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6, 3.8), layout="constrained")
    axes: Any = figure.add_subplot()  # its methods are only half typed
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(figure: Any, axes: Any, *, grey: bool = False) -> None:
    """Below the axes, where no line can run through it; one entry for all that is grey."""
    if grey:
        axes.plot([], [], color=GREY, linewidth=0.8, label="others")
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=2)


@dataclass(frozen=True)
class _Kind:
    """A figure with one curve a detector."""

    name: str
    title: str
    caption: str
    axes: tuple[str, str]
    curve: Callable[[ModelResult], Curve]
    value: Callable[[ModelResult], float] | None = None  # beside the name in the legend


_KINDS = (
    _Kind(
        "roc",
        "ROC curves",
        "Wrong answers found against right answers flagged. Dotted: chance. In the legend: AUROC.",
        ("false positive rate", "true positive rate"),
        lambda m: m.roc,
        lambda m: m.auroc.value,
    ),
    _Kind(
        "pr",
        "Precision and recall",
        "Dotted: the prevalence, {prevalence}, which chance would have. In the legend: AUPR.",
        ("recall", "precision"),
        lambda m: m.pr,
        lambda m: m.aupr.value,
    ),
    _Kind(
        "calibration",
        "Calibration",
        "Share of wrong answers against the probability after Platt scaling, in bins. Dotted: perfect.",
        ("probability of being wrong", "share of wrong answers"),
        lambda m: m.calibration,
    ),
    _Kind(
        "risk_coverage",
        "Risk and coverage",
        "Share of wrong answers among those kept, when the most suspect are withheld. Dotted: withheld by chance.",
        ("coverage: share of answers kept", "risk: share of wrong ones"),
        lambda m: m.risk_coverage,
    ),
)


def _of_curves(results: Results, looks: Mapping[str, _Look]) -> list[Drawing]:
    drawings: list[Drawing] = []
    for kind in _KINDS:
        caption = kind.caption.format(prevalence=shown(results.prevalence))
        models = [model for model in results.models if len(kind.curve(model).x) > 1]
        if kind.name == "calibration":  # few points and much noise: grey ones would only hide the others
            models = [model for model in models if looks[model.name].named]
        if not models:
            drawings.append(Drawing(kind.name, kind.title, caption, None, "no detector has such a curve"))
            continue
        figure, axes = _axes(*kind.axes)
        level = (0, 1) if kind.name in ("roc", "calibration") else (results.prevalence, results.prevalence)
        axes.plot((0, 1), level, color=INK, linewidth=0.9, linestyle=_DOTTED)
        for model in models:
            label = f"{model.name} {shown(kind.value(model))}" if kind.value else model.name
            marker = {"marker": "o", "markersize": 3} if kind.name == "calibration" else {}
            axes.plot(*_thinned(kind.curve(model)), **looks[model.name].options(label), **marker)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, None if kind.name == "risk_coverage" else 1.02)  # a line along the top keeps its width
        _legend(figure, axes, grey=any(not looks[model.name].named for model in models))
        drawings.append(Drawing(kind.name, kind.title, caption, figure))
    return drawings


_HISTORY = {
    "loss": ("Training loss", "loss", "Over the epochs; a line for each detector and seed."),
    "val_auroc": ("Validation AUROC", "AUROC", "Over the epochs; a line for each detector and seed."),
    "kl": ("KL term", "KL", "Of the variational models: how far the code is from the prior."),
    "active_units": ("Active units", "units", "Of the variational models: units of the code that vary with the input."),
}


def _of_history(history: Sequence[Mapping[str, object]], looks: Mapping[str, _Look]) -> list[Drawing]:
    drawings: list[Drawing] = []
    order = {name: place for place, name in enumerate(looks)}
    for key, (title, unit, caption) in _HISTORY.items():
        lines: dict[tuple[str, object], list[tuple[float, float]]] = {}
        for epoch in history:
            x, y = epoch.get("epoch"), epoch.get(key)
            if isinstance(x, int | float) and isinstance(y, int | float):
                lines.setdefault((str(epoch.get("model")), epoch.get("seed")), []).append((x, y))
        missing = "no detector of this run logged it" if history else "no detector was trained over epochs"
        if not lines:
            drawings.append(Drawing(key, title, caption, None, missing))
            continue
        figure, axes = _axes("epoch", unit)
        named: set[str] = set()
        for (name, _), points in sorted(lines.items(), key=lambda line: order.get(line[0][0], len(order))):
            look = looks.get(name, _Look())
            options = look.options(name if name not in named else "_") | {"linewidth": 1.2 if look.named else 0.8}
            named.add(name)
            axes.plot(*zip(*points, strict=True), **options, marker="o", markersize=2)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=key == "active_units")
        _legend(figure, axes, grey=any(not looks.get(name, _Look()).named for name in named))
        drawings.append(Drawing(key, title, caption, figure))
    return drawings


def _of_layers(probe_layers: Mapping[str, Curve]) -> Drawing:
    title, caption = "AUROC by layer", "Of the probes, on validation: at which layer the answer's truth can be read."
    if not probe_layers:
        return Drawing("layers", title, caption, None, "no probe was run")
    figure, axes = _axes("layer", "AUROC on validation")
    for place, (position, curve) in enumerate(probe_layers.items()):
        style = {"color": LINES[place % len(LINES)], "linestyle": ("-", *_DASHES)[place % 5]}
        axes.plot(curve.x, curve.y, **style, linewidth=1.5, marker="o", markersize=3, label=position)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    return Drawing("layers", title, caption, figure)


def _of_lengths(models: Sequence[ModelResult], looks: Mapping[str, _Look]) -> Drawing:
    title, caption = (
        "AUROC by answer length",
        "Within answers of similar length; below, how many questions. Dotted: chance.",
    )
    shown_models = [model for model in models if model.by_length]
    if not shown_models:
        return Drawing("length", title, caption, None, "no answer lengths in the store")
    figure, axes = _axes("tokens of the answer", "AUROC")
    buckets = shown_models[0].by_length
    axes.axhline(0.5, color=INK, linewidth=0.9, linestyle=_DOTTED)
    for model in shown_models:
        values = [float("nan") if auroc is None else auroc for _, _, auroc in model.by_length]
        axes.plot(range(len(values)), values, **looks[model.name].options(model.name), marker="o", markersize=2.5)
    axes.set_xticks(range(len(buckets)), [f"{tokens}\n({count})" for tokens, count, _ in buckets])
    _legend(figure, axes, grey=any(not looks[model.name].named for model in shown_models))
    return Drawing("length", title, caption, figure)


def _of_memory(results: Results) -> Drawing:
    title, caption = "Memory", "Resident memory of the run over time."
    if not results.memory:
        return Drawing("memory", title, caption, None, "the run logged no memory")
    longest = max(seconds for seconds, _ in results.memory)
    unit, scale = ("minutes", 60) if longest > 300 else ("seconds", 1)
    figure, axes = _axes(f"{unit} since the start", "GB")
    x, y = _thinned(Curve([s / scale for s, _ in results.memory], [b / 1e9 for _, b in results.memory]))
    axes.plot(x, y, color=LINES[0], linewidth=1.5, label="in use")
    if results.budget is not None:
        axes.axhline(results.budget / 1e9, color=LINES[1], linewidth=1.2, linestyle="--", label="budget")
        caption = f"Resident memory of the run over time, and its budget of {format_bytes(results.budget)}."
    axes.set_ylim(0, None)
    _legend(figure, axes)
    return Drawing("memory", title, caption, figure)


def _thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """Every n-th point, and always the last."""
    step = max(1, len(curve.x) // _MAX_POINTS)
    keep = sorted({*range(0, len(curve.x), step), len(curve.x) - 1})
    return [float(curve.x[place]) for place in keep], [float(curve.y[place]) for place in keep]
