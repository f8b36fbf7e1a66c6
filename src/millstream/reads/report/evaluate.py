"""A run of classifiers -> everything its report shows. Choices are made on validation; test parts only give numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from millstream.report.bootstrap import Resampled, holm, p_value
from millstream.report.cells import branch
from millstream.report.compare import ALPHA
from millstream.report.metrics_file import Metrics, read_metrics
from millstream.report.reads.answers import AnswersFile, Key
from millstream.report.reads.draws import mean
from millstream.report.reads.findings import findings
from millstream.report.reads.judge import Judge, Judged
from millstream.report.reads.results import (
    PRECISION,
    VAL,
    Difference,
    Gap,
    ModelResult,
    PartResult,
    RankResult,
    ReadClass,
    ReadResults,
)
from millstream.report.run_files import check_run, damaged, read_mapping, unfinished
from millstream.train.folder import CONFIG, DATA, ENVIRONMENT, METRICS, PREDICTIONS

RESAMPLES = 1000
Seeds = Sequence[Mapping[str, Judged]]  # of one model: its parts, for every seed


def read_results(run: str | Path, *, resamples: int = RESAMPLES) -> ReadResults:
    """What the finished classifiers of a run found, with intervals from so many draws of the reads of each part.

    >>> read_results("runs/reads").findings[0]
    """
    folder = Path(run)
    check_run(folder, what="classifier")
    metrics, data, config = read_metrics(folder / METRICS), read_mapping(folder / DATA), read_mapping(folder / CONFIG)
    classes, ranks = _classes(folder / DATA, data)
    file = AnswersFile(folder / PREDICTIONS, num_classes=len(classes), ranks=list(ranks))
    finished = [key for key in file.keys if key in metrics.fits]
    if not finished or VAL not in file.parts:
        raise unfinished(folder, what="classifier")
    parts = [*(part for part in file.parts if part != VAL), VAL]
    judge = Judge(file, classes, num_taxa={rank: len(ranks[rank]) for rank in file.ranks}, resamples=resamples)
    missing = {**_unfinished(config, finished), **metrics.missing}
    judged: dict[str, list[Mapping[str, Judged]]] = {}
    for name, seed in finished:
        if bad := judge.num_bad((name, seed), parts):
            missing[name] = f"seed {seed} gave {bad} probabilities that are not finite"
        else:
            judged.setdefault(name, []).append(judge.judge((name, seed), parts))
    judged = {name: seeds for name, seeds in judged.items() if name not in missing}
    models = [_model(name, seeds, metrics) for name, seeds in judged.items()]
    models.sort(key=lambda model: -np.nan_to_num(model.parts[VAL].macro_f1.value))
    drawn = {(name, part): mean([seed[part].macro_f1 for seed in judged[name]]) for name in judged for part in parts}
    found = ReadResults(
        run=folder,
        config=config,
        environment=read_mapping(folder / ENVIRONMENT),
        data=data,
        classes=classes,
        ranks={rank: ranks[rank] for rank in file.ranks},
        parts=parts,
        models=models,
        gaps=_gaps(judge, models[0], parts, [seed for name, seed in finished if name == models[0].name])
        if models
        else [],
        differences=_differences(models, parts, drawn),
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
                reads={part: int(cast(int, count)) for part, count in branch(row["reads"]).items()},
            )
            for row in cast("list[dict[str, object]]", data["classes"])
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from None
    if not classes:
        raise damaged(file, "no classes")
    return classes, ranks


def _unfinished(config: Mapping[str, object], finished: Sequence[Key]) -> dict[str, str]:
    """Models that were asked for and have no answers yet."""
    asked = [name.strip() for name in str(config.get("model") or "").split(",") if name.strip()]
    done = {name for name, _ in finished}
    return {name: "not finished; the same command goes on with it" for name in asked if name not in done}


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
        parts={part: _part([seed[part] for seed in seeds]) for part in seeds[0]},
    )


def _part(seeds: Sequence[Judged]) -> PartResult:
    first = seeds[0]
    values = [seed.macro_f1.value for seed in seeds]
    at = [found for seed in seeds if (found := seed.targets[PRECISION].at) is not None]
    return PartResult(
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
        called=first.called,
        calibration=first.calibration,
        confusion=first.confusion,
    )


def _gaps(judge: Judge, best: ModelResult, parts: Sequence[str], seeds: Sequence[int]) -> list[Gap]:
    """From the first test part to each other one; from validation to it, if it is alone. Parts share no reads."""
    tests = [part for part in parts if part != VAL]
    pairs = [(VAL, tests[0])] if len(tests) == 1 else [(tests[0], other) for other in tests[1:]]
    gaps: list[Gap] = []
    for pair in pairs:
        first, second = (judge.has(part) for part in pair)
        both = first & second
        a, b = (mean([judge.macro_f1_over(both, (best.name, seed), part) for seed in seeds]) for part in pair)
        if both.any():
            gaps.append(Gap(*pair, int(both.sum()), (a.value, b.value), (a - b).interval))
    return gaps


def _differences(
    models: Sequence[ModelResult], parts: Sequence[str], drawn: Mapping[tuple[str, str], Resampled]
) -> list[Difference]:
    """The best model on validation against every other, on each test part, corrected for their number (Holm)."""
    names = [model.name for model in models]
    asked = [(names[0], other, part) for part in parts if part != VAL for other in names[1:]]
    found = [drawn[a, part] - drawn[b, part] for a, b, part in asked]
    p_values = [p_value(difference) for difference in found]
    rows = zip(asked, found, p_values, holm(p_values), strict=True)
    return [Difference(*names, one.interval, p, p_holm, p_holm < ALPHA) for names, one, p, p_holm in rows]


def _numbers(lines: Sequence[Mapping[str, object]], key: str) -> list[float]:
    return [float(value) for line in lines if isinstance(value := line.get(key), int | float)]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
