"""A run -> the results its report shows. All choices are made on validation; the test split is only measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.errors import MillstreamError
from millstream.report import measures
from millstream.report.measures import (
    Counts,
    Curve,
    Floats,
    Interval,
    Labels,
    Measure,
    Resampled,
    auroc,
    bootstrap,
    compare,
    equal_bins,
)
from millstream.report.ranking import Ranking
from millstream.traces.label import references_of
from millstream.traces.report.findings import KEPT, PROBE, TEST, Contender, best_of, findings, pairs_of
from millstream.traces.report.results import Mistake, ModelResult, Results, Run, Split, Trial, read_run
from millstream.traces.report.tokens import token_findings, token_results
from millstream.traces.store.traces import Traces

RESAMPLES = 2000
MEASURES: Sequence[str] = ("auroc", "aupr", "aupr_right", "f1", "aurc", "accuracy_kept")  # with an interval
CURVE_RESAMPLES = 500
MAX_BINS = 4
MAX_MISTAKES = 12


def read_results(run: str | Path, *, resamples: int = RESAMPLES) -> Results:
    """The results of the finished detectors of a run, with intervals from `resamples` resamples of the test questions.

    >>> read_results("runs/first").findings[0]
    """
    read = read_run(run)
    test = read.test
    detectors = {name: _Detector(name, trials, read) for name, trials in read.trials.items()}
    questions = test.questions
    wanted = {name: detector.measure(test.labels) for name, detector in detectors.items()}
    drawn = bootstrap(wanted, test.labels, groups=questions, resamples=resamples)
    found = {name: dict(zip(MEASURES, numbers, strict=True)) for name, numbers in drawn.items()}
    contenders = {name: Contender(name, detector.family, detector.auroc_val) for name, detector in detectors.items()}
    best = best_of(contenders.values())
    differences = compare(pairs_of(contenders), {(name, TEST): numbers["auroc"] for name, numbers in found.items()})
    texts = _TracedTexts(read.data.get("store"), test)
    bins = texts.length_bins()
    learning = _learning(read, questions)
    for name, curve in learning.items():
        if curve:  # the point of all labels
            curve.append((int(str(read.data["labelled"])), found[name]["auroc"].interval))
    models = [detector.result(found[name], test, bins, learning[name]) for name, detector in detectors.items()]
    models.sort(key=lambda model: -model.auroc.value)
    mistaken = None if best.detector is None else detectors[best.detector]
    num_wrong = int(test.labels.sum())
    tokens = token_results(read, resamples=resamples)
    return Results(
        path=read.path,
        config=read.config,
        environment=read.environment,
        data=read.data,
        metrics=read.metrics,
        num_test=len(test.labels),
        num_wrong=num_wrong,
        prevalence=num_wrong / len(test.labels),
        models=models,
        differences=differences,
        probe_layers=_probe_layers(read),
        mistakes=[] if mistaken is None else texts.mistakes(mistaken.name, mistaken.probabilities()),
        tokens=tokens,
        findings=[
            *findings(models, differences, best=best, data=read.data, labels=test.labels, resamples=resamples),
            *token_findings(tokens),
        ],
        missing=read.missing,
    )


class _Detector:
    """A detector with all its seeds; its measures are means over them."""

    def __init__(self, name: str, trials: Sequence[Trial], run: Run) -> None:
        self.name, self.family, self._seeds = name, trials[0].fit.family, trials
        self.auroc_val = float(np.mean([auroc(run.val.labels, trial.val) for trial in trials]))

    def measure(self, labels: Labels) -> Measure:
        """A function that computes MEASURES on resampled records."""
        ranked = [(Ranking(labels, one.test), one.flags) for one in self._seeds]

        def numbers(counts_RN: Counts) -> Floats:
            return np.mean([_numbers(ranking, labels, flags, counts_RN) for ranking, flags in ranked], axis=0)

        return numbers

    def probabilities(self) -> Floats:
        """The probability that each answer is wrong, after Platt."""
        return np.mean([one.probabilities for one in self._seeds], axis=0)

    def result(
        self,
        found: Mapping[str, Resampled],
        test: Split,
        bins: Mapping[str, NDArray[np.int64]],
        learning: Sequence[tuple[int, Interval]],
    ) -> ModelResult:
        labels, seeds, first = test.labels, self._seeds, self._seeds[0]
        fits, scores = [one.fit for one in seeds], [one.test for one in seeds]
        given = [one.scores for one in seeds]
        platt = [one.probabilities for one in seeds]
        at_threshold = [measures.precision_recall(labels, one.flags, 1) for one in seeds]
        areas = [auroc(labels, some) for some in scores]
        are_probabilities = all(fit.probabilities for fit in fits)
        return ModelResult(
            name=self.name,
            kind=self.family,
            title=fits[0].title,
            seeds=len(seeds),
            parameters=fits[0].parameters,
            auroc=found["auroc"].interval,
            auroc_sd=measures.deviation(areas),
            auroc_val=self.auroc_val,
            aupr=found["aupr"].interval,
            aupr_right=found["aupr_right"].interval,
            threshold=first.threshold,
            f1=found["f1"].interval,
            precision=_mean([precision for precision, _ in at_threshold]),
            recall=_mean([recall for _, recall in at_threshold]),
            fpr_at_95_tpr=_mean([measures.fpr_at_tpr(labels, some) for some in scores]),
            brier=_mean([measures.brier(labels, some) for some in given]) if are_probabilities else None,
            brier_platt=_mean([measures.brier(labels, some) for some in platt]),
            ece=_mean([measures.ece(labels, some) for some in given]) if are_probabilities else None,
            ece_platt=_mean([measures.ece(labels, some) for some in platt]),
            aurc=found["aurc"].interval,
            accuracy_kept=found["accuracy_kept"].interval,
            prr=_mean([measures.prr(labels, some) for some in scores]),
            fit_s=_mean([fit.fit_s for fit in fits]),
            score_ms=_mean([1000 * fit.score_s / max(fit.num_scored, 1) for fit in fits]),
            trace_kb=fits[0].trace_bytes / 1000,
            extra_forwards=fits[0].extra_forwards,
            extra_tokens=fits[0].extra_tokens,
            chosen=fits[0].chosen,
            roc=measures.roc_curve(labels, scores[0]),
            pr=measures.precision_curve(labels, scores[0]),
            risk_coverage=measures.risk_coverage(labels, scores[0]),
            calibration=measures.calibration_curve(labels, platt[0]),
            by_length=[_in_bin(name, members, test, scores) for name, members in bins.items()],
            learning=learning,
        )


def _numbers(ranking: Ranking, labels: Labels, flags: Floats, counts_RN: Counts) -> Floats:
    tally = ranking.tally(counts_RN)
    found = {
        "auroc": tally.aurocs(),
        "aupr": tally.average_precisions(),
        "aupr_right": tally.average_precisions_of_zeros(),
        "f1": measures.f1_scores(labels, flags, 1, counts_RN),
        "aurc": tally.aurcs(),
        "accuracy_kept": 1 - tally.risks(KEPT),
    }
    return np.stack([found[name] for name in MEASURES])


def _learning(run: Run, questions: NDArray[np.int64]) -> dict[str, list[tuple[int, Interval]]]:
    """The AUROC of each detector by the number of labelled questions."""
    points = {(name, point.labels): point.trials for name, curve in run.curves.items() for point in curve}
    wanted = {key: mean_area(trials, run.test.labels) for key, trials in points.items()}
    drawn = bootstrap(wanted, run.test.labels, groups=questions, resamples=CURVE_RESAMPLES) if wanted else {}
    found: dict[str, list[tuple[int, Interval]]] = {name: [] for name in run.trials}
    for name, labels in sorted(points):
        found[name].append((labels, drawn[name, labels][0].interval))
    return found


def mean_area(trials: Sequence[Trial], labels: Labels) -> Measure:
    """A function that computes the AUROC of a detector, the mean over its seeds, on resampled records."""

    ranked = [Ranking(labels, trial.test) for trial in trials]

    def area(counts_RN: Counts) -> Floats:
        return np.mean([ranking.tally(counts_RN).aurocs() for ranking in ranked], axis=0)[None]

    return area


def _in_bin(
    name: str, members: NDArray[np.int64], test: Split, scores: Sequence[Floats]
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


class _TracedTexts:
    """Questions and answers of the test records, from their store; empty if it was moved or changed."""

    def __init__(self, store: object, split: Split) -> None:
        self._split = split
        self._traces: Traces | None = None
        try:
            traces = Traces(str(store))
            if _has_records(traces, split):
                self._traces = traces
        except (MillstreamError, OSError):
            return

    def length_bins(self) -> Mapping[str, NDArray[np.int64]]:
        """Up to four ranges of answer lengths in tokens ("3-4") of about equal counts, and the records in each."""
        values = self._values("answer_len", self._split.records)
        known = np.array([row for row, value in enumerate(values) if value is not None], np.int64)
        if not len(known):
            return {}
        lengths = np.array([value for value in values if value is not None]).astype(np.int64)
        bins = equal_bins(lengths, MAX_BINS)
        return {_range(lengths[bins == number]): known[bins == number] for number in range(int(bins.max()) + 1)}

    def mistakes(self, detector: str, probabilities: Floats) -> list[Mistake]:
        """The answers whose probability of being wrong is furthest from their label."""
        split = self._split
        errors = np.abs(probabilities - split.labels)
        worst = np.argsort(-errors, kind="stable")[:MAX_MISTAKES]
        worst = worst[errors[worst] > 0.5]
        names = ("question", "generated_answer", "answer", "aliases")
        texts = {name: self._values(name, split.records[worst]) for name in names}
        return [
            Mistake(
                detector,
                id=str(split.ids[at]),
                question=_text(texts["question"][row]),
                answer=_text(texts["generated_answer"][row]),
                references=references_of([texts["answer"][row], texts["aliases"][row]]),
                verdict="wrong" if split.labels[at] else "right",
                probability=float(probabilities[at]),
            )
            for row, at in enumerate(worst.tolist())
        ]

    def _values(self, name: str, records: NDArray[np.int64]) -> Sequence[object]:
        try:
            if self._traces is not None:
                return self._traces.column(name).take(records).to_pylist()
        except (MillstreamError, OSError, KeyError):  # KeyError: no such scalar field
            pass
        return [None] * len(records)


def _has_records(traces: Traces, split: Split) -> bool:
    """Whether the store still has these records under their numbers."""
    if split.records.max() >= len(traces):
        return False
    if traces.id_field is None:
        return True
    ids = traces.column(traces.id_field).take(split.records).to_pylist()
    return all(found is None or str(found) == wanted for found, wanted in zip(ids, split.ids, strict=True))


def _range(lengths: NDArray[np.int64]) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return str(low) if low == high else f"{low}-{high}"


def _text(value: object) -> str:
    return "" if value is None else str(value)
