"""A run of detectors: reading and checking its files, and the results as plain data. Computes and draws nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import text_codes_of
from millstream.core.tables import read_table
from millstream.errors import BadSource
from millstream.report import RunFiles, RunResults, damaged, read_files, train_elsewhere, unfinished
from millstream.report.measures import Curve, Difference, Floats, Interval, Labels, best_threshold, fit_platt
from millstream.traces.spans import TOKEN_LABELS, TOKEN_SCORES, as_token_labels
from millstream.traces.store.format import id_field
from millstream.training.folder import CONFIG, PREDICTIONS, JobKey, read_mapping
from millstream.training.log import Fit

_TIES = 1e-6


@dataclass(frozen=True)
class ModelResult:
    """One detector on the test split. Numbers are means over its seeds; intervals resample the questions."""

    name: str
    kind: str  # trained, baseline, null
    title: str  # what it is, in a few words
    seeds: int
    parameters: int | None
    auroc: Interval
    auroc_sd: float | None  # over seeds; None with one
    auroc_val: float
    aupr: Interval
    aupr_right: Interval  # with right answers as positive
    threshold: float  # chosen on validation, of the first seed
    f1: Interval
    precision: float
    recall: float
    fpr_at_95_tpr: float
    brier: float | None  # None if scores are not probabilities
    brier_platt: float
    ece: float | None
    ece_platt: float
    aurc: Interval
    accuracy_kept: Interval  # share of right answers when the 20 % most suspicious are withheld
    prr: float
    fit_s: float  # of all folds
    score_ms: float  # per trace
    trace_kb: float  # read per trace
    extra_forwards: int
    extra_tokens: float | None  # generated for the samples of a question
    chosen: Mapping[str, object]  # on validation: layer, C, ...
    roc: Curve  # all curves: of the first seed
    pr: Curve
    risk_coverage: Curve
    calibration: Curve  # per bin: mean probability after Platt, share of wrong answers
    by_length: Sequence[tuple[str, int, float | None]]  # answer tokens "3-4", questions, AUROC (None: one class only)
    learning: Sequence[tuple[int, Interval]]  # labelled questions, AUROC


@dataclass(frozen=True)
class Mistake:
    """A test question on which the best detector is most confident and wrong."""

    detector: str
    id: str
    question: str
    answer: str  # of the model
    references: Sequence[str]
    verdict: str  # right, wrong
    probability: float  # of being wrong, after Platt


@dataclass(frozen=True)
class TokenResult:
    """One detector on the tokens of the test split. Numbers are means over its seeds."""

    name: str
    kind: str
    title: str
    seeds: int
    auroc: Interval
    auroc_sd: float | None
    auroc_val: float
    aupr: Interval
    f1: Interval
    span_f1: Interval
    span_precision: float
    span_recall: float
    threshold: float  # of the first seed


@dataclass(frozen=True)
class TokenResults:
    """All detectors of tokens of a run, the best token AUROC first."""

    num_tokens: int
    num_wrong: int
    num_spans: int
    models: Sequence[TokenResult]
    differences: Sequence[Difference]

    @property
    def prevalence(self) -> float:
        return self.num_wrong / self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Results(RunResults):
    """Everything that a report shows."""

    num_test: int
    num_wrong: int
    prevalence: float
    models: Sequence[ModelResult]  # best AUROC first
    probe_layers: Mapping[str, Curve]  # position -> layer, AUROC on validation
    mistakes: Sequence[Mistake]
    tokens: TokenResults | None = None  # of detectors that score tokens


@dataclass(frozen=True)
class Split:
    """The records of the validation or the test split, by number."""

    records: NDArray[np.int64]
    ids: NDArray[np.object_]
    question_ids: NDArray[np.object_]
    labels: Labels

    @property
    def questions(self) -> NDArray[np.int64]:
        """The question of each record, as a number from 0."""
        return np.unique(self.question_ids.astype(str), return_inverse=True)[1]


@dataclass(frozen=True)
class Trial:
    """One detector of one seed, and its scores in the order of the splits.

    With cross-validation, of all folds together: `val` and `test` are ranks among the validation scores of a fold, and
    their mean where several folds scored a record. Thresholds and calibration are always chosen on validation.
    """

    seed: int
    fit: Fit
    val: Floats
    test: Floats
    scores: Floats  # of the test records, as the detector gave them
    probabilities: Floats  # of the test records, calibrated
    flags: Floats  # 1 for test records at or above the threshold
    threshold: float  # of the first fold


@dataclass(frozen=True)
class CurvePoint:
    """The trials of a detector with so many labelled questions."""

    labels: int
    trials: Sequence[Trial]


@dataclass(frozen=True)
class Tokens:
    """The labelled tokens of a split, records one after another: labels, scores, and the place of each one's record."""

    labels: Labels
    scores: Floats
    records: NDArray[np.int64]


@dataclass(frozen=True)
class TokenTrial:
    """The scores of tokens by one detector of one seed."""

    val: Tokens
    test: Tokens


@dataclass(frozen=True, kw_only=True)
class Run(RunFiles):
    """A run so far: every detector with its finished seeds."""

    val: Split
    test: Split
    trials: Mapping[str, Sequence[Trial]]
    curves: Mapping[str, Sequence[CurvePoint]]  # learning curves, without the point of all labels
    tokens: Mapping[str, Sequence[TokenTrial]]  # of detectors that score tokens
    missing: Mapping[str, str]


def read_run(path: str | Path) -> Run:
    """Read the run in a folder. Unfinished detectors are left out; damaged files raise BadSource.

    >>> run = read_run("runs/first"); run.trials["gnn"][0].test.shape == run.test.labels.shape
    """
    files = read_files(path, what="detector")
    fits = files.metrics.fits
    table = _Predictions(files.path / PREDICTIONS)
    finished = [key for key in table.keys if key in fits]
    groups: dict[tuple[str, int, int], list[JobKey]] = {}  # of models, labels and seeds: their folds
    for job in finished:
        groups.setdefault((job.model, job.labels, job.seed), []).append(job)
    num_folds = max([1, *(len(jobs) for jobs in groups.values())])
    missing = dict(files.metrics.missing)
    for (model, labels, _), jobs in groups.items():
        if len(jobs) < num_folds and not labels:
            missing[model] = f"{len(jobs)} of {num_folds} folds are finished"
    whole = next((jobs for (model, labels, _), jobs in groups.items() if not labels and model not in missing), None)
    if whole is None:
        raise unfinished(files.path, what="detector")
    val, test = (table.split(name, whole) for name in ("val", "test"))
    trials: dict[tuple[str, int], list[Trial]] = {}
    tokens: dict[str, list[TokenTrial]] = {}
    for (model, labels, seed), jobs in groups.items():
        if len(jobs) < num_folds:
            continue
        if bad := table.num_bad(jobs):
            missing[model] = f"{bad} scores of seed {seed} are not finite"
            continue
        fit = merged([fits[job] for job in jobs])
        trials.setdefault((model, labels), []).append(table.trial(jobs, fit, None if labels else val, test))
        if not labels and (of_tokens := table.token_trial(jobs, test)) is not None:
            tokens.setdefault(model, []).append(of_tokens)
    kept = {model: some for (model, labels), some in trials.items() if model not in missing and not labels}
    curves = {
        name: [CurvePoint(labels, some) for (model, labels), some in sorted(trials.items()) if model == name and labels]
        for name in kept
    }
    return Run(**vars(files), val=val, test=test, trials=kept, curves=curves, tokens=tokens, missing=missing)


class _Predictions:
    """predictions.parquet by detector and split; the later of duplicate rows counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            table = read_table(file)
            self._models, self._model_names = text_codes_of(table.column("model"))
            self._splits, self._split_names = text_codes_of(table.column("part"))
            self._ids = text_codes_of(table.column(id_field(table.column_names)))
            self._questions = text_codes_of(table.column("question_id"))
            self._seeds = table.column("seed").to_numpy().astype(np.int64)
            zeros = np.zeros(table.num_rows, np.int64)
            crossed = {"fold", "labels"} <= set(table.column_names)
            self._folds, self._limits = (
                table.column(name).to_numpy().astype(np.int64) if crossed else zeros for name in ("fold", "labels")
            )
            self._records = table.column("record").to_numpy().astype(np.int64)
            self._labels = table.column("label").to_numpy().astype(np.int8)
            self._scores = table.column("score").to_numpy().astype(np.float64)
            has_tokens = {TOKEN_LABELS, TOKEN_SCORES} <= set(table.column_names)
            self._tokens = table.select([TOKEN_LABELS, TOKEN_SCORES]) if has_tokens else None
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error).partition("\n")[0]) from None
        keys = np.unique(np.stack([self._models, self._seeds, self._folds, self._limits], axis=1), axis=0)
        self.keys = [JobKey(self._model_names[model], *numbers) for model, *numbers in keys.tolist()]
        self._first = self.keys[0].model if self.keys else ""

    def split(self, name: str, jobs: Sequence[JobKey]) -> Split:
        """The records of a split that these folds of a detector were scored on."""
        rows = np.concatenate([self._rows(name, job) for job in jobs])
        rows = rows[np.unique(self._records[rows], return_index=True)[1]]
        labels = self._labels[rows]
        if not np.isin(labels, (0, 1)).all():
            raise self._damaged("labels other than 0 and 1")
        if len(np.unique(labels)) < 2:
            what = "no records" if not len(labels) else f"only {'wrong' if labels[0] else 'right'} answers"
            raise BadSource(
                f"{self._file}: the {name} split has {what}, so detectors cannot be compared. {self._remedy()}"
            )
        numbers = self._records[rows]

        def named(coded: tuple[NDArray[np.int64], Sequence[str]]) -> NDArray[np.object_]:
            codes, names = coded
            pairs = zip(codes[rows].tolist(), numbers.tolist(), strict=True)
            return np.array([names[code] if code >= 0 else f"record {number}" for code, number in pairs], object)

        return Split(numbers, named(self._ids), named(self._questions), labels)

    def _remedy(self) -> str:
        folder = self._file.parent
        if "evaluates" in read_mapping(folder / CONFIG):
            return "Evaluate on records with right and wrong answers: extract more, or label them by another rule"
        return f"Train on more records, or make the split larger. {train_elsewhere(folder)}"

    def num_bad(self, jobs: Sequence[JobKey]) -> int:
        rows = [self._rows(name, job) for job in jobs for name in ("val", "test")]
        return int(np.sum(~np.isfinite(self._scores[np.concatenate(rows)])))

    def trial(self, jobs: Sequence[JobKey], fit: Fit, val: Split | None, test: Split) -> Trial:
        """The scores of the folds of a detector together; without `val`, those of validation are left out."""
        pools = {name: _Pool(like) for name, like in (("val", val), ("test", test)) if like is not None}
        thresholds: list[float] = []
        for job in jobs:
            rows = self._rows("val", job)
            labels, scores = self._labels[rows], self._scores[rows]
            platt, percentile = fit_platt(labels, scores), Percentile.of(scores)
            thresholds.append(best_threshold(labels, scores))
            for name, pool in pools.items():
                rows = self._rows(name, job)
                scores = self._scores[rows]
                flags = np.where(scores >= thresholds[-1], 1.0, 0.0)
                numbers = np.stack([scores, percentile(scores), platt(scores), flags])
                if not pool.add(self._records[rows], self._labels[rows], numbers):
                    raise self._differs(name, job)
        if not all(pool.is_whole for pool in pools.values()):
            raise self._differs("test", jobs[0])
        ranked = int(len(jobs) > 1)  # by percentiles, which are comparable between folds
        scores, _, probabilities, flagged = pools["test"].means
        return Trial(
            seed=jobs[0].seed,
            fit=fit,
            val=pools["val"].means[ranked] if "val" in pools else np.empty(0),
            test=pools["test"].means[ranked],
            scores=scores,
            probabilities=probabilities,
            flags=np.where(flagged >= 0.5, 1.0, 0.0),
            threshold=thresholds[0],
        )

    def _differs(self, name: str, job: JobKey) -> BadSource:
        return self._damaged(f"{job.model}, seed {job.seed}, was scored on different {name} records than {self._first}")

    def token_trial(self, jobs: Sequence[JobKey], test: Split) -> TokenTrial | None:
        """The labelled tokens of the folds of a detector together; None if it did not score tokens.

        Several folds have percentiles in place of scores, which are comparable between them.
        """
        pools: dict[str, list[Tokens]] = {"val": [], "test": []}
        for job in jobs:
            val, own = (self._tokens_of(name, job) for name in pools)
            if val is None or own is None:
                return None
            own = replace(
                own, records=np.searchsorted(test.records, self._records[self._rows("test", job)][own.records])
            )
            if len(jobs) > 1:
                percentile = Percentile.of(val.scores)
                val, own = (replace(one, scores=percentile(one.scores)) for one in (val, own))
            pools["val"].append(val)
            pools["test"].append(own)
        return TokenTrial(*map(_joined, pools.values()))

    def _tokens_of(self, name: str, key: JobKey) -> Tokens | None:
        """The labelled tokens of a split of one fold; None if the detector did not score tokens."""
        if self._tokens is None:
            return None
        table = self._tokens.take(self._rows(name, key))
        labels = [as_token_labels(one) for one in table.column(TOKEN_LABELS).to_pylist()]
        scores = [None if one is None else np.array(one, np.float64) for one in table.column(TOKEN_SCORES).to_pylist()]
        if all(one is None for one in scores):
            return None
        parts: list[Tokens] = []
        for place, (own, found) in enumerate(zip(labels, scores, strict=True)):
            if own is None:
                continue
            if found is None or len(found) != len(own) or not np.isfinite(found).all():
                raise self._damaged(f"token scores of {key.model} that do not match the token labels")
            known = own >= 0
            parts.append(Tokens(own[known], found[known], np.full(int(known.sum()), place)))
        return _joined(parts) if parts else None

    def _rows(self, name: str, job: JobKey) -> NDArray[np.int64]:
        model, split = self._model_names.index(job.model), _index_of(self._split_names, name)
        of_job = (self._models == model) & (self._seeds == job.seed) & (self._folds == job.fold)
        rows = np.flatnonzero(of_job & (self._limits == job.labels) & (self._splits == split))[::-1]
        return rows[np.unique(self._records[rows], return_index=True)[1]]

    def _damaged(self, what: str) -> BadSource:
        return damaged(self._file, what)


@dataclass(frozen=True)
class Percentile:
    """The share of a fold's validation scores that a score exceeds, which folds can be compared by; needs no labels.

    A calibration by the few right answers of a fold costs a score of AUROC 0.60 0.02, and one of 0.82 0.015 (simulated:
    5,404 answers, 140 of them right); percentiles cost neither anything.
    """

    validation: Floats  # sorted
    mean: float
    scale: float

    @classmethod
    def of(cls, scores: Floats) -> "Percentile":
        return cls(np.sort(scores), float(scores.mean()), float(scores.std()) or 1.0)

    def __call__(self, scores: Floats) -> Floats:
        """Ties, as beyond the largest score, are ordered by the scores themselves."""
        below = np.searchsorted(self.validation, scores) + np.searchsorted(self.validation, scores, side="right")
        return below / (2 * len(self.validation)) + _TIES * np.arctan((scores - self.mean) / self.scale)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(*(np.concatenate([getattr(one, name) for one in parts]) for name in ("labels", "scores", "records")))


class _Pool:
    """Means over folds of the numbers of each record of a split."""

    def __init__(self, like: Split) -> None:
        self._like = like
        self._counts, self._sums = np.zeros(len(like.records)), np.zeros((4, len(like.records)))

    def add(self, records: NDArray[np.int64], labels: Labels, numbers: Floats) -> bool:
        """Whether these are records of the split, with its labels."""
        like = self._like
        places = np.searchsorted(like.records, records).clip(max=len(like.records) - 1)
        if not (np.array_equal(like.records[places], records) and np.array_equal(like.labels[places], labels)):
            return False
        self._counts[places] += 1
        self._sums[:, places] += numbers
        return True

    @property
    def is_whole(self) -> bool:
        return bool(self._counts.all())

    @property
    def means(self) -> Floats:
        return self._sums / self._counts


def merged(fits: Sequence[Fit]) -> Fit:
    """The cost of all folds together, and what was chosen on the first."""
    seconds = {name: sum(getattr(fit, name) for fit in fits) for name in ("fit_s", "score_s", "num_scored")}
    return replace(fits[0], **seconds)


def _index_of(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -2
