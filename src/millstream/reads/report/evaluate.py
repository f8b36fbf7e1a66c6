"""A run of classifiers -> everything its report shows. Choices are made on validation; test splits provide numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from millstream.reads.report.answers import AnswersFile, Key
from millstream.reads.report.findings import findings
from millstream.reads.report.judge import PRECISION, VAL, Judge, Judged
from millstream.reads.report.results import Gap, ModelResult, RankResult, ReadClass, ReadResults, SplitResult
from millstream.report.intervals import compare, mean
from millstream.report.run import check_run, damaged, read_mapping, unfinished
from millstream.report.tables import branch
from millstream.training.folder import CONFIG, DATA, ENVIRONMENT, METRICS, PREDICTIONS
from millstream.training.log import Metrics, read_metrics

RESAMPLES = 1000
Seeds = Sequence[Mapping[str, Judged]]  # of one model: its splits, for every seed


def read_results(run: str | Path, *, resamples: int = RESAMPLES) -> ReadResults:
    """What the finished classifiers of a run found, with intervals from `resamples` draws of reads.

    >>> read_results("runs/reads").findings[0]
    """
    folder = Path(run)
    check_run(folder, what="classifier")
    metrics, data, config = read_metrics(folder / METRICS), read_mapping(folder / DATA), read_mapping(folder / CONFIG)
    classes, ranks = _classes(folder / DATA, data)
    file = AnswersFile(folder / PREDICTIONS, num_classes=len(classes), ranks=list(ranks))
    finished = [key for key in file.keys if key in metrics.fits]
    if not finished or VAL not in file.splits:
        raise unfinished(folder, what="classifier")
    splits = [*(split for split in file.splits if split != VAL), VAL]
    judge = Judge(
        file,
        num_classes=len(classes),
        taxa={rank: [one.taxa.get(rank, -1) for one in classes] for rank in file.ranks},
        num_taxa={rank: len(ranks[rank]) for rank in file.ranks},
        resamples=resamples,
    )
    missing = {**_unfinished(config, finished), **metrics.missing}
    judged: dict[str, list[Mapping[str, Judged]]] = {}
    for name, seed in finished:
        if bad := judge.num_bad((name, seed), splits):
            missing[name] = f"seed {seed} gave {bad} probabilities that are not finite"
        else:
            judged.setdefault(name, []).append(judge.judge((name, seed), splits))
    judged = {name: seeds for name, seeds in judged.items() if name not in missing}
    models = [_model(name, seeds, metrics) for name, seeds in judged.items()]
    models.sort(key=lambda model: -np.nan_to_num(model.splits[VAL].macro_f1.value))
    drawn = {
        (name, split): mean([seed[split].macro_f1 for seed in judged[name]]) for name in judged for split in splits
    }
    found = ReadResults(
        run=folder,
        config=config,
        environment=read_mapping(folder / ENVIRONMENT),
        data=data,
        classes=classes,
        ranks={rank: ranks[rank] for rank in file.ranks},
        splits=splits,
        models=models,
        gaps=_gaps(judge, models[0], splits, [seed for name, seed in finished if name == models[0].name])
        if models
        else [],
        differences=compare(_pairs(models, splits), drawn),
        history=metrics.history,
        memory=metrics.memory,
        budget=metrics.budget,
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
    """Requested models that have no answers yet."""
    requested = [name.strip() for name in str(config.get("model") or "").split(",") if name.strip()]
    done = {name for name, _ in finished}
    return {name: "not finished; run the same command to resume" for name in requested if name not in done}


def _model(name: str, seeds: Seeds, metrics: Metrics) -> ModelResult:
    fits = [fit for (model, _), fit in metrics.fits.items() if model == name]
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


def _split(seeds: Sequence[Judged]) -> SplitResult:
    first = seeds[0]
    values = [seed.macro_f1.value for seed in seeds]
    at = [found for seed in seeds if (found := seed.targets[PRECISION].at) is not None]
    return SplitResult(
        num_reads=first.num_reads,
        num_unknown=first.num_unknown,
        num_classes=first.num_classes,
        accuracy=mean([seed.accuracy for seed in seeds]).interval,
        macro_f1=mean([seed.macro_f1 for seed in seeds]).interval,
        macro_f1_sd=float(np.std(values, ddof=1)) if len(values) > 1 else None,
        ranks=[
            RankResult(
                rank,
                judged.num_taxa,
                accuracy=mean([seed.ranks[rank].accuracy for seed in seeds]).interval,
                macro_f1=mean([seed.ranks[rank].macro_f1 for seed in seeds]).interval,
            )
            for rank, judged in first.ranks.items()
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


def _gaps(judge: Judge, best: ModelResult, splits: Sequence[str], seeds: Sequence[int]) -> list[Gap]:
    """From the first test split to each other one, or from validation to the only one. Splits share no reads."""
    tests = [split for split in splits if split != VAL]
    pairs = [(VAL, tests[0])] if len(tests) == 1 else [(tests[0], other) for other in tests[1:]]
    gaps: list[Gap] = []
    for pair in pairs:
        first, second = (judge.has(split) for split in pair)
        both = first & second
        a, b = (mean([judge.macro_f1_over(both, (best.name, seed), split) for seed in seeds]) for split in pair)
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
