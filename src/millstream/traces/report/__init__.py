"""The report on detectors: its columns and the sections of its page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from millstream.report import Report
from millstream.report.drawing import Drawing
from millstream.report.measures import Interval
from millstream.report.page import (
    CardsBlock,
    FoldBlock,
    KeyBlock,
    Scale,
    Section,
    TableBlock,
    TextBlock,
    WordsBlock,
    data_section,
    difference_section,
    figure_section,
)
from millstream.report.tables import Column, Comparison, Table, branch, chosen_text, counted, grouped, shown, titled
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.figures import draw, main_models
from millstream.traces.report.results import Mistake, ModelResult, Results
from millstream.traces.report.tokens import token_lines, token_section, token_tables
from millstream.traces.report.transfer import (
    Matrix,
    draw_transfer,
    matrix_text,
    transfer_of,
    transfer_section,
    transfer_tables,
)

TRAIN_SETTINGS = "data=STORE"
COMPARISON = Comparison("detector", "auroc", "AUROC")

_ABOUT: tuple[Column[ModelResult], ...] = (
    Column("name", "detector", "", lambda m: m.name, ""),
    Column("kind", "kind", "", lambda m: m.kind, ""),
    Column("title", "title", "", lambda m: m.title, ""),
)
_MEASURES: tuple[Column[ModelResult], ...] = grouped(
    {
        "ranking": (
            Column(
                "auroc", "AUROC", "probability that a wrong answer scores higher than a right one", lambda m: m.auroc
            ),
            Column("auroc_sd", "± sd", "standard deviation of AUROC between seeds", lambda m: m.auroc_sd),
            Column("seeds", "seeds", "number of seeds; the numbers are means over them", lambda m: m.seeds, "d"),
            Column("auroc_val", "val. AUROC", "AUROC on the validation split", lambda m: m.auroc_val),
            Column("aupr", "AUPR", "area under the precision-recall curve of wrong answers", lambda m: m.aupr),
            Column("aupr_right", "AUPR, right", "the same of right answers", lambda m: m.aupr_right),
            Column(
                "fpr_at_95_tpr", "FPR@95", "share of right answers flagged at 95 % recall", lambda m: m.fpr_at_95_tpr
            ),
        ),
        "at the validation threshold": (
            Column("f1", "F1", "of wrong answers, at the threshold chosen on validation", lambda m: m.f1),
            Column("precision", "precision", "at the threshold chosen on validation", lambda m: m.precision),
            Column("recall", "recall", "at the threshold chosen on validation", lambda m: m.recall),
            Column("threshold", "threshold", "chosen on validation, first seed and fold", lambda m: m.threshold, ".3g"),
        ),
        "calibration": (
            Column("brier", "Brier", "mean squared error of the probability; lower is better", lambda m: m.brier),
            Column("brier_platt", "Brier, Platt", "after Platt scaling on validation", lambda m: m.brier_platt),
            Column(
                "ece",
                "ECE",
                "expected calibration error: mean gap between probability and share of wrong answers",
                lambda m: m.ece,
            ),
            Column("ece_platt", "ECE, Platt", "after Platt scaling on validation", lambda m: m.ece_platt),
        ),
        "rejection": (
            Column("aurc", "AURC", "area under the risk-coverage curve; lower is better", lambda m: m.aurc),
            Column(
                "accuracy_kept",
                "accuracy, 80 %",
                "share of right answers when the 20 % most suspicious are withheld",
                lambda m: m.accuracy_kept,
            ),
            Column("prr", "PRR", "prediction rejection ratio: 0 is chance, 1 is perfect", lambda m: m.prr),
        ),
        "cost": (
            Column("fit_s", "fit, s", "seconds to fit, all folds together", lambda m: m.fit_s, ",.1f"),
            Column("score_ms", "s per 1,000", "seconds to score 1,000 answers", lambda m: m.score_ms, ",.2f"),
            Column("trace_kb", "kB per trace", "data read from the store per trace", lambda m: m.trace_kb, ",.1f"),
            Column(
                "extra_forwards",
                "extra forwards",
                "additional forward passes of the language model per question",
                lambda m: m.extra_forwards,
                "d",
            ),
            Column(
                "extra_tokens",
                "extra tokens",
                "tokens generated for samples, in addition to the answer, per question",
                lambda m: m.extra_tokens,
                ",.0f",
            ),
            Column("parameters", "parameters", "number of fitted parameters", lambda m: m.parameters, ",d"),
        ),
        "": (
            Column(
                "chosen",
                "chosen",
                "hyperparameters chosen on validation, first seed and fold",
                lambda m: chosen_text(m.chosen),
                "",
            ),
        ),
    }
)
_MAIN = ("auroc", "aupr", "accuracy_kept", "ece_platt", "score_ms", "trace_kb")
_PAPER = ("auroc", "auroc_sd", "aupr", "aupr_right", "fpr_at_95_tpr", "f1", "brier_platt", "ece_platt", "aurc", "fit_s")
_TERMINAL = {
    "accuracy_kept": "accuracy, 80 %",
    "name": "model",
    "auroc": "AUROC [95 %]",
    "ece_platt": "ECE",
    "fit_s": "seconds",
}


def report(run: Path) -> Report:
    """The report on the detectors of a run."""
    results = read_results(run)
    return report_on(results, transfer_of(results))


def report_on(results: Results, transfer: Matrix | None = None) -> Report:
    """The report on results, and on those on other stores.

    >>> report_on(read_results("run")).write(Path("run/report.html"))  # doctest: +SKIP
    """
    store, records = results.data.get("store"), results.data.get("records")
    transfer = transfer if transfer and transfer.has_others else None
    models = _comparison(results)
    return Report(
        results=results,
        comparison=COMPARISON,
        num_models=len(results.models),
        text="\n".join([comparison_text(results), *([] if transfer is None else [matrix_text(transfer)])]),
        json={
            "num_test": results.num_test,
            "num_wrong": results.num_wrong,
            "models": [asdict(model) for model in results.models],
            **({} if results.tokens is None else {"tokens": asdict(results.tokens)}),
            **({} if transfer is None else {"transfer": transfer.json}),
        },
        models=models,
        paper=models.only("name", "kind", *_PAPER),
        card=results.data,
        more_tables=lambda: {
            **token_tables(results.tokens),
            **transfer_tables(transfer),
            **_learning_tables(results.models),
        },
        title=Path(str(store)).name if store else results.path.name,
        facts={
            "store": store,
            "language model": results.data.get("language_model"),
            "trained on": results.data.get("trained_on"),
            "questions": f"{f'{records:,} in total, ' if isinstance(records, int) else ''}{scored(results)}",
            "run": results.path,
            "date": results.environment.get("time"),
        },
        draw=lambda: [*draw(results), *draw_transfer(transfer)],
        sections=partial(_sections, results, transfer),
    )


def scored(results: Results) -> str:
    """What was scored, and by which models."""
    num, folds = f"{results.num_test:,}", results.config.get("folds")
    if not folds:
        return f"{num} in the test split"
    if "trained_on" in results.data:
        return f"{num} scored, each by the models of all {folds} folds"
    return f"{num} scored out of fold, each by models that did not see its question ({folds} folds)"


def comparison_text(results: Results, *, width: int = 100) -> str:
    """The comparison for a terminal: one line per detector, the best first, and the size of the test split."""
    table = _comparison(results).only("name", "auroc", "auroc_sd", "aupr", "f1", "ece_platt", "fit_s")
    lines = Table(titled(table.columns, _TERMINAL), table.rows).text(width=width, full=["auroc"])
    lines.append(
        f"{scored(results)}; {results.num_wrong:,} wrong: prevalence {shown(results.prevalence)}. "
        "ECE after Platt scaling."
    )
    if results.tokens is not None:
        lines += ["", *token_lines(results.tokens, width=width)]
    return "\n".join(lines) + "\n"


def _comparison(results: Results) -> Table[ModelResult]:
    return Table((*_ABOUT, *_MEASURES), results.models)


def _learning_tables(models: Sequence[ModelResult]) -> dict[str, str]:
    rows = [(model.name, *point) for model in models for point in model.learning]
    columns: list[Column[tuple[str, int, Interval]]] = [
        Column("name", "detector", "", lambda row: row[0], ""),
        Column("labels", "labelled questions", "for training and validation", lambda row: row[1], ",d"),
        Column("auroc", "AUROC", "on the same questions", lambda row: row[2]),
    ]
    return {"learning.csv": Table(columns, rows).csv()} if rows else {}


def _sections(results: Results, transfer: Matrix | None, drawings: Sequence[Drawing]) -> list[Section]:
    heat_maps = [drawing for drawing in drawings if drawing.name == "transfer"]
    is_evaluation = "evaluates" in results.config  # its run has the section
    return [
        _comparison_section(results),
        *([] if results.tokens is None else [token_section(results.tokens)]),
        difference_section(
            results.differences,
            COMPARISON,
            text="AUROC of the first detector minus AUROC of the second, on the same questions",
        ),
        *([] if is_evaluation else [transfer_section(transfer, heat_maps)]),
        figure_section(
            [drawing for drawing in drawings if drawing not in heat_maps],
            text="The main detectors, trained ones solid and baselines dashed. Curves show the first seed.",
        ),
        _mistake_section(results.mistakes),
        _data_section(results.data),
    ]


def _comparison_section(results: Results) -> Section:
    models = results.models
    text = (
        f"Answers: {scored(results)}. {results.num_wrong:,} of {results.num_test:,} are wrong: a prevalence of "
        f"{shown(results.prevalence)}, which is the AUPR of a random detector. Small numbers are 95 % intervals "
        "over questions. Click a heading to sort."
    )
    marks = {
        "trained": "trained",
        "baseline": "baseline",
        "null": "null model: a trained detector without the graph or the token statistics",
    }
    table = _comparison(results).without("title")

    def block(table: Table[ModelResult], label: str, css: str) -> TableBlock:
        return TableBlock(
            table=table,
            label=label,
            css=css,
            sort=("auroc", "descending"),
            plot=("auroc", Scale.of([model.auroc for model in models], reference=0.5)),
            notes={"auroc": "chance 0.500", "aupr": f"chance {shown(results.prevalence)}"},
            row_css=lambda model: model.kind,
            row_note=lambda model: model.title,
        )

    main = replace(table, rows=main_models(models)).only("name", *_MAIN)
    words = [{model.name: model.title for model in models}, {one.title: one.hint for one in _MEASURES}]
    whole = [
        KeyBlock(marks),
        block(table, "Comparison of all detectors", "comparison"),
        WordsBlock("What the detectors and the columns mean", words),
    ]
    summary = f"{counted(len(models), 'detector')}, every measure"
    blocks = [TextBlock(text), block(main, "Main detectors", "main"), FoldBlock(summary, whole)] if models else []
    return Section("comparison", "Comparison", blocks, "Left out: no detector has scores.")


def _mistake_section(mistakes: Sequence[Mistake]) -> Section:
    if not mistakes:
        return Section("mistakes", "Most confident mistakes", [], "Left out: no detector made a mistake.", "Mistakes")
    text = f"Questions on which {mistakes[0].detector} was most confident and wrong."
    cards = [
        (
            _guess(mistake),
            mistake.question,
            {"answer": [mistake.answer], "accepted": mistake.references, "id": [mistake.id]},
        )
        for mistake in mistakes
    ]
    return Section("mistakes", "Most confident mistakes", [TextBlock(text), CardsBlock(cards)], short="Mistakes")


def _guess(mistake: Mistake) -> str:
    probability = max(mistake.probability, 1 - mistake.probability)
    guess = "wrong" if mistake.probability > 0.5 else "right"
    return f"Predicted {guess} with probability {probability:.1%}; the answer is {mistake.verdict}"


def _data_section(data: Mapping[str, object]) -> Section:
    counts = {name: count for name, count in branch(data.get("verdicts")).items() if isinstance(count, int)}
    total = sum(counts.values()) or 1
    verdicts: list[Column[tuple[str, int]]] = [
        Column("verdict", "verdict", "", lambda row: row[0], ""),
        Column("records", "records", "", lambda row: row[1], ",d"),
        Column("share", "share", "", lambda row: row[1] / total, ".1%"),
    ]
    splits = {name: branch(split) for name, split in branch(data.get("parts")).items()}
    names = list(dict.fromkeys(name for split in splits.values() for name in split))
    columns: list[Column[str]] = [Column("split", "split", "", lambda row: row, "")]
    columns += [Column(name, name, "", partial(_count, splits, name), ",") for name in names]
    tables = {"Verdicts": Table(verdicts, list(counts.items())), "Splits": Table(columns, list(splits))}
    return data_section(data, tables, shown=("verdicts", "parts"))


def _count(splits: Mapping[str, Mapping[str, object]], name: str, split: str) -> int | str | None:
    value = splits[split].get(name)
    return value if isinstance(value, int) or value is None else str(value)
