"""Numbers of classifiers -> plain sentences, the one that matters most first."""

from collections.abc import Iterator, Sequence

import numpy as np

from millstream.report.cells import branch
from millstream.report.findings import MANY_SEEDS, show
from millstream.report.reads.results import (
    GENUS,
    PRECISION,
    TRAIN,
    VAL,
    Difference,
    ModelResult,
    PartResult,
    ReadResults,
)
from millstream.report.results import Interval

SHOWN = 5  # names in a sentence
UNEVEN = 2  # times as many reads of one class as of another
OVER = 0.05  # that probabilities may be above accuracy


def findings(results: ReadResults) -> list[str]:
    """What a reader should know, also when it is not what was hoped for."""
    if not results.models:
        return ["No classifier has answers that can be judged."]
    best = results.models[0]
    return [
        *_best(results, best),
        *_gap(results, best),
        *_others(results),
        *_held_out(results),
        *_chosen_by(results),
        *_genus(results, best),
        *_threshold(results, best),
        *_unknown(results, best),
        *_overconfident(results, best),
        *_classes(results),
        *_absent(results, best),
        *_never_called(results, best),
        *_seeds(best, results.config.get("seeds")),
    ]


def _best(results: ReadResults, best: ModelResult) -> Iterator[str]:
    parts = results.tests or [VAL]
    numbers = [
        f"on {part} macro F1 {show(best.parts[part].macro_f1)} and accuracy {show(best.parts[part].accuracy)}"
        for part in parts
    ]
    who = "The only classifier" if len(results.models) == 1 else "The best classifier (by macro F1 on validation)"
    yield f"{who}, {best.name}, has {'; '.join(numbers)}."
    if not results.tests:
        yield "There is no test part: epochs were chosen on validation, so its numbers flatter. Give data.test=FILES."


def _gap(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for gap in results.gaps:
        a, b = gap.macro_f1
        which = "all classes" if gap.num_classes == len(results.classes) else f"the {gap.num_classes} classes of both"
        between = f"({a:.3f} and {b:.3f} over {which})"
        found = gap.difference
        if found.low <= 0 <= found.high:
            where = f"on {gap.first} and on {gap.second} {between}"
            yield f"Macro F1 of {best.name} is NOT shown to differ {where}: {_signed(found)}."
        else:
            size = found if found.value > 0 else Interval(-found.value, -found.high, -found.low)
            how = "lower" if found.value > 0 else "higher"
            yield f"Macro F1 of {best.name} is {how} on {gap.second} than on {gap.first} by {show(size)} {between}."


def _others(results: ReadResults) -> Iterator[str]:
    """One sentence for each test part."""
    for part in results.tests:
        found = [one for one in results.differences if one.part == part]
        if found:
            yield f"On {part}, {found[0].a} {'; it '.join(_clause(one) for one in found)} (macro F1, p after Holm)."


def _clause(found: Difference) -> str:
    if found.differs and found.macro_f1.value > 0:
        return f"beats {found.b} by {show(found.macro_f1)}, p = {found.p_holm:.3f}"
    if found.differs:
        flipped = Interval(-found.macro_f1.value, -found.macro_f1.high, -found.macro_f1.low)
        return f"is WORSE than {found.b} by {show(flipped)}, p = {found.p_holm:.3f}"
    return f"does NOT beat {found.b}: {_signed(found.macro_f1)}, p = {found.p_holm:.3f}"


def _held_out(results: ReadResults) -> Iterator[str]:
    if results.data.get("held_out") == "reads":
        yield (
            "Validation reads were held out from the genomes that were trained on: validation measures memory of these "
            "genomes, and flatters. Hold out genomes (data.val=FILE) to choose by what counts for new strains."
        )


def _chosen_by(results: ReadResults) -> Iterator[str]:
    used, all_reads = results.data.get("chosen_by"), branch(results.data.get("reads")).get(VAL)
    if isinstance(used, int) and isinstance(all_reads, int) and used < all_reads:
        yield (
            f"Epochs, thresholds and the best classifier were chosen by {used:,} of {all_reads:,} validation reads, "
            "evenly spread (val_reads)."
        )


def _genus(results: ReadResults, best: ModelResult) -> Iterator[str]:
    if GENUS not in results.ranks:
        return
    genera = np.array([one.taxa.get(GENUS, -1) for one in results.classes])
    told: list[str] = []
    for part in results.tests or [VAL]:
        found = best.parts[part].confusion
        wrong = (found.labels >= 0) & (found.labels != found.found)
        true, said, counts = genera[found.labels[wrong]], genera[found.found[wrong]], found.counts[wrong]
        if counts.sum():
            inside = int(counts[(true == said) & (true >= 0)].sum()) / int(counts.sum())
            rank = next(one for one in best.parts[part].ranks if one.rank == GENUS)
            told.append(f"on {part} {show(rank.macro_f1)}, and {inside:.0%} of its wrong calls are of the right genus")
    if told:
        yield f"At the rank of genus the macro F1 of {best.name} is {'; '.join(told)}."


def _threshold(results: ReadResults, best: ModelResult) -> Iterator[str]:
    if best.threshold is None:
        yield f"No threshold gives {best.name} a precision of {PRECISION} on validation."
        return
    told = [
        f"on {part} it calls {_share(found.coverage)} of all {results.what}, {_share(found.precision)} of them rightly "
        f"(recall {_share(found.recall)})"
        for part in results.tests
        for found in [best.parts[part]]
    ]
    if best.threshold == 0:
        yield (
            f"{best.name} has a precision of {PRECISION} or more on validation with every call kept, so no threshold "
            "is set; the table of thresholds shows what one would do."
        )
    elif told:
        yield (
            f"Calling only from a probability of {best.threshold:.3f} on, where {best.name} has a precision of "
            f"{PRECISION} or more on validation: {'; '.join(told)}."
        )


def _unknown(results: ReadResults, best: ModelResult) -> Iterator[str]:
    told: list[str] = []
    for part, found in ((part, best.parts[part]) for part in results.parts):
        if found.num_unknown:
            called = f", {_share(found.unknown_called)} of which are called above the threshold"
            called = "" if found.unknown_called is None else called
            told.append(f"{found.num_unknown:,} of {found.num_reads:,} on {part}{called}")
    if told:
        yield (
            f"{results.what.capitalize()} of no class of the mapping: {'; '.join(told)}. They are left out of accuracy "
            f"and F1; every call of one is an error of precision and of abundance."
        )


def _overconfident(results: ReadResults, best: ModelResult) -> Iterator[str]:
    over = [part for part in results.parts if _excess(best.parts[part]) > OVER]
    if over:
        told = ", ".join(
            f"on {part} their mean is {found.confidence:.3f} and accuracy {found.accuracy.value:.3f}"
            for part, found in ((part, best.parts[part]) for part in over)
        )
        yield f"Probabilities of {best.name} are too high: {told}."


def _excess(found: PartResult) -> float:
    return found.confidence - found.accuracy.value


def _classes(results: ReadResults) -> Iterator[str]:
    counts = {one.name: one.reads.get(TRAIN, 0) for one in results.classes}
    empty = [name for name, count in counts.items() if not count]
    if empty:
        yield f"No training reads of {_some(empty)}: no model can learn {'it' if len(empty) == 1 else 'them'}."
    full = [count for count in counts.values() if count]
    if full and max(full) > UNEVEN * min(full):
        how = {
            "weights": "every class counts the same in training, by weights",
            "sampling": "in training every class is drawn as often as the others",
            "none": "in training every read counts the same, so that rare classes count little",
        }.get(str(results.config.get("balance")), "")
        yield f"Classes are uneven: {min(full):,} to {max(full):,} training reads{f'; {how}' if how else ''}."


def _absent(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for part in results.parts:
        there = best.parts[part].confusion.tally(len(results.classes)).there
        absent = [one.name for one, count in zip(results.classes, there, strict=True) if not count]
        if absent:
            others = best.parts[part].num_classes
            yield f"{part} has no {results.what} of {_some(absent)}: its macro F1 is over the other {others}."


def _never_called(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for part in results.tests or [VAL]:
        found = best.parts[part].confusion.tally(len(results.classes))
        never = (found.there > 0) & (found.said == 0)
        names = [one.name for one, is_so in zip(results.classes, never, strict=True) if is_so]
        if names:
            yield f"{best.name} never calls {_some(names)} on {part}, which has such {results.what}."


def _seeds(best: ModelResult, asked: object) -> Iterator[str]:
    if isinstance(asked, int) and best.seeds < asked:
        yield f"{best.name} has finished {best.seeds} of {asked} seeds."
    if best.seeds == 1:
        yield f"{best.name} was trained once: how much of its macro F1 is the luck of a seed is not known."
    else:
        spread = ", ".join(f"{found.macro_f1_sd:.3f} on {part}" for part, found in best.parts.items())
        few = "" if best.seeds >= MANY_SEEDS else f"; with {MANY_SEEDS} or more it would be known better"
        yield (
            f"Numbers of {best.name} are means over {best.seeds} seeds; between them its macro F1 has a standard "
            f"deviation of {spread}{few}."
        )


def _some(names: Sequence[str]) -> str:
    """`the class a`, `2 classes: a, b`, with the first few names."""
    if len(names) == 1:
        return f"the class {names[0]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} classes ({', '.join(names[:SHOWN])}{more})"


def _signed(interval: Interval) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _share(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:.1%}"
