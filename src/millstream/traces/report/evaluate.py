"""A run -> everything its report shows. Choices are made on validation; the test part only gives numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.model.auroc import auroc, aurocs
from millstream.report import calibration, measures
from millstream.report.bootstrap import Measure, Resampled, bootstrap
from millstream.report.calibration import Platt, fit_platt
from millstream.report.compare import PROBE, Contender, best_of, compare
from millstream.report.findings import findings
from millstream.report.measures import Counts, Floats, Labels
from millstream.report.read_run import Part, Run, Trial, read_run
from millstream.report.results import Curve, ModelResult, Results
from millstream.report.traced_texts import TracedTexts

RESAMPLES = 2000
MEASURES: Sequence[str] = ("auroc", "aupr", "f1", "aurc")  # that get an interval


def read_results(run: str | Path, *, resamples: int = RESAMPLES) -> Results:
    """What the finished detectors of a run found, with intervals from so many draws of the test questions.

    >>> read_results("runs/first").findings[0]
    """
    read = read_run(run)
    test = read.test
    detectors = {name: _Detector(name, trials, read) for name, trials in read.trials.items()}
    questions = np.unique(test.question_ids.astype(str), return_inverse=True)[1]
    wanted = {name: detector.measure(test.labels) for name, detector in detectors.items()}
    drawn = bootstrap(wanted, test.labels, questions=questions, resamples=resamples)
    found = {name: dict(zip(MEASURES, numbers, strict=True)) for name, numbers in drawn.items()}
    contenders = {
        name: Contender(name, detector.family, detector.auroc_val, found[name]["auroc"])
        for name, detector in detectors.items()
    }
    best, differences = best_of(contenders.values()), compare(contenders)
    texts = TracedTexts(read.data.get("store"), test)
    bins = texts.length_bins()
    models = [detector.result(found[name], test, bins) for name, detector in detectors.items()]
    models.sort(key=lambda model: -model.auroc.value)
    mistaken = None if best.detector is None else detectors[best.detector]
    num_wrong = int(test.labels.sum())
    return Results(
        run=read.path,
        config=read.config,
        environment=read.environment,
        data=read.data,
        num_test=len(test.labels),
        num_wrong=num_wrong,
        prevalence=num_wrong / len(test.labels),
        models=models,
        differences=differences,
        history=read.metrics.history,
        memory=read.metrics.memory,
        budget=read.metrics.budget,
        probe_layers=_probe_layers(read),
        mistakes=[] if mistaken is None else texts.mistakes(mistaken.name, mistaken.probabilities()),
        findings=findings(
            models, differences, best=best, data=read.data, num_test=len(test.labels), resamples=resamples
        ),
        missing=read.missing,
    )


@dataclass(frozen=True)
class _Chosen:
    """One seed of a detector, with what was chosen on validation."""

    trial: Trial
    threshold: float
    platt: Platt


class _Detector:
    """A detector with all its seeds. A number of it is the mean over them."""

    def __init__(self, name: str, trials: Sequence[Trial], run: Run) -> None:
        labels = run.val.labels
        self.name, self.family = name, trials[0].fit.family
        self.auroc_val = float(np.mean([auroc(labels, trial.val) for trial in trials]))
        self._seeds = [
            _Chosen(trial, measures.best_threshold(labels, trial.val), fit_platt(labels, trial.val)) for trial in trials
        ]

    def measure(self, labels: Labels) -> Measure:
        """MEASURES, on drawn records."""
        # Sorted here, once: on sorted scores the measures have nothing left to sort, for any number of draws.
        ranked = [(one, np.argsort(one.trial.test, kind="stable")) for one in self._seeds]

        def numbers(counts_RN: Counts) -> Floats:
            seeds = [_numbers(labels[order], one, order, counts_RN[:, order]) for one, order in ranked]
            return np.mean(seeds, axis=0)

        return numbers

    def probabilities(self) -> Floats:
        """Of being wrong, after Platt."""
        return np.mean([one.platt(one.trial.test) for one in self._seeds], axis=0)

    def result(self, found: Mapping[str, Resampled], test: Part, bins: Mapping[str, NDArray[np.int64]]) -> ModelResult:
        labels, seeds, first = test.labels, self._seeds, self._seeds[0]
        fits, scores = [one.trial.fit for one in seeds], [one.trial.test for one in seeds]
        platt = [one.platt(one.trial.test) for one in seeds]
        at_threshold = [measures.precision_recall(labels, one.trial.test, one.threshold) for one in seeds]
        areas = [auroc(labels, some) for some in scores]
        are_probabilities = all(fit.probabilities for fit in fits)
        return ModelResult(
            name=self.name,
            kind=self.family,
            title=fits[0].title,
            seeds=len(seeds),
            parameters=fits[0].parameters,
            auroc=found["auroc"].interval,
            auroc_sd=float(np.std(areas, ddof=1)) if len(areas) > 1 else None,
            auroc_val=self.auroc_val,
            aupr=found["aupr"].interval,
            threshold=first.threshold,
            f1=found["f1"].interval,
            precision=_mean([precision for precision, _ in at_threshold]),
            recall=_mean([recall for _, recall in at_threshold]),
            fpr_at_95_tpr=_mean([measures.fpr_at_tpr(labels, some) for some in scores]),
            brier=_mean([calibration.brier(labels, some) for some in scores]) if are_probabilities else None,
            brier_platt=_mean([calibration.brier(labels, some) for some in platt]),
            ece=_mean([calibration.ece(labels, some) for some in scores]) if are_probabilities else None,
            ece_platt=_mean([calibration.ece(labels, some) for some in platt]),
            aurc=found["aurc"].interval,
            prr=_mean([measures.prr(labels, some) for some in scores]),
            fit_s=_mean([fit.fit_s for fit in fits]),
            score_ms=_mean([1000 * fit.score_s / max(fit.num_scored, 1) for fit in fits]),
            trace_kb=fits[0].trace_bytes / 1000,
            extra_forwards=fits[0].extra_forwards,
            chosen=fits[0].chosen,
            roc=measures.roc_curve(labels, scores[0]),
            pr=measures.precision_curve(labels, scores[0]),
            risk_coverage=measures.risk_coverage(labels, scores[0]),
            calibration=calibration.calibration_curve(labels, platt[0]),
            by_length=[_in_bin(name, members, test, scores) for name, members in bins.items()],
        )


def _numbers(labels: Labels, one: _Chosen, order: NDArray[np.int64], counts_RN: Counts) -> Floats:
    scores = one.trial.test[order]
    area, precision = aurocs(labels, scores, counts_RN), measures.average_precisions(labels, scores, counts_RN)
    f1 = measures.f1_scores(labels, scores, one.threshold, counts_RN)
    return np.stack([area, precision, f1, measures.aurcs(labels, scores, counts_RN)])


def _in_bin(
    name: str, members: NDArray[np.int64], test: Part, scores: Sequence[Floats]
) -> tuple[str, int, float | None]:
    area = _mean([auroc(test.labels[members], some[members]) for some in scores])
    return name, len(set(test.question_ids[members])), None if np.isnan(area) else area


def _probe_layers(run: Run) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for name, trials in run.trials.items():
        areas = trials[0].fit.chosen.get("auroc_by_layer")
        if name.startswith(PROBE) and areas:
            values = [float(area) for area in cast("Sequence[float]", areas)]
            curves[name.removeprefix(PROBE)] = Curve([float(layer) for layer in range(len(values))], values)
    return curves


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
