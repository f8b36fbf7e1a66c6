"""What a run of detectors found, as figures: each is drawn once, for the page and for files. Knows nothing of HTML."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from millstream.report.results import Curve, ModelResult, Results
from millstream.report.tables import shown

_HISTORY = {
    "loss": ("Training loss", "loss", "Over the epochs; a line for each detector and seed."),
    "val_auroc": ("Validation AUROC", "AUROC", "Over the epochs; a line for each detector and seed."),
    "kl": ("KL term", "KL", "Of the variational models: how far the code is from the prior."),
    "active_units": ("Active units", "units", "Of the variational models: units of the code that vary with the input."),
}


def draw(results: Results) -> list[Drawing]:
    """Every figure of the report, in its order."""
    looks = _looks(results.models)
    with style():
        return [
            *_of_curves(results, looks),
            *history_drawings(results.history, _HISTORY, looks),
            _of_layers(results.probe_layers),
            _of_lengths(results.models, looks),
            memory_drawing(results.memory, results.budget),
        ]


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Every figure that there is data for, as .svg and .png."""
    return write_drawings(draw(results), folder)


def _looks(models: Sequence[ModelResult]) -> dict[str, Look]:
    """Colours for all that were trained and the three baselines that were best on validation; the rest is grey."""
    trained = [model.name for model in models if model.kind == "trained"][: len(LINES)]
    baselines = sorted((m for m in models if m.kind == "baseline"), key=lambda m: m.auroc_val, reverse=True)
    best = [model.name for model in baselines][: min(3, len(LINES) - len(trained))]
    looks = {model.name: Look() for model in models}
    for colour, name in zip(LINES, trained + best, strict=False):
        looks[name] = Look(colour, "-" if name in trained else DASHES[best.index(name)], 1.7, True)
    return looks


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


def _of_curves(results: Results, looks: Mapping[str, Look]) -> list[Drawing]:
    drawings: list[Drawing] = []
    for kind in _KINDS:
        caption = kind.caption.format(prevalence=shown(results.prevalence))
        models = [model for model in results.models if len(kind.curve(model).x) > 1]
        if kind.name == "calibration":  # few points and much noise: grey ones would only hide the others
            models = [model for model in models if looks[model.name].named]
        if not models:
            drawings.append(Drawing(kind.name, kind.title, caption, None, "no detector has such a curve"))
            continue
        figure, axes = new_axes(*kind.axes)
        level = (0, 1) if kind.name in ("roc", "calibration") else (results.prevalence, results.prevalence)
        axes.plot((0, 1), level, color=INK, linewidth=0.9, linestyle=DOTTED)
        for model in models:
            label = f"{model.name} {shown(kind.value(model))}" if kind.value else model.name
            marker = {"marker": "o", "markersize": 3} if kind.name == "calibration" else {}
            axes.plot(*thinned(kind.curve(model)), **looks[model.name].options(label), **marker)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, None if kind.name == "risk_coverage" else 1.02)  # a line along the top keeps its width
        legend(figure, axes, grey=any(not looks[model.name].named for model in models))
        drawings.append(Drawing(kind.name, kind.title, caption, figure))
    return drawings


def _of_layers(probe_layers: Mapping[str, Curve]) -> Drawing:
    title, caption = "AUROC by layer", "Of the probes, on validation: at which layer the answer's truth can be read."
    if not probe_layers:
        return Drawing("layers", title, caption, None, "no probe was run")
    figure, axes = new_axes("layer", "AUROC on validation")
    for place, (position, curve) in enumerate(probe_layers.items()):
        style = {"color": LINES[place % len(LINES)], "linestyle": ("-", *DASHES)[place % 5]}
        axes.plot(curve.x, curve.y, **style, linewidth=1.5, marker="o", markersize=3, label=position)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, axes)
    return Drawing("layers", title, caption, figure)


def _of_lengths(models: Sequence[ModelResult], looks: Mapping[str, Look]) -> Drawing:
    title, caption = (
        "AUROC by answer length",
        "Within answers of similar length; below, how many questions. Dotted: chance.",
    )
    shown_models = [model for model in models if model.by_length]
    if not shown_models:
        return Drawing("length", title, caption, None, "no answer lengths in the store")
    figure, axes = new_axes("tokens of the answer", "AUROC")
    buckets = shown_models[0].by_length
    axes.axhline(0.5, color=INK, linewidth=0.9, linestyle=DOTTED)
    for model in shown_models:
        values = [float("nan") if auroc is None else auroc for _, _, auroc in model.by_length]
        axes.plot(range(len(values)), values, **looks[model.name].options(model.name), marker="o", markersize=2.5)
    axes.set_xticks(range(len(buckets)), [f"{tokens}\n({count})" for tokens, count, _ in buckets])
    legend(figure, axes, grey=any(not looks[model.name].named for model in shown_models))
    return Drawing("length", title, caption, figure)
