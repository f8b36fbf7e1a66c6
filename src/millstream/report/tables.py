"""What a run found, as tables: text for a terminal, CSV to compute with, LaTeX for a paper."""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from millstream.report.results import Difference, Interval, ModelResult, Results
from millstream.store.layout import publish

DASH = "\N{EN DASH}"
Cell = Interval | float | int | str | None


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
    Column("chosen", "chosen", "on validation", lambda m: chosen_text(m)),
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
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    widths[0] = max(5, min(widths[0], width - sum(widths[1:]) - 2 * len(columns)))
    lines = [
        "  ".join([_clipped(name, widths[0]).ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for name, *cells in rows
    ]
    lines.append(
        f"{results.num_test} test questions, {results.num_wrong} wrong: prevalence {shown(results.prevalence)}. "
        "ECE after Platt scaling."
    )
    return "\n".join(lines) + "\n"


def write_tables(results: Results, folder: Path) -> list[Path]:
    """`comparison`, `differences` and `data`, each as .csv and as a LaTeX tabular that needs only booktabs."""
    folder.mkdir(parents=True, exist_ok=True)
    paper = [column for column in COLUMNS if column.name in _PAPER]
    card = flat(results.data)
    texts = {
        "comparison.csv": _csv(_comparison_rows(results.models)),
        "comparison.tex": _latex(
            ["detector", "kind", *(column.title for column in paper)],
            [
                [model.name, model.kind, *(shown(column.value(model), column.spec, full=True) for column in paper)]
                for model in results.models
            ],
        ),
        "differences.csv": _csv(_difference_rows(results.differences)),
        "differences.tex": _latex(
            ["a", "b", "AUROC of a - b", "p", "p, Holm"],
            [[d.a, d.b, shown(d.auroc, "+.3f", full=True), p_text(d.p), p_text(d.p_holm)] for d in results.differences],
        ),
        "data.csv": _csv([["name", "value"], *card]),
        "data.tex": _latex(["", ""], card),
    }
    for name, text in texts.items():
        publish(folder / name, text.encode("utf-8", "replace"))
    return [folder / name for name in texts]


def shown(cell: Cell, spec: str = ".3f", *, full: bool = False) -> str:
    """A cell for people: `0.812`, or with `full` also its interval; a dash where there is no number."""
    if isinstance(cell, Interval):
        text = shown(cell.value, spec)
        return f"{text} [{shown(cell.low, spec)}, {shown(cell.high, spec)}]" if full and text != DASH else text
    if cell is None or cell == "" or (isinstance(cell, float) and not math.isfinite(cell)):
        return DASH
    return cell if isinstance(cell, str) else format(cell, spec)


def p_text(p: float) -> str:
    """`0.031`; a bootstrap never shows that p is nought."""
    return "<0.001" if p < 0.001 else shown(p)


def chosen_text(model: ModelResult) -> str:
    """`layer 12, C 0.01`: what was chosen on validation, curves left out."""
    plain = {name: value for name, value in model.chosen.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {_value_text(value)}" for name, value in plain.items())


def flat(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Every leaf of nested settings with its dotted name, as text."""
    leaves: list[tuple[str, str]] = []
    for name, value in tree.items():
        below = flat(branch(value), f"{prefix}{name}.")
        leaves += below or [(f"{prefix}{name}", _value_text(value))]
    return leaves


def branch(value: object) -> Mapping[str, object]:
    """The mapping that a value of a file is; an empty one if it is none."""
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def _value_text(value: object) -> str:
    if value is None or value == {} or value == []:
        return DASH
    if isinstance(value, float):
        return shown(value, ".6g")
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(item) for item in cast(Sequence[object], value))
    return str(value)


def _comparison_rows(models: Sequence[ModelResult]) -> list[list[object]]:
    """Intervals take three columns, so that every cell is one number."""
    header: list[object] = ["name", "kind", "title"]
    rows: list[list[object]] = [[model.name, model.kind, model.title] for model in models]
    for column in COLUMNS:
        cells = [column.value(model) for model in models]
        wide = any(isinstance(cell, Interval) for cell in cells)
        header += [column.name, f"{column.name}_low", f"{column.name}_high"] if wide else [column.name]
        for row, cell in zip(rows, cells, strict=True):
            row += [cell.value, cell.low, cell.high] if isinstance(cell, Interval) else [cell]
    return [header, *rows]


def _difference_rows(differences: Sequence[Difference]) -> list[list[object]]:
    header: list[object] = ["a", "b", "auroc", "auroc_low", "auroc_high", "p", "p_holm", "differs"]
    return [
        header,
        *([d.a, d.b, d.auroc.value, d.auroc.low, d.auroc.high, d.p, d.p_holm, d.differs] for d in differences),
    ]


def _csv(rows: Sequence[Sequence[object]]) -> str:
    """Numbers in full; what is no number is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if cell != cell or cell == DASH else cell for cell in row])  # only NaN differs from itself
    return text.getvalue()


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" & ".join(map(_latex_text, row)) + r" \\" for row in (header, *rows)]
    head = [lines[0], r"\midrule"] if any(header) else []
    columns = "ll" + "r" * (len(header) - 2)  # two names, then numbers
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""]
    )


_LATEX = {
    **{sign: f"\\{sign}" for sign in "_%&#${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    DASH: "--",
    "<": "$<$",
    ">": "$>$",
    "[": "{[}",  # after \\ a bare one would be a length
    "\n": " ",
}


def _latex_text(text: str) -> str:
    return re.sub("|".join(map(re.escape, _LATEX)), lambda found: _LATEX[found[0]], text)


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
