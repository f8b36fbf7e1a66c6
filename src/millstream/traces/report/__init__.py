"""The report on detectors: columns, tables as text and files, and the HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from millstream.report import Report
from millstream.report.drawing import Drawing
from millstream.report.page import (
    CardsBlock,
    FiguresBlock,
    HeadingBlock,
    KeyBlock,
    Page,
    PairsBlock,
    Scale,
    Section,
    SideBlock,
    TableBlock,
    TextBlock,
    WordsBlock,
    difference_section,
    write_page,
)
from millstream.report.tables import (
    Column,
    Table,
    branch,
    card_table,
    chosen_text,
    counted,
    difference_table,
    grouped,
    shown,
    titled,
)
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.figures import draw
from millstream.traces.report.results import Mistake, ModelResult, Results

TRAIN_SETTINGS = "data=STORE"


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
            Column(
                "fpr_at_95_tpr", "FPR@95", "share of right answers flagged at 95 % recall", lambda m: m.fpr_at_95_tpr
            ),
        ),
        "at the validation threshold": (
            Column("f1", "F1", "of wrong answers, at the threshold chosen on validation", lambda m: m.f1),
            Column("precision", "precision", "at the threshold chosen on validation", lambda m: m.precision),
            Column("recall", "recall", "at the threshold chosen on validation", lambda m: m.recall),
            Column("threshold", "threshold", "chosen on validation, first seed", lambda m: m.threshold, ".3g"),
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
            Column("prr", "PRR", "prediction rejection ratio: 0 is chance, 1 is perfect", lambda m: m.prr),
        ),
        "cost": (
            Column("fit_s", "fit, s", "seconds to fit", lambda m: m.fit_s, ",.1f"),
            Column("score_ms", "ms per trace", "milliseconds to score one trace", lambda m: m.score_ms, ",.2f"),
            Column("trace_kb", "kB per trace", "data read from the store per trace", lambda m: m.trace_kb, ",.1f"),
            Column(
                "extra_forwards",
                "forwards",
                "additional forward passes of the language model per question",
                lambda m: m.extra_forwards,
                "d",
            ),
            Column("parameters", "parameters", "number of fitted parameters", lambda m: m.parameters, ",d"),
        ),
        "": (Column("chosen", "chosen", "hyperparameters chosen on validation", lambda m: chosen_text(m.chosen), ""),),
    }
)
_PAPER = ("auroc", "auroc_sd", "aupr", "fpr_at_95_tpr", "f1", "brier_platt", "ece_platt", "aurc", "fit_s")
_TERMINAL = {"name": "model", "auroc": "AUROC [95 %]", "ece_platt": "ECE", "fit_s": "seconds"}
_CARD_TABLES = ("verdicts", "parts")  # entries of the data card that are shown as tables


def report(run: Path) -> Report:
    """The report on the detectors of a run."""
    results = read_results(run)
    return Report(
        text=comparison_text(results),
        findings=results.findings,
        summary=summary(results),
        compared=counted(len(results.models), "detector"),
        draw=partial(draw, results),
        write_page=lambda out, drawings: write_report(results, out, drawings=drawings),
        tables=partial(tables, results),
    )


def comparison_text(results: Results, *, width: int = 100) -> str:
    """The comparison for a terminal: one line per detector, the best first, and the size of the test split."""
    table = _comparison(results).only("name", "auroc", "auroc_sd", "aupr", "f1", "ece_platt", "fit_s")
    lines = Table(titled(table.columns, _TERMINAL), table.rows).text(width=width, full=["auroc"])
    lines.append(
        f"{results.num_test} test questions, {results.num_wrong} wrong: prevalence {shown(results.prevalence)}. "
        "ECE after Platt scaling."
    )
    return "\n".join(lines) + "\n"


def summary(results: Results) -> dict[str, object]:
    """The output of `--json`."""
    found = asdict(results)
    names = ("a", "b", "value", "p", "p_holm", "differs")
    differences = [{"auroc" if name == "value" else name: one[name] for name in names} for one in found["differences"]]
    return {
        **{name: found[name] for name in ("run", "num_test", "num_wrong", "models")},
        "differences": differences,
        "findings": found["findings"],
    }


def tables(results: Results) -> dict[str, str]:
    """`comparison`, `differences` and `data`, each as .csv and as LaTeX, by file name."""
    comparison, card = _comparison(results), card_table(results.data)
    differences = difference_table(results.differences, what="detector", key="auroc", title="AUROC", with_split=False)
    return {
        "comparison.csv": comparison.csv(),
        "comparison.tex": comparison.only("name", "kind", *_PAPER).latex(),
        "differences.csv": differences.csv(),
        "differences.tex": differences.without("differs").latex(),
        "data.csv": card.csv(),
        "data.tex": card.latex(),
    }


def write_report(results: Results, out: Path, *, drawings: Sequence[Drawing] | None = None) -> Path:
    """Write the report to the file `out`, atomically; `drawings` are the figures if already drawn.

    >>> write_report(read_results("run"), Path("run/report.html"))  # doctest: +SKIP
    """
    drawings = draw(results) if drawings is None else drawings
    store, records = results.data.get("store"), results.data.get("records")
    questions = f"{records:,} in total, {results.num_test:,} in test" if isinstance(records, int) else results.num_test
    difference_text = (
        "AUROC of the first detector minus AUROC of the second, on the same questions: paired bootstrap, p corrected "
        "for all comparisons (Holm)."
    )
    page = Page(
        what="detector",
        title=Path(str(store)).name if store else results.run.name,
        facts={
            "store": store,
            "language model": results.data.get("language_model"),
            "questions": questions,
            "run": results.run,
            "date": results.environment.get("time"),
        },
        findings=results.findings,
        sections=[
            _comparison_section(results),
            difference_section(results.differences, what="detector", key="auroc", title="AUROC", text=difference_text),
            _figure_section(drawings),
            _mistake_section(results.mistakes),
            _data_section(results.data),
        ],
        settings=results.config,
        environment=results.environment,
        not_run=results.missing,
    )
    return write_page(page, out)


def _comparison(results: Results) -> Table[ModelResult]:
    return Table((*_ABOUT, *_MEASURES), results.models)


def _comparison_section(results: Results) -> Section:
    models = results.models
    text = (
        f"{results.num_wrong:,} of {results.num_test:,} test answers are wrong: a prevalence of "
        f"{shown(results.prevalence)}, which is the AUPR of a random detector. Small numbers are 95 % intervals "
        "over questions. Click a heading to sort."
    )
    marks = {
        "trained": "trained",
        "baseline": "baseline",
        "null": "null model: a trained detector without the graph or the token statistics",
    }
    block = TableBlock(
        table=_comparison(results).without("title"),
        label="Comparison of detectors",
        css="comparison",
        sort=("auroc", "descending"),
        plot=("auroc", Scale.of([model.auroc for model in models], reference=0.5)),
        notes={"auroc": "chance 0.500", "aupr": f"chance {shown(results.prevalence)}"},
        row_css=lambda model: model.kind,
        row_note=lambda model: model.title,
    )
    words = [{model.name: model.title for model in models}, {one.title: one.hint for one in _MEASURES}]
    explained = WordsBlock("What the detectors and the columns mean", words)
    blocks = [TextBlock(text), KeyBlock(marks), block, explained] if models else []
    return Section("comparison", "Comparison", blocks, "Left out: no detector was scored on the test split.")


def _figure_section(drawings: Sequence[Drawing]) -> Section:
    text = (
        "In colour: the trained detectors (solid) and the three best baselines on validation (dashed). Curves "
        "show the first seed."
    )
    drawn = any(drawing.figure for drawing in drawings)
    return Section("figures", "Figures", [*([TextBlock(text)] if drawn else []), FiguresBlock(drawings)])


def _mistake_section(mistakes: Sequence[Mistake]) -> Section:
    if not mistakes:
        return Section("mistakes", "Most confident mistakes", [], "Left out: no detector made a mistake.", "Mistakes")
    text = f"Test questions on which {mistakes[0].detector} was most confident and wrong."
    cards = [
        (
            _guess(mistake),
            mistake.question,
            {"answer": [mistake.answer], "accepted": mistake.references, "id": [mistake.question_id]},
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
    side = [
        [HeadingBlock("Verdicts"), TableBlock(table=Table(verdicts, list(counts.items())), label="Verdicts")],
        [HeadingBlock("Splits"), TableBlock(table=Table(columns, list(splits)), label="Splits")],
    ]
    side = [column for column, has_rows in zip(side, (counts, splits), strict=True) if has_rows]
    card = PairsBlock({name: value for name, value in data.items() if name not in _CARD_TABLES})
    blocks = [SideBlock(side), card] if data else []
    return Section("data", "Data", blocks, "Left out: the run has no data card.")


def _count(splits: Mapping[str, Mapping[str, object]], name: str, split: str) -> int | str | None:
    value = splits[split].get(name)
    return value if isinstance(value, int) or value is None else str(value)
