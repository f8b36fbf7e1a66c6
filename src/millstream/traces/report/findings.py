"""Numbers -> plain sentences, the one that matters most first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from millstream.report.compare import ALPHA, LENGTH, LOGPROB, NULLS, TRAINED, Best
from millstream.report.results import Difference, Interval, ModelResult

FAR = 0.05  # from 0.5: what length alone may not tell
NARROW = 0.03  # half an interval
LEFT_OUT = ("ambiguous", "refused", "unlabelled", "error")
MANY_SEEDS = 5


def findings(
    models: Sequence[ModelResult],
    differences: Sequence[Difference],
    *,
    best: Best,
    data: Mapping[str, object],
    num_test: int,
    resamples: int,
) -> list[str]:
    """What a reader should know, also when it is not what was hoped for."""
    named = {model.name: model for model in models}
    least = 2 * len(differences) / (resamples + 1)  # a corrected p: there are no more draws than that
    tell = _Teller(named, {(found.a, found.b): found for found in differences}, least=least)
    sentences = [*tell.best_trained(best), *tell.best_probe(best)]
    for name in sorted((name for name in named if named[name].kind == TRAINED), key=lambda name: name != "gnn"):
        sentences += tell.structure(name)
    if best.detector is not None:
        sentences += [*_length(named), *_size(named[best.detector], num_test)]
    sentences += [*_left_out(data), *_seeds(named, best)]
    if differences and least >= ALPHA:
        sentences.append(
            f"{resamples} resamples are too few for {len(differences)} comparisons: after Holm no p could be below "
            f"{min(least, 1):.2f}."
        )
    return sentences


class _Teller:
    """Knows the detectors and their differences."""

    def __init__(
        self, models: Mapping[str, ModelResult], differences: Mapping[tuple[str, str], Difference], *, least: float
    ) -> None:
        self._models = models
        self._differences = differences
        self._least = least

    def best_trained(self, best: Best) -> Iterator[str]:
        if best.trained is None:
            yield "No trained detector is finished in this run."
        else:
            yield self._sentence(f"The best trained detector (on validation), {best.trained},", best.trained)

    def best_probe(self, best: Best) -> Iterator[str]:
        if best.probe is None:
            return
        told = self._sentence(f"The best probe (on validation), {best.probe},", best.probe)
        if best.trained is not None and (best.trained, best.probe) in self._differences:
            told = f"{told[:-1]}; {best.trained} {self._clause(best.trained, best.probe)}."
        yield told

    def structure(self, name: str) -> Iterator[str]:
        """Whether a model of graphs is better than the same one without the structure of its graphs."""
        nulls = [null for null in (f"{name}_{kind}" for kind in NULLS) if (name, null) in self._differences]
        if not nulls:
            return
        beaten = [self._beats(name, null) for null in nulls]
        verdict = f"Attention structure matters to {name}" if all(beaten) else f"It is open what matters to {name}"
        if not any(beaten):
            verdict = f"That attention structure matters to {name} is NOT shown"
        yield f"{verdict}: it {', and it '.join(self._clause(name, null) for null in nulls)}."

    def _sentence(self, start: str, name: str) -> str:
        others = [other for other in (LOGPROB, LENGTH) if (name, other) in self._differences]
        clauses = [f"it {self._clause(name, other)}" for other in others]
        return "; ".join([f"{start} has AUROC {show(self._models[name].auroc)}", *clauses]) + "."

    def _beats(self, a: str, b: str) -> bool:
        found = self._differences[a, b]
        return found.differs and found.auroc.value > 0

    def _clause(self, a: str, b: str) -> str:
        found, other = self._differences[a, b], f"{b} ({self._models[b].auroc.value:.3f})"
        sure = f"p {'<=' if found.p_holm <= self._least else '='} {found.p_holm:.3f} after Holm"
        if self._beats(a, b):
            return f"beats {other} by {show(found.auroc)}, {sure}"
        if found.differs:
            flipped = Interval(-found.auroc.value, -found.auroc.high, -found.auroc.low)
            return f"is WORSE than {other} by {show(flipped)}, {sure}"
        return f"does NOT beat {other}: {show(found.auroc, sign='+')}, {sure}"


def show(interval: Interval, *, sign: str = "") -> str:
    """`0.931 [0.902, 0.953]`"""
    return f"{interval.value:{sign}.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _length(models: Mapping[str, ModelResult]) -> Iterator[str]:
    found = models[LENGTH].auroc if LENGTH in models else None
    if found is not None and abs(found.value - 0.5) > FAR and not found.low <= 0.5 <= found.high:
        yield (
            f"Length is a confound: the number of answer tokens alone has AUROC {show(found)}, so a part of what any "
            "detector tells may be length."
        )


def _size(model: ModelResult, num_test: int) -> Iterator[str]:
    half = (model.auroc.high - model.auroc.low) / 2
    if half > NARROW:
        yield f"The test part is small: with {num_test} records the AUROC of {model.name} is known to ±{half:.3f} only."


def _left_out(data: Mapping[str, object]) -> Iterator[str]:
    verdicts = cast("Mapping[str, int]", data.get("verdicts") or {})
    left = {name: verdicts[name] for name in LEFT_OUT if verdicts.get(name, 0) > 0}
    if left:
        kinds = ", ".join(f"{count} {name}" for name, count in left.items())
        yield f"{sum(left.values())} of {data.get('records')} records are left out: {kinds}."


def _seeds(models: Mapping[str, ModelResult], best: Best) -> Iterator[str]:
    if best.trained is None:
        return
    model = models[best.trained]
    few = "" if model.seeds >= MANY_SEEDS else f"; with {MANY_SEEDS} or more it would be known better"
    if model.auroc_sd is None:
        yield f"{model.name} was trained once: how much of its AUROC is the luck of a seed is not known."
    else:
        yield (
            f"Numbers of {model.name} are means over {model.seeds} seeds; its AUROC varies between them with a "
            f"standard deviation of {model.auroc_sd:.3f}{few}."
        )
