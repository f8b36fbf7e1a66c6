"""Numbers of classifiers -> plain sentences, the most important first."""

from collections.abc import Iterator, Sequence

import numpy as np

from millstream.reads.report.judge import PRECISION, VAL
from millstream.reads.report.results import GENUS, TRAIN, ModelResult, ReadResults
from millstream.report.intervals import about_seeds, verdict
from millstream.report.tables import branch, shown

MAX_NAMES = 5  # in a sentence
UNEVEN = 2  # times as many reads of one class as of another
OVERCONFIDENT = 0.05  # mean probability above accuracy


def findings(results: ReadResults) -> list[str]:
    """What a reader should know, also when it is not what was hoped for."""
    if not results.models:
        return ["No classifier has results that can be evaluated."]
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
        *_never_assigned(results, best),
        *_seeds(best, results.config.get("seeds")),
    ]


def _best(results: ReadResults, best: ModelResult) -> Iterator[str]:
    numbers = [
        f"macro F1 {found.macro_f1} and accuracy {found.accuracy} on {split}"
        for split in results.tests or [VAL]
        for found in [best.splits[split]]
    ]
    who = "The only classifier" if len(results.models) == 1 else "The best classifier (by macro F1 on validation)"
    yield f"{who}, {best.name}, has {'; '.join(numbers)}."
    if not results.tests:
        yield (
            "There is no test split: epochs were chosen on validation, so these numbers are optimistic. "
            "Set data.test=FILES."
        )


def _gap(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for gap in results.gaps:
        a, b = gap.macro_f1
        which = "all" if gap.num_classes == len(results.classes) else f"the {gap.num_classes} shared"
        values = f"({a:.3f} and {b:.3f} over {which} classes)"
        found = gap.difference
        if found.low <= 0 <= found.high:
            yield (
                f"Macro F1 of {best.name} is NOT shown to differ between {gap.first} and {gap.second} {values}: "
                f"{found:+.3f}."
            )
        else:
            how, size = ("lower", found) if found.value > 0 else ("higher", -found)
            yield f"Macro F1 of {best.name} is {how} on {gap.second} than on {gap.first} by {size} {values}."


def _others(results: ReadResults) -> Iterator[str]:
    """One sentence per test split."""
    for split in results.tests:
        found = [one for one in results.differences if one.split == split]
        if found:
            yield f"On {split}, {found[0].a} {'; it '.join(verdict(one, one.b) for one in found)} (macro F1)."


def _held_out(results: ReadResults) -> Iterator[str]:
    if results.data.get("held_out") == "reads":
        yield (
            "Validation reads were held out from the training genomes, so validation measures how well these genomes "
            "are memorised, and is optimistic. Hold out genomes (data.val=FILE) to select for new strains."
        )


def _chosen_by(results: ReadResults) -> Iterator[str]:
    used, all_reads = results.data.get("chosen_by"), branch(results.data.get("reads")).get(VAL)
    if isinstance(used, int) and isinstance(all_reads, int) and used < all_reads:
        yield (
            f"Epochs, thresholds and the best classifier were chosen on {used:,} of {all_reads:,} validation reads, "
            "evenly spaced (val_reads)."
        )


def _genus(results: ReadResults, best: ModelResult) -> Iterator[str]:
    if GENUS not in results.ranks:
        return
    genera = np.array([one.taxa.get(GENUS, -1) for one in results.classes])
    clauses: list[str] = []
    for split in results.tests or [VAL]:
        found = best.splits[split].confusion
        wrong = (found.labels >= 0) & (found.labels != found.found)
        true, assigned, counts = genera[found.labels[wrong]], genera[found.found[wrong]], found.counts[wrong]
        if counts.sum():
            inside = int(counts[(true == assigned) & (true >= 0)].sum()) / int(counts.sum())
            rank = next(one for one in best.splits[split].ranks if one.rank == GENUS)
            clauses.append(f"{rank.macro_f1} on {split}, where {inside:.0%} of its errors stay within the genus")
    if clauses:
        yield f"At genus rank, macro F1 of {best.name} is {'; '.join(clauses)}."


def _threshold(results: ReadResults, best: ModelResult) -> Iterator[str]:
    clauses = [
        f"{_share(found.coverage)} of {results.what} on {split} are classified, {_share(found.precision)} of them "
        f"correctly (recall {_share(found.recall)})"
        for split in results.tests
        for found in [best.splits[split]]
    ]
    if best.threshold is None:
        yield f"No threshold gives {best.name} a precision of {PRECISION} on validation."
    elif best.threshold == 0:
        yield (
            f"{best.name} has a precision of {PRECISION} or more on validation with all {results.what} classified, so "
            "no threshold is set; the table of thresholds shows the effect of one."
        )
    elif clauses:
        yield (
            f"At a threshold of {best.threshold:.3f}, where {best.name} has a precision of {PRECISION} or more on "
            f"validation: {'; '.join(clauses)}."
        )


def _unknown(results: ReadResults, best: ModelResult) -> Iterator[str]:
    clauses: list[str] = []
    for split, found in ((split, best.splits[split]) for split in results.splits):
        if found.num_unknown:
            above = f", {_share(found.unknown_called)} of which score above the threshold"
            above = "" if found.unknown_called is None else above
            clauses.append(f"{found.num_unknown:,} of {found.num_reads:,} on {split}{above}")
    if clauses:
        yield (
            f"{results.what.capitalize()} of no class in the mapping: {'; '.join(clauses)}. They are excluded from "
            "accuracy and F1; classifying one counts against precision and abundance."
        )


def _overconfident(results: ReadResults, best: ModelResult) -> Iterator[str]:
    clauses = [
        f"mean probability {found.confidence:.3f}, accuracy {found.accuracy.value:.3f} on {split}"
        for split, found in ((split, best.splits[split]) for split in results.splits)
        if found.confidence - found.accuracy.value > OVERCONFIDENT
    ]
    if clauses:
        yield f"{best.name} is overconfident: {'; '.join(clauses)}."


def _classes(results: ReadResults) -> Iterator[str]:
    counts = {one.name: one.reads.get(TRAIN, 0) for one in results.classes}
    empty = [name for name, count in counts.items() if not count]
    if empty:
        them = "it" if len(empty) == 1 else "them"
        yield f"There are no training reads of {_some(empty)}: no model can learn {them}."
    full = [count for count in counts.values() if count]
    if full and max(full) > UNEVEN * min(full):
        how = {
            "weights": "; the loss weights all classes equally",
            "sampling": "; training samples all classes equally often",
            "none": "; training weights all reads equally, so rare classes count little",
        }.get(str(results.config.get("balance")), "")
        yield f"Classes are imbalanced: {min(full):,} to {max(full):,} training reads{how}."


def _absent(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for split in results.splits:
        true = best.splits[split].confusion.tally(len(results.classes)).true
        absent = [one.name for one, count in zip(results.classes, true, strict=True) if not count]
        if absent:
            others = best.splits[split].num_classes
            yield f"{split} has no {results.what} of {_some(absent)}: its macro F1 is over the other {others}."


def _never_assigned(results: ReadResults, best: ModelResult) -> Iterator[str]:
    for split in results.tests or [VAL]:
        found = best.splits[split].confusion.tally(len(results.classes))
        never = (found.true > 0) & (found.assigned == 0)
        names = [one.name for one, is_so in zip(results.classes, never, strict=True) if is_so]
        if names:
            yield f"{best.name} assigns no {results.what} to {_some(names)} on {split}, where they occur."


def _seeds(best: ModelResult, requested: object) -> Iterator[str]:
    if isinstance(requested, int) and best.seeds < requested:
        yield f"{best.name} has finished {best.seeds} of {requested} seeds."
    deviations = ", ".join(f"{shown(found.macro_f1_sd)} on {split}" for split, found in best.splits.items())
    yield about_seeds(best.name, "macro F1", best.seeds, deviations)


def _some(names: Sequence[str]) -> str:
    """`class a`, `2 classes (a, b)`, with the first few names."""
    if len(names) == 1:
        return f"class {names[0]}"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{len(names)} classes ({', '.join(names[:MAX_NAMES])}{more})"


def _share(value: float | None) -> str:
    return shown(value, ".1%")
