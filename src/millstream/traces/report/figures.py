"""The figures of a report on detectors, each drawn once for both the page and files."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
    looks_of,
    memory_drawing,
    overview_drawing,
    style,
)
from millstream.report.measures import Curve
from millstream.report.tables import shown
from millstream.traces.report.findings import BASELINE, LOGPROB, PROBE, TRAINED
from millstream.traces.report.results import ModelResult, Results

_HISTORY = {
    "loss": ("Training loss", "loss", "Per epoch; one line per detector and seed."),
    "val_auroc": ("Validation AUROC", "AUROC", "Per epoch; one line per detector and seed."),
    "kl": ("KL term", "KL", "Variational models: divergence of the latent code from the prior."),
    "active_units": ("Active units", "units", "Variational models: latent units that vary with the input."),
}


def draw(results: Results) -> list[Drawing]:
    """Every figure of the report, in its order: of the main models."""
    models = main_models(results.models)
    trained = [model.name for model in models if model.kind == TRAINED]
    looks = looks_of(solid=trained, dashed=[model.name for model in models if model.kind != TRAINED])
    about = (
        "AUROC",
        "With 95 % intervals over questions: the best detectors of each kind on validation. Dotted: chance.",
    )
    with style():
        return [
            overview_drawing(*about, "AUROC", {model.name: model.auroc for model in models}, looks=looks, chance=0.5),
            *_curves(results, models, looks),
            *history_drawings(results.metrics.history, _HISTORY, looks, what="detector"),
            _layers(results.probe_layers),
            _lengths(models, looks),
            _learning(models, looks),
            memory_drawing(results.metrics.memory, results.metrics.budget),
        ]


def main_models(models: Sequence[ModelResult]) -> list[ModelResult]:
    """At most five, in their order: the best trained one and the best probe on validation, the mean log-probability,
    then other trained ones, then baselines."""
    ranked = sorted((model for model in models if model.kind in (TRAINED, BASELINE)), key=lambda one: -one.auroc_val)
    trained = [model.name for model in ranked if model.kind == TRAINED]
    probes = [model.name for model in ranked if model.name.startswith(PROBE)]
    wanted = [*trained[:1], *probes[:1], LOGPROB, *trained[1:], *(model.name for model in ranked)]
    known = {model.name for model in models}
    chosen = [name for name in dict.fromkeys(wanted) if name in known][:MAX_LINES]
    return [model for model in models if model.name in chosen]


def _curves(results: Results, models: Sequence[ModelResult], looks: Mapping[str, Look]) -> list[Drawing]:
    def curves(of: Callable[[ModelResult], Curve]) -> dict[str, Curve]:
        return {model.name: of(model) for model in models if len(of(model).x) > 1}

    diagonal = ((0.0, 1.0), (0.0, 1.0))
    level = ((0.0, 1.0), (results.prevalence, results.prevalence))
    curve = partial(curve_drawing, looks=looks, missing="no detector has this curve", x_range=(0, 1))
    high = (0, 1.02)  # keeps a line at the top fully visible
    caption = "Wrong answers detected against right answers flagged. Dotted: chance. Legend: AUROC."
    roc = curve(
        ("roc", "ROC curves", caption),
        ("false positive rate", "true positive rate"),
        curves(lambda m: m.roc),
        labels={model.name: f"{model.name} {shown(model.auroc)}" for model in results.models},
        reference=diagonal,
        y_range=high,
    )
    caption = f"Dotted: chance, the prevalence of {shown(results.prevalence)}. Legend: AUPR."
    precision = curve(
        ("pr", "Precision and recall", caption),
        ("recall", "precision"),
        curves(lambda m: m.pr),
        labels={model.name: f"{model.name} {shown(model.aupr)}" for model in results.models},
        reference=level,
        y_range=high,
    )
    caption = "Share of wrong answers against the probability after Platt scaling, in bins. Dotted: perfect."
    calibration = curve(
        ("calibration", "Calibration", caption),
        ("probability that the answer is wrong", "share of wrong answers"),
        curves(lambda m: m.calibration),
        reference=diagonal,
        marker=3,
        y_range=high,
    )
    caption = "Share of wrong answers among those kept when the most suspicious are withheld. Dotted: chance."
    risk = curve(
        ("risk_coverage", "Risk and coverage", caption),
        ("coverage: share of answers kept", "risk: share of wrong answers"),
        curves(lambda m: m.risk_coverage),
        reference=level,
        y_range=(0, None),
    )
    return [roc, precision, calibration, risk]


def _learning(models: Sequence[ModelResult], looks: Mapping[str, Look]) -> Drawing:
    curves = {
        model.name: Curve([labels for labels, _ in model.learning], [area.value for _, area in model.learning])
        for model in models
        if model.learning
    }
    drawing = curve_drawing(
        ("learning", "AUROC by labels", "Trained with fewer labelled questions, on the same test questions."),
        ("labelled questions for training and validation", "AUROC"),
        curves,
        looks,
        missing="trained without curve=100,300,1000",
        marker=3,
    )
    if drawing.figure:
        axes = axes_of(drawing)
        axes.set_xscale("log")
        points = sorted({int(labels) for curve in curves.values() for labels in curve.x})
        axes.set_xticks(points, [f"{labels:,}" for labels in points])
        axes.minorticks_off()
    return drawing


def _layers(probe_layers: Mapping[str, Curve]) -> Drawing:
    styles = [("-", *DASHES)[place % (len(DASHES) + 1)] for place in range(len(probe_layers))]
    looks = {
        position: Look(LINES[place % len(LINES)], styles[place], 1.5) for place, position in enumerate(probe_layers)
    }
    drawing = curve_drawing(
        ("layers", "AUROC by layer", "Probes, on validation: the layers at which wrong answers can be detected."),
        ("layer", "AUROC on validation"),
        probe_layers,
        looks,
        missing="no probe was run",
        marker=3,
    )
    if drawing.figure:
        axes_of(drawing).xaxis.get_major_locator().set_params(integer=True)
    return drawing


def _lengths(models: Sequence[ModelResult], looks: Mapping[str, Look]) -> Drawing:
    measured = [model for model in models if model.by_length]
    drawing = curve_drawing(
        (
            "length",
            "AUROC by answer length",
            "Among answers of similar length; in brackets, the number of questions. Dotted: chance.",
        ),
        ("answer length in tokens", "AUROC"),
        {
            model.name: Curve(
                list(range(len(model.by_length))),
                [float("nan") if auroc is None else auroc for _, _, auroc in model.by_length],
            )
            for model in measured
        },
        looks,
        missing="no answer lengths in the store",
        marker=2.5,
    )
    if drawing.figure:
        axes = axes_of(drawing)
        axes.axhline(0.5, color=INK, linewidth=0.9, linestyle=DOTTED)
        ranges = measured[0].by_length
        axes.set_xticks(range(len(ranges)), [f"{tokens}\n({count})" for tokens, count, _ in ranges])
    return drawing
