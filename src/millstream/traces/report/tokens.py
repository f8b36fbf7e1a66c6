"""How well detectors find wrong tokens: measures with intervals over questions, and their section of the report.

Thresholds are chosen on the tokens of the validation split; the test split is only measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from millstream.report import measures
from millstream.report.measures import (
    Counts,
    Floats,
    Interval,
    Labels,
    Measure,
    Resampled,
    auroc,
    bootstrap,
    compare,
    ratio,
    verdict,
)
from millstream.report.page import Scale, Section, TableBlock, TextBlock
from millstream.report.ranking import Ranking
from millstream.report.tables import Column, Comparison, Table, difference_table, grouped, shown, titled
from millstream.traces.report.results import Run, Split, TokenResult, TokenResults, Tokens, TokenTrial

# R sets of counts, N records, A tokens, G levels of scores

COMPARISON = Comparison("detector", "auroc", "token AUROC")
TEST = "test"
NUM_LEVELS = 256  # of scores, for intervals: a draw then sums counts per level, not tokens
_TRAINED, _BASELINE = "trained", "baseline"


def token_results(run: Run, *, resamples: int) -> TokenResults | None:
    """The results at token level; None if no detector scored tokens, or a split has no right or no wrong ones."""
    found = {name: trials for name, trials in run.tokens.items() if name in run.trials}
    first = next(iter(found.values()), None)
    if first is None or any(len(np.unique(part.labels)) < 2 for part in (first[0].val, first[0].test)):
        return None
    test = first[0].test
    has_wrong = _has_wrong(test, run.test)
    groups = run.test.questions
    detectors = {name: _Detector(trials, len(run.test.records)) for name, trials in found.items()}
    wanted: dict[str, Measure] = {name: detector.measure for name, detector in detectors.items()}
    drawn = bootstrap(wanted, has_wrong, groups=groups, resamples=resamples)
    models: list[TokenResult] = []
    areas: dict[tuple[str, str], Resampled] = {}
    for name, detector in detectors.items():
        exact = detector.exact()
        numbers = [Resampled(float(value), one.drawn) for value, one in zip(exact, drawn[name], strict=True)]
        areas[name, TEST] = numbers[0]
        fit = run.trials[name][0].fit
        models.append(detector.result(name, fit.family, fit.title, [one.interval for one in numbers]))
    models.sort(key=lambda model: -model.auroc.value)
    pairs = [(a, b, TEST) for a, b in _pairs(models)]
    return TokenResults(
        num_tokens=len(test.labels),
        num_wrong=int(test.labels.sum()),
        num_spans=int(runs_of(test.labels == 1, test.records).num),
        models=models,
        differences=compare(pairs, areas),
    )


def _has_wrong(tokens: Tokens, split: Split) -> Labels:
    """Which records have wrong tokens: each draw has records with and without, if the split has."""
    found = np.bincount(tokens.records, tokens.labels, minlength=len(split.records)) > 0
    return found.astype(np.int8) if 0 < found.sum() < len(found) else split.labels


def _pairs(models: Sequence[TokenResult]) -> Iterator[tuple[str, str]]:
    """Each trained detector with each baseline, and with those trained detectors that are no better on validation."""
    ranked = sorted(models, key=lambda model: -model.auroc_val)
    trained = [model.name for model in ranked if model.kind == _TRAINED]
    yield from product(trained, [model.name for model in ranked if model.kind == _BASELINE])
    yield from ((a, b) for place, a in enumerate(trained) for b in trained[place + 1 :])


# -- spans


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive chosen tokens: the run of each token (-1: none), and length and record of each run."""

    of_token: NDArray[np.int64]
    lengths: NDArray[np.int64]
    records: NDArray[np.int64]

    @property
    def num(self) -> int:
        return len(self.lengths)


def runs_of(chosen: NDArray[np.bool_], records: NDArray[np.int64]) -> Runs:
    """The runs of chosen tokens; a run ends with its record."""
    is_first = chosen.copy()
    is_first[1:] &= ~chosen[:-1] | (records[1:] != records[:-1])
    of_token = np.where(chosen, np.cumsum(is_first) - 1, -1)
    num = int(is_first.sum())
    return Runs(of_token, np.bincount(of_token[chosen], minlength=num), records[is_first])


def span_hits(predicted: Runs, true: Runs) -> NDArray[np.int64]:
    """The record of every predicted run that is a true one: they share more than half of the tokens of both together.

    A run can match only one other.
    """
    both = (predicted.of_token >= 0) & (true.of_token >= 0)
    pairs, shared = np.unique(np.stack([predicted.of_token[both], true.of_token[both]]), axis=1, return_counts=True)
    union = predicted.lengths[pairs[0]] + true.lengths[pairs[1]] - shared
    return predicted.records[pairs[0][2 * shared > union]]


# -- measures


class _Detector:
    """A detector of tokens with all its seeds; its measures are means over them."""

    def __init__(self, trials: Sequence[TokenTrial], num_records: int) -> None:
        self._trials = trials
        self.thresholds = [measures.best_threshold(trial.val.labels, trial.val.scores) for trial in trials]
        self._seeds = [
            _Counted(trial.test, threshold, num_records)
            for trial, threshold in zip(trials, self.thresholds, strict=True)
        ]

    def measure(self, counts_RN: Counts) -> Floats:
        """Token AUROC, AUPR and F1, and span F1, [4, R]."""
        counts = np.asarray(counts_RN, np.float32)
        return np.mean([one.measure(counts) for one in self._seeds], axis=0)

    def exact(self) -> Floats:
        """The same on all records, of the scores as they are."""
        return np.mean([one.exact() for one in self._seeds], axis=0)

    def result(self, name: str, kind: str, title: str, intervals: Sequence[Interval]) -> TokenResult:
        areas = [auroc(trial.test.labels, trial.test.scores) for trial in self._trials]
        area, precision, f1, span_f1 = intervals
        spans = np.mean([one.spans.sum(axis=1) for one in self._seeds], axis=0)
        return TokenResult(
            name=name,
            kind=kind,
            title=title,
            seeds=len(self._trials),
            auroc=area,
            auroc_sd=measures.deviation(areas),
            auroc_val=float(np.mean([auroc(trial.val.labels, trial.val.scores) for trial in self._trials])),
            aupr=precision,
            f1=f1,
            span_f1=span_f1,
            span_precision=float(spans[0] / max(spans[1], 1)),
            span_recall=float(spans[0] / max(spans[2], 1)),
            threshold=self.thresholds[0],
        )


class _Counted:
    """What the measures need of one seed, counted per record."""

    def __init__(self, tokens: Tokens, threshold: float, num_records: int) -> None:
        self._tokens, self._threshold = tokens, threshold
        flagged = tokens.scores >= threshold
        predicted, true = runs_of(flagged, tokens.records), runs_of(tokens.labels == 1, tokens.records)
        hits = span_hits(predicted, true)
        self.spans = np.stack(  # [3, N]: hits, predicted, true
            [np.bincount(some, minlength=num_records) for some in (hits, predicted.records, true.records)]
        ).astype(np.float32)
        kinds = (flagged & (tokens.labels == 1), flagged, tokens.labels == 1)
        self._flags = np.stack(  # [3, N]: flagged and wrong, flagged, wrong
            [np.bincount(tokens.records[kind], minlength=num_records) for kind in kinds]
        ).astype(np.float32)
        edges = np.unique(np.quantile(tokens.scores, np.linspace(0, 1, NUM_LEVELS + 1)[1:-1], method="nearest"))
        level = np.searchsorted(edges, tokens.scores, side="right")
        num = len(edges) + 1
        self._levels = [  # [N, G] tokens of label 0, and of label 1
            np.bincount(tokens.records[own] * num + level[own], minlength=num_records * num)
            .reshape(num_records, num)
            .astype(np.float32)
            for own in (tokens.labels == 0, tokens.labels == 1)
        ]

    def measure(self, counts_RN: NDArray[np.float32]) -> Floats:
        zeros_RG, ones_RG = (np.asarray(counts_RN @ levels, np.float64) for levels in self._levels)
        below_RG = np.cumsum(zeros_RG, axis=1) - zeros_RG / 2
        area = ratio((ones_RG * below_RG).sum(axis=1), ones_RG.sum(axis=1) * zeros_RG.sum(axis=1))
        found_RG, total_RG = (np.cumsum(some[:, ::-1], axis=1) for some in (ones_RG, ones_RG + zeros_RG))
        precision = (ones_RG[:, ::-1] * ratio(found_RG, np.maximum(total_RG, 1))).sum(axis=1)
        return np.stack([area, ratio(precision, found_RG[:, -1]), *self._f1s(counts_RN)])

    def exact(self) -> Floats:
        tokens = self._tokens
        f1s = self._f1s(np.ones((1, self.spans.shape[1]), np.float32))
        precision = Ranking(tokens.labels, tokens.scores).tally().average_precisions()
        return np.concatenate([[auroc(tokens.labels, tokens.scores)], precision, *f1s])

    def _f1s(self, counts_RN: NDArray[np.float32]) -> Iterator[Floats]:
        for counted_3N in (self._flags, self.spans):
            hits_R, found_R, true_R = np.asarray(counts_RN @ counted_3N.T, np.float64).T
            yield 2 * hits_R / np.maximum(found_R + true_R, 1)


# -- what is shown

_COLUMNS: tuple[Column[TokenResult], ...] = (
    Column("name", "detector", "", lambda m: m.name, ""),
    Column("kind", "kind", "", lambda m: m.kind, ""),
    *grouped(
        {
            "ranking of tokens": (
                Column(
                    "auroc", "AUROC", "probability that a wrong token scores higher than another", lambda m: m.auroc
                ),
                Column("auroc_sd", "± sd", "standard deviation of AUROC between seeds", lambda m: m.auroc_sd),
                Column("seeds", "seeds", "number of seeds; the numbers are means over them", lambda m: m.seeds, "d"),
                Column("auroc_val", "val. AUROC", "AUROC on the validation split", lambda m: m.auroc_val),
                Column("aupr", "AUPR", "area under the precision-recall curve of wrong tokens", lambda m: m.aupr),
            ),
            "at the validation threshold": (
                Column("f1", "token F1", "of wrong tokens", lambda m: m.f1),
                Column(
                    "span_f1",
                    "span F1",
                    "of runs of flagged tokens that share more than half of the tokens of both with a true span",
                    lambda m: m.span_f1,
                ),
                Column("span_precision", "precision", "of spans", lambda m: m.span_precision),
                Column("span_recall", "recall", "of spans", lambda m: m.span_recall),
                Column(
                    "threshold", "threshold", "best token F1 on validation, first seed", lambda m: m.threshold, ".3g"
                ),
            ),
        }
    ),
)


def token_table(results: TokenResults) -> Table[TokenResult]:
    return Table(_COLUMNS, results.models)


def token_lines(results: TokenResults, *, width: int) -> list[str]:
    """The comparison for a terminal: one line per detector, the best first."""
    table = token_table(results).only("name", "auroc", "auroc_sd", "aupr", "f1", "span_f1")
    lines = Table(titled(table.columns, {"name": "wrong tokens", "auroc": "AUROC [95 %]"}), table.rows)
    return [*lines.text(width=width, full=["auroc"]), _size(results)]


def token_tables(results: TokenResults | None) -> Mapping[str, str]:
    if results is None:
        return {}
    differences = difference_table(results.differences, COMPARISON)
    return {"tokens.csv": token_table(results).csv(), "token_differences.csv": differences.csv()}


def token_findings(results: TokenResults | None) -> Iterator[str]:
    """How the best trained detector of tokens compares with the best baseline, both chosen on validation."""
    ranked = sorted(results.models if results else [], key=lambda model: -model.auroc_val)
    best = next((model for model in ranked if model.kind == _TRAINED), None)
    other = next((model for model in ranked if model.kind == _BASELINE), None)
    if results is None or best is None:
        return
    found = next((one for one in results.differences if other and (one.a, one.b) == (best.name, other.name)), None)
    clause = (
        "" if found is None or other is None else f"; it {verdict(found, f'{other.name} ({other.auroc.value:.3f})')}"
    )
    yield f"The best detector of wrong tokens (on validation), {best.name}, has token AUROC {best.auroc}{clause}."


def token_section(results: TokenResults) -> Section:
    text = (
        f"{_size(results)} Small numbers are 95 % intervals over questions. A run of flagged tokens is a correct span "
        "if it shares more than half of the tokens of both with a true one."
    )
    table = TableBlock(
        table=token_table(results),
        label="Comparison of detectors of tokens",
        css="comparison",
        sort=("auroc", "descending"),
        plot=("auroc", Scale.of([model.auroc for model in results.models], reference=0.5)),
        notes={"auroc": "chance 0.500", "aupr": f"chance {shown(results.prevalence)}"},
        row_css=lambda model: model.kind,
        row_note=lambda model: model.title,
    )
    differences = TableBlock(
        table=difference_table(results.differences, COMPARISON).only("a", "b", "auroc", "p", "p_holm", "differs"),
        label="Paired differences of token AUROC",
        css="differences",
        plot=("auroc", Scale.of([one.value for one in results.differences], reference=0.0)),
        row_css=lambda one: "differs" if one.differs else "same",
    )
    blocks = [TextBlock(text), table, *([differences] if results.differences else [])]
    return Section("tokens", "Wrong tokens", blocks, "", "Tokens")


def _size(results: TokenResults) -> str:
    wrong = f"{results.num_wrong:,} of {results.num_tokens:,} labelled test tokens are wrong"
    return f"{wrong}, in {results.num_spans:,} spans."
