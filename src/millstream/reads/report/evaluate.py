"""A run of classifiers -> the results of its report. Choices are made on validation; test splits are only measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from millstream.reads.report.predictions import PRECISION, VAL, Evaluator, Measured
from millstream.reads.report.predictions_file import Key, PredictionsFile
from millstream.reads.report.results import (
    GENUS,
    TRAIN,
    Gap,
    ModelResult,
    RankResult,
    ReadClass,
    ReadResults,
    SplitResult,
)
from millstream.report import damaged, read_files, unfinished
from millstream.report.measures import about_seeds, compare, deviation, mean, verdict
from millstream.report.tables import branch, shown
from millstream.training.folder import DATA, PREDICTIONS, JobKey, requested_models
from millstream.training.log import Metrics

MAX_NAMES = 5  # in a sentence
UNEVEN = 2  # classes are imbalanced if one has this many times the reads of another
OVERCONFIDENT = 0.05  # mean probability above accuracy
RESAMPLES = 1000
Seeds = Sequence[Mapping[str, Measured]]  # of one model: its splits, for every seed


def read_results(run: str | Path, *, resamples: int = RESAMPLES) -> ReadResults:
    """The results of the finished classifiers of a run, with intervals from `resamples` resamples of reads.

    >>> read_results("runs/reads").findings[0]
    """
    files = read_files(run, what="classifier")
    fits, missing = files.metrics.fits, files.metrics.missing
    classes, ranks = _classes(files.path / DATA, files.data)
    file = PredictionsFile(files.path / PREDICTIONS, num_classes=len(classes), ranks=list(ranks))
    finished = [key for key in file.keys if JobKey(*key) in fits]
    if not finished or VAL not in file.splits:
        raise unfinished(files.path, what="classifier")
    splits = [*(split for split in file.splits if split != VAL), VAL]
    evaluator = Evaluator(
        file,
        num_classes=len(classes),
        taxa={rank: [one.taxa.get(rank, -1) for one in classes] for rank in file.ranks},
        num_taxa={rank: len(ranks[rank]) for rank in file.ranks},
        resamples=resamples,
    )
    missing = {**_unfinished(files.config, finished), **missing}
    measured: dict[str, list[Mapping[str, Measured]]] = {}
    for name, seed in finished:
        if bad := evaluator.num_bad((name, seed), splits):
            missing[name] = f"seed {seed} gave {bad} probabilities that are not finite"
        else:
            measured.setdefault(name, []).append(evaluator.evaluate((name, seed), splits))
    measured = {name: seeds for name, seeds in measured.items() if name not in missing}
    models = [_model(name, seeds, files.metrics) for name, seeds in measured.items()]
    models.sort(key=lambda model: -np.nan_to_num(model.splits[VAL].macro_f1.value))
    drawn = {
        (name, split): mean([seed[split].macro_f1 for seed in measured[name]]) for name in measured for split in splits
    }
    found = ReadResults(
        **vars(files),
        classes=classes,
        ranks={rank: ranks[rank] for rank in file.ranks},
        splits=splits,
        models=models,
        gaps=_gaps(evaluator, models[0], splits, [seed for name, seed in finished if name == models[0].name])
        if models
        else [],
        differences=compare(_pairs(models, splits), drawn),
        findings=[],
        missing=missing,
    )
    return replace(found, findings=findings(found))


def _classes(file: Path, data: Mapping[str, object]) -> tuple[list[ReadClass], dict[str, list[str]]]:
    """The classes of a data card, and the names of the taxa of its ranks."""
    try:
        ranks = {
            rank: [str(taxon["name"]) for taxon in cast("list[dict[str, object]]", taxa)]
            for rank, taxa in branch(data["ranks"]).items()
        }
        classes = [
            ReadClass(
                class_id=int(cast(int, row["class_id"])),
                name=str(row["name"]),
                tax_id=int(cast(int, row.get("tax_id") or 0)),
                taxa={rank: int(cast(int, row[rank])) for rank in ranks if rank in row},
                reads={split: int(cast(int, count)) for split, count in branch(row["reads"]).items()},
            )
            for row in cast("list[dict[str, object]]", data["classes"])
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from None
    if not classes:
        raise damaged(file, "no classes")
    return classes, ranks


def _unfinished(config: Mapping[str, object], finished: Sequence[Key]) -> dict[str, str]:
    """Requested models that have no predictions yet."""
    done = {name for name, _ in finished}
    left = [name for name in requested_models(config) if name not in done]
    return dict.fromkeys(left, "not finished; run the same command to resume")


def _model(name: str, seeds: Seeds, metrics: Metrics) -> ModelResult:
    fits = [fit for job, fit in metrics.fits.items() if job.model == name]
    epochs = [line for line in metrics.history if line.get("model") == name]
    rates, waiting, memory = ([*_numbers(epochs, key)] for key in ("records_per_s", "waiting", "memory"))
    return ModelResult(
        name=name,
        title=fits[0].title,
        seeds=len(seeds),
        parameters=fits[0].parameters,
        threshold=seeds[0][VAL].targets[PRECISION].threshold,
        fit_s=_mean([fit.fit_s for fit in fits]),
        train_reads_per_s=float(np.median(rates)) if rates else None,
        waiting=_mean(waiting) if waiting else None,
        score_reads_per_s=_mean([fit.num_scored / max(fit.score_s, 1e-9) for fit in fits]),
        memory=int(max(memory)) if memory else None,
        chosen=fits[0].chosen,
        splits={split: _split([seed[split] for seed in seeds]) for split in seeds[0]},
    )


def _split(seeds: Sequence[Measured]) -> SplitResult:
    first = seeds[0]
    at = [found for seed in seeds if (found := seed.targets[PRECISION].at) is not None]
    return SplitResult(
        num_reads=first.num_reads,
        num_unknown=first.num_unknown,
        unclassified=_mean([seed.num_unclassified / max(seed.num_reads, 1) for seed in seeds]),
        num_classes=first.num_classes,
        accuracy=mean([seed.accuracy for seed in seeds]).interval,
        macro_f1=mean([seed.macro_f1 for seed in seeds]).interval,
        macro_f1_sd=deviation([seed.macro_f1.value for seed in seeds]),
        ranks=[
            RankResult(
                rank,
                measured.num_taxa,
                accuracy=mean([seed.ranks[rank].accuracy for seed in seeds]).interval,
                macro_f1=mean([seed.ranks[rank].macro_f1 for seed in seeds]).interval,
            )
            for rank, measured in first.ranks.items()
        ],
        coverage=_mean([one.coverage for one in at]) if at else None,
        precision=_mean([one.precision for one in at]) if at else None,
        recall=_mean([one.recall for one in at]) if at else None,
        unknown_called=_mean([one.unknown for one in at]) if at and first.num_unknown else None,
        ece=_mean([seed.ece for seed in seeds]),
        confidence=_mean([seed.confidence for seed in seeds]),
        abundance_l1=_mean([seed.abundance_l1 for seed in seeds]),
        targets=list(first.targets.values()),
        thresholds=first.thresholds,
        calibration=first.calibration,
        confusion=first.confusion,
    )


def _gaps(evaluator: Evaluator, best: ModelResult, splits: Sequence[str], seeds: Sequence[int]) -> list[Gap]:
    """Between the first test split and each other one, or validation and the only one. Splits share no reads."""
    tests = [split for split in splits if split != VAL]
    pairs = [(VAL, tests[0])] if len(tests) == 1 else [(tests[0], other) for other in tests[1:]]
    gaps: list[Gap] = []
    for pair in pairs:
        first, second = (evaluator.has(split) for split in pair)
        both = first & second
        a, b = (mean([evaluator.macro_f1_over(both, (best.name, seed), split) for seed in seeds]) for split in pair)
        if both.any():
            gaps.append(Gap(*pair, int(both.sum()), (a.value, b.value), (a - b).interval))
    return gaps


def _pairs(models: Sequence[ModelResult], splits: Sequence[str]) -> list[tuple[str, str, str]]:
    """The best model on validation against every other, on each test split."""
    names = [model.name for model in models]
    return [(names[0], other, split) for split in splits if split != VAL for other in names[1:]]


def _numbers(lines: Sequence[Mapping[str, object]], key: str) -> list[float]:
    return [float(value) for line in lines if isinstance(value := line.get(key), int | float)]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def findings(results: ReadResults) -> list[str]:
    """What a reader should know, including negative results."""
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
        *_unclassified(results),
        *_overconfident(results, best),
        *_class_findings(results),
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
        wrong = (found.labels >= 0) & (found.labels != found.found) & (found.found >= 0)
        true, assigned, counts = genera[found.labels[wrong]], genera[found.found[wrong]], found.counts[wrong]
        if counts.sum():
            inside = int(counts[(true == assigned) & (true >= 0)].sum()) / int(counts.sum())
            rank = next(one for one in best.splits[split].ranks if one.rank == GENUS)
            clauses.append(
                f"{rank.macro_f1} on {split}, where {inside:.0%} of its wrong assignments stay within the genus"
            )
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
            f"{best.name} has a precision of {PRECISION} or more on validation without a threshold, so none is set; "
            "the table of thresholds shows the effect of one."
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
            "accuracy, F1 and the true abundances; classifying one counts against precision and abundance."
        )


def _unclassified(results: ReadResults) -> Iterator[str]:
    """One sentence per model that leaves reads unclassified."""
    for model in results.models:
        clauses = [
            f"{_share(found.unclassified)} of {results.what} on {split}"
            for split, found in ((split, model.splits[split]) for split in results.splits)
            if found.unclassified
        ]
        if clauses:
            yield (
                f"{model.name} leaves {', '.join(clauses)} unclassified at any threshold, because they have no "
                "evidence for a class. They count as missed in accuracy, recall and F1."
            )


def _overconfident(results: ReadResults, best: ModelResult) -> Iterator[str]:
    clauses = [
        f"mean probability {found.confidence:.3f}, accuracy {found.accuracy.value:.3f} on {split}"
        for split, found in ((split, best.splits[split]) for split in results.splits)
        if found.confidence - found.accuracy.value > OVERCONFIDENT
    ]
    if clauses:
        yield f"{best.name} is overconfident: {'; '.join(clauses)}."


def _class_findings(results: ReadResults) -> Iterator[str]:
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
