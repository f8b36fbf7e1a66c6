"""Results -> sentences: which detectors are compared, and what a reader should know, including negative results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import cast

from millstream.report.measures import ALPHA, Difference, Labels, about_seeds, verdict
from millstream.report.tables import branch, shown
from millstream.traces.report.results import ModelResult

TRAINED, BASELINE = "trained", "baseline"
LENGTH, LOGPROB, TOKEN_STATS, PROBE = "length", "mean_logprob", "token_stats", "probe_"
NULLS = ("shuffled", "unwired")
TEST = "test"
FAR = 0.05  # the AUROC of length alone should be within this of 0.5
NARROW = 0.03  # half-width of an interval
EXCLUDED = ("ambiguous", "refused", "unlabelled", "error", "sample")
KEPT = 0.8  # of the answers, when the most suspicious are withheld


@dataclass(frozen=True)
class Contender:
    """A detector before it is compared."""

    name: str
    family: str
    auroc_val: float


@dataclass(frozen=True)
class Best:
    """The best of each family on validation; None if there is none."""

    trained: str | None
    baseline: str | None
    probe: str | None
    detector: str | None
    """Of trained detectors and baselines."""


def best_of(contenders: Iterable[Contender]) -> Best:
    ranked = sorted(contenders, key=lambda one: -one.auroc_val)

    def first(*families: str, prefix: str = "") -> str | None:
        fitting = (one.name for one in ranked if one.family in families and one.name.startswith(prefix))
        return next(fitting, None)

    return Best(first(TRAINED), first(BASELINE), first(BASELINE, prefix=PROBE), first(TRAINED, BASELINE))


def pairs_of(contenders: Mapping[str, Contender]) -> list[tuple[str, str, str]]:
    """Every comparison to make, once: each trained detector with baselines, the other detectors and its null models."""
    best = best_of(contenders.values())
    ranked = sorted(contenders.values(), key=lambda one: -one.auroc_val)
    trained = [one.name for one in ranked if one.family == TRAINED]
    probes = [] if best.probe is None else [best.probe]
    baselines = [*([] if best.baseline is None else [best.baseline]), *probes, LENGTH, LOGPROB, TOKEN_STATS]
    pairs = [
        *((name, other) for name in trained for other in baselines),
        *combinations(trained, 2),
        *((name, f"{name}_{null}") for name in trained for null in NULLS),
        *((probe, other) for probe in probes for other in (LENGTH, LOGPROB)),
    ]
    return [(a, b, TEST) for a, b in dict.fromkeys(pairs) if a != b and b in contenders]


def findings(
    models: Sequence[ModelResult],
    differences: Sequence[Difference],
    *,
    best: Best,
    data: Mapping[str, object],
    labels: Labels,
    resamples: int,
) -> list[str]:
    """What a reader should know, including negative results."""
    by_name = {model.name: model for model in models}
    least = 2 * len(differences) / (resamples + 1)  # no corrected p can be smaller with this many resamples
    sentences_on = _Comparisons(by_name, {(found.a, found.b): found for found in differences}, least_p=least)
    sentences = [*sentences_on.best_trained(best), *sentences_on.best_probe(best)]
    if best.detector is not None:
        kept = by_name[best.detector].accuracy_kept
        sentences.append(
            f"When the {1 - KEPT:.0%} of answers that are most suspicious to {best.detector} are withheld, a share of "
            f"{kept} of the others is right; of all answers {1 - labels.mean():.3f}."
        )
    for name in sorted((model.name for model in models if model.kind == TRAINED), key=lambda name: name != "gnn"):
        sentences += sentences_on.structure(name)
    if best.detector is not None:
        sentences += [*_length(by_name), *_size(by_name[best.detector], data, len(labels))]
    sentences += [*_excluded(data), *_seen(data, len(labels)), *_relabelled(data)]
    if best.trained is not None:
        trained = by_name[best.trained]
        sentences.append(about_seeds(trained.name, "AUROC", trained.seeds, shown(trained.auroc_sd)))
    if differences and least >= ALPHA:
        sentences.append(
            f"{resamples} resamples are too few for {len(differences)} comparisons: after Holm no p can be below "
            f"{min(least, 1):.2f}."
        )
    return sentences


class _Comparisons:
    """Sentences on the detectors and their differences."""

    def __init__(
        self, models: Mapping[str, ModelResult], differences: Mapping[tuple[str, str], Difference], *, least_p: float
    ) -> None:
        self._models = models
        self._differences = differences
        self._least_p = least_p

    def best_trained(self, best: Best) -> Iterator[str]:
        if best.trained is None:
            yield "No trained detector is finished in this run."
        else:
            yield self._sentence(f"The best trained detector (on validation), {best.trained},", best.trained)

    def best_probe(self, best: Best) -> Iterator[str]:
        if best.probe is None:
            return
        sentence = self._sentence(f"The best probe (on validation), {best.probe},", best.probe)
        if best.trained is not None and (best.trained, best.probe) in self._differences:
            sentence = f"{sentence[:-1]}; {best.trained} {self._verdict(best.trained, best.probe)}."
        yield sentence

    def structure(self, name: str) -> Iterator[str]:
        """Whether a graph model is better than its null models, which lack the structure of the graph."""
        nulls = [null for null in (f"{name}_{kind}" for kind in NULLS) if (name, null) in self._differences]
        if not nulls:
            return
        beaten = [self._differences[name, null].is_better for null in nulls]
        start = f"Whether attention structure matters to {name} is unclear"
        if all(beaten):
            start = f"Attention structure matters to {name}"
        elif not any(beaten):
            start = f"Attention structure is NOT shown to matter to {name}"
        yield f"{start}: it {', and it '.join(self._verdict(name, null) for null in nulls)}."

    def _sentence(self, start: str, name: str) -> str:
        others = [other for other in (LOGPROB, LENGTH) if (name, other) in self._differences]
        clauses = [f"it {self._verdict(name, other)}" for other in others]
        return "; ".join([f"{start} has AUROC {self._models[name].auroc}", *clauses]) + "."

    def _verdict(self, a: str, b: str) -> str:
        return verdict(self._differences[a, b], f"{b} ({self._models[b].auroc.value:.3f})", least_p=self._least_p)


def _length(models: Mapping[str, ModelResult]) -> Iterator[str]:
    found = models[LENGTH].auroc if LENGTH in models else None
    if found is not None and abs(found.value - 0.5) > FAR and not found.low <= 0.5 <= found.high:
        yield (
            f"Length is a confound: the number of answer tokens alone has AUROC {found}, so detectors may partly "
            "detect length."
        )


def _size(model: ModelResult, data: Mapping[str, object], num_test: int) -> Iterator[str]:
    half = (model.auroc.high - model.auroc.low) / 2
    if half > NARROW:
        what = "data set" if any(name.startswith("fold ") for name in branch(data.get("parts"))) else "test split"
        yield f"The {what} is small: {num_test} records determine the AUROC of {model.name} only to ±{half:.3f}."


def _excluded(data: Mapping[str, object]) -> Iterator[str]:
    verdicts = cast("Mapping[str, int]", data.get("verdicts") or {})
    excluded = {name: verdicts[name] for name in EXCLUDED if verdicts.get(name, 0) > 0}
    if excluded:
        kinds = ", ".join(f"{count} {name}" for name, count in excluded.items())
        yield f"{sum(excluded.values())} of {data.get('records')} records are excluded: {kinds}."


def _seen(data: Mapping[str, object], num_test: int) -> Iterator[str]:
    """On test questions that the run was fitted to."""
    seen = cast("Mapping[str, int]", data.get("seen") or {})
    train, val = seen.get("train", 0), seen.get("val", 0)
    if train + val and seen.get("left_out"):
        yield (
            f"{train + val} records are left out because the run was trained ({train}) or validated ({val}) on their "
            "questions."
        )
    elif train + val:
        yield (
            f"These are NOT results on new questions: the run was trained on the questions of {train} of the "
            f"{num_test} test records, and validated on those of {val}."
        )


def _relabelled(data: Mapping[str, object]) -> Iterator[str]:
    if rule := data.get("trained_label_rule"):
        yield (
            f"Detectors, thresholds and calibration were fitted to other labels (rule {rule}) than those of the test "
            f"records (rule {data.get('label_rule') or 'unknown'})."
        )
