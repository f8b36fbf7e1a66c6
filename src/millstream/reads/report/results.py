"""What a run of classifiers found, as plain data: everything its report shows, and nothing that draws it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.report.reads.measures import AtThreshold, Called, Confusion
from millstream.report.results import Curve, Interval

VAL, TRAIN = "val", "train"
GENUS = "genus"
PRECISION = 0.95  # on validation: what the threshold of a model is chosen for
TARGETS = (0.9, PRECISION, 0.99, 0.999)  # others, to choose from


@dataclass(frozen=True)
class ReadClass:
    """One class of the mapping."""

    class_id: int
    name: str
    tax_id: int  # 0: nobody says
    taxa: Mapping[str, int]  # rank -> the number of its taxon there, -1: none
    reads: Mapping[str, int]  # of each part


@dataclass(frozen=True)
class RankResult:
    """Answers at one rank: the taxon whose classes are likeliest together."""

    rank: str
    num_taxa: int  # that the part has reads of
    accuracy: Interval
    macro_f1: Interval


@dataclass(frozen=True)
class Target:
    """What is called on a part above the threshold that has a precision on validation; None: no threshold has it."""

    precision: float
    threshold: float | None
    at: AtThreshold | None

    @property
    def numbers(self) -> Sequence[float | None]:
        """Coverage, precision, recall, share of unknown ones that are called."""
        at = self.at
        return [None] * 4 if at is None else [at.coverage, at.precision, at.recall, at.unknown]


@dataclass(frozen=True)
class PartResult:
    """One model on one part. Numbers are means over its seeds; curves and counts are of the first."""

    num_reads: int  # or pairs
    num_unknown: int  # of no known class: they count where something is called, and nowhere else
    num_classes: int  # that the part has reads of, and that macro F1 is the mean over
    accuracy: Interval
    macro_f1: Interval
    macro_f1_sd: float | None  # over seeds; None with one
    ranks: Sequence[RankResult]
    coverage: float | None  # at the threshold chosen on validation, as the next three; None: there was none to choose
    precision: float | None
    recall: float | None
    unknown_called: float | None  # share of the reads of no known class
    ece: float
    confidence: float  # mean probability of the answers, on reads of known classes
    abundance_l1: float
    targets: Sequence[Target]
    called: Called
    calibration: Curve  # mean probability of a bin, share of right answers in it
    confusion: Confusion


@dataclass(frozen=True)
class ModelResult:
    """One classifier."""

    name: str
    title: str
    seeds: int
    parameters: int | None
    threshold: float | None  # of the first seed
    fit_s: float
    train_reads_per_s: float | None  # the median over epochs
    waiting: float | None  # share of the time that training waited for data
    score_reads_per_s: float
    memory: int | None  # bytes: the most at the end of an epoch
    chosen: Mapping[str, object]
    parts: Mapping[str, PartResult]


@dataclass(frozen=True)
class Gap:
    """Macro F1 of the best model on two parts, over the classes that both have: like is compared with like."""

    first: str
    second: str
    num_classes: int
    macro_f1: tuple[float, float]
    difference: Interval  # the first minus the second


@dataclass(frozen=True)
class Difference:
    """Macro F1 of `a` minus macro F1 of `b`, on the same reads of a part."""

    a: str
    b: str
    part: str
    macro_f1: Interval
    p: float  # two-sided, paired bootstrap
    p_holm: float  # corrected for all comparisons made
    differs: bool


@dataclass(frozen=True)
class ReadResults:
    """Everything a report is made of."""

    run: Path
    config: Mapping[str, object]
    environment: Mapping[str, object]
    data: Mapping[str, object]  # the data card: data.json
    classes: Sequence[ReadClass]
    ranks: Mapping[str, Sequence[str]]  # the names of its taxa
    parts: Sequence[str]  # the test parts, then validation
    models: Sequence[ModelResult]  # best macro F1 on validation first
    gaps: Sequence[Gap]
    differences: Sequence[Difference]
    history: Sequence[Mapping[str, object]]
    memory: Sequence[tuple[float, int]]  # seconds since the start, bytes
    budget: int | None
    findings: Sequence[str]
    missing: Mapping[str, str]  # models that were asked for and have no results, and why

    @property
    def tests(self) -> Sequence[str]:
        return [part for part in self.parts if part != VAL]

    @property
    def what(self) -> str:
        """What has an answer."""
        return "pairs" if self.data.get("mates") == 2 else "reads"
