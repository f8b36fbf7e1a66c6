"""What a run found, as plain data: everything the report shows, and nothing that draws it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % bootstrap interval over questions."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Points of a line; of one seed, the first."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class ModelResult:
    """One detector on the test part. Numbers are means over its seeds; intervals resample the questions."""

    name: str
    kind: str  # trained, baseline, null
    title: str  # what it is, in a few words
    seeds: int
    parameters: int | None
    auroc: Interval
    auroc_sd: float | None  # over seeds; None with one
    auroc_val: float
    aupr: Interval
    threshold: float  # chosen on validation, of the first seed
    f1: Interval
    precision: float
    recall: float
    fpr_at_95_tpr: float
    brier: float | None  # None where scores are no probabilities
    brier_platt: float
    ece: float | None
    ece_platt: float
    aurc: Interval
    prr: float
    fit_s: float
    score_ms: float  # a trace
    trace_kb: float  # that it reads
    extra_forwards: int
    chosen: Mapping[str, object]  # on validation: layer, C, ...
    roc: Curve
    pr: Curve
    risk_coverage: Curve
    calibration: Curve  # mean probability after Platt of a bin, share of wrong answers in it
    by_length: Sequence[tuple[str, int, float | None]]  # answer tokens "3-4", questions, AUROC (None: one class only)


@dataclass(frozen=True)
class Difference:
    """AUROC of `a` minus AUROC of `b`, on the same questions."""

    a: str
    b: str
    auroc: Interval
    p: float  # two-sided, paired bootstrap
    p_holm: float  # corrected for all comparisons made
    differs: bool  # p_holm < 0.05


@dataclass(frozen=True)
class Mistake:
    """A test question that the best detector is most sure and most wrong about."""

    detector: str
    question_id: str
    question: str
    answer: str  # what the model said
    references: Sequence[str]
    verdict: str  # right, wrong
    probability: float  # of being wrong, after Platt


@dataclass(frozen=True)
class Results:
    """Everything a report is made of."""

    run: Path
    config: Mapping[str, object]
    environment: Mapping[str, object]
    data: Mapping[str, object]  # the data card: data.json
    num_test: int
    num_wrong: int
    prevalence: float
    models: Sequence[ModelResult]  # best AUROC first
    differences: Sequence[Difference]
    history: Sequence[Mapping[str, object]]  # the lines of metrics.jsonl with kind "epoch"
    memory: Sequence[tuple[float, int]]  # seconds since the start, bytes
    budget: int | None  # bytes: what was held before training, and the memory the user set
    probe_layers: Mapping[str, Curve]  # position -> layer, AUROC on validation
    mistakes: Sequence[Mistake]
    findings: Sequence[str]  # plain sentences, first the one that matters most
    missing: Mapping[str, str]  # detectors that were asked for and could not be run, and why
