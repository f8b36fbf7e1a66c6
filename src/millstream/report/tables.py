"""What a run found, as tables: text for a terminal, CSV to compute with, LaTeX for a paper."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from millstream.report.cells import (
    Cell,
    chosen_text,
    csv_text,
    flat,
    latex_table,
    p_text,
    shown,
    spread,
    text_table,
    write_texts,
)
from millstream.report.results import Difference, ModelResult, Results


@dataclass(frozen=True)
class Column:
    """One measure of a detector: its name in files, its title for people, and how its numbers are written."""

    name: str
    title: str
    hint: str
    value: Callable[[ModelResult], Cell]
    spec: str = ".3f"


COLUMNS = (
    Column("auroc", "AUROC", "chance that a wrong answer scores above a right one", lambda m: m.auroc),
    Column("auroc_sd", "± sd", "standard deviation of AUROC over seeds", lambda m: m.auroc_sd),
    Column("seeds", "seeds", "trainings that the numbers are means of", lambda m: m.seeds, "d"),
    Column("auroc_val", "val. AUROC", "AUROC on the validation part", lambda m: m.auroc_val),
    Column("aupr", "AUPR", "area under precision against recall of wrong answers", lambda m: m.aupr),
    Column("fpr_at_95_tpr", "FPR@95", "right answers flagged when 95 % of the wrong are", lambda m: m.fpr_at_95_tpr),
    Column("f1", "F1", "of wrong answers, at the threshold chosen on validation", lambda m: m.f1),
    Column("precision", "precision", "at the threshold chosen on validation", lambda m: m.precision),
    Column("recall", "recall", "at the threshold chosen on validation", lambda m: m.recall),
    Column("threshold", "threshold", "chosen on validation, of the first seed", lambda m: m.threshold, ".3g"),
    Column("brier", "Brier", "squared error of the probability; lower is better", lambda m: m.brier),
    Column("brier_platt", "Brier, Platt", "the same after Platt scaling on validation", lambda m: m.brier_platt),
    Column("ece", "ECE", "mean gap between probability and share of wrong answers", lambda m: m.ece),
    Column("ece_platt", "ECE, Platt", "the same after Platt scaling on validation", lambda m: m.ece_platt),
    Column("aurc", "AURC", "area under risk against coverage; lower is better", lambda m: m.aurc),
    Column("prr", "PRR", "share of a perfect rejection's gain; 0 is chance, 1 perfect", lambda m: m.prr),
    Column("fit_s", "fit, s", "seconds to fit", lambda m: m.fit_s, ",.1f"),
    Column("score_ms", "ms a trace", "to score one trace", lambda m: m.score_ms, ",.2f"),
    Column("trace_kb", "kB a trace", "read from the store", lambda m: m.trace_kb, ",.1f"),
    Column(
        "extra_forwards", "forwards", "further passes of the language model a question", lambda m: m.extra_forwards, "d"
    ),
    Column("parameters", "parameters", "numbers that were fitted", lambda m: m.parameters, ",d"),
    Column("chosen", "chosen", "on validation", lambda m: chosen_text(m.chosen)),
)
GROUPS = {"ranking": 6, "at the validation threshold": 4, "calibration": 4, "rejection": 2, "cost": 5, "": 1}
"""How many of the columns, in their order, go under one heading."""

_PAPER = ("auroc", "auroc_sd", "aupr", "f1", "fpr_at_95_tpr", "brier_platt", "ece_platt", "aurc", "fit_s")
_TEXT = ("auroc", "auroc_sd", "aupr", "f1", "ece_platt", "fit_s")


def comparison_text(results: Results, *, width: int = 100) -> str:
    """The comparison for a terminal: a line a detector, the best first, and what it was measured on.

    >>> print(comparison_text(read_results("run")))  # doctest: +SKIP
    """
    columns = [column for column in COLUMNS if column.name in _TEXT]
    titles = {"auroc": "AUROC [95 %]", "ece_platt": "ECE", "fit_s": "seconds"}
    rows = [["model", *(titles.get(column.name, column.title) for column in columns)]]
    for model in results.models:
        cells = [shown(column.value(model), column.spec, full=column.name == "auroc") for column in columns]
        rows.append([model.name, *cells])
    lines = text_table(rows, width=width)
    lines.append(
        f"{results.num_test} test questions, {results.num_wrong} wrong: prevalence {shown(results.prevalence)}. "
        "ECE after Platt scaling."
    )
    return "\n".join(lines) + "\n"


def write_tables(results: Results, folder: Path) -> list[Path]:
    """`comparison`, `differences` and `data`, each as .csv and as a LaTeX tabular that needs only booktabs."""
    paper = [column for column in COLUMNS if column.name in _PAPER]
    card = flat(results.data)
    texts = {
        "comparison.csv": csv_text(_comparison_rows(results.models)),
        "comparison.tex": latex_table(
            ["detector", "kind", *(column.title for column in paper)],
            [
                [model.name, model.kind, *(shown(column.value(model), column.spec, full=True) for column in paper)]
                for model in results.models
            ],
        ),
        "differences.csv": csv_text(_difference_rows(results.differences)),
        "differences.tex": latex_table(
            ["a", "b", "AUROC of a - b", "p", "p, Holm"],
            [[d.a, d.b, shown(d.auroc, "+.3f", full=True), p_text(d.p), p_text(d.p_holm)] for d in results.differences],
        ),
        "data.csv": csv_text([["name", "value"], *card]),
        "data.tex": latex_table(["", ""], card),
    }
    return write_texts(texts, folder)


def summary(results: Results) -> dict[str, object]:
    """What `--json` prints."""
    found = asdict(results)
    return {name: found[name] for name in ("run", "num_test", "num_wrong", "models", "differences", "findings")}


def _comparison_rows(models: Sequence[ModelResult]) -> list[list[object]]:
    header = ["name", "kind", "title", *(column.name for column in COLUMNS)]
    return spread(header, [[m.name, m.kind, m.title, *(column.value(m) for column in COLUMNS)] for m in models])


def _difference_rows(differences: Sequence[Difference]) -> list[list[object]]:
    header: list[object] = ["a", "b", "auroc", "auroc_low", "auroc_high", "p", "p_holm", "differs"]
    return [
        header,
        *([d.a, d.b, d.auroc.value, d.auroc.low, d.auroc.high, d.p, d.p_holm, d.differs] for d in differences),
    ]
