"""Values as text, whatever was compared: for people, for a terminal, as CSV, as LaTeX."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from millstream.report.results import Interval
from millstream.store.layout import publish

DASH = "\N{EN DASH}"
Cell = Interval | float | int | str | None


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


def chosen_text(chosen: Mapping[str, object]) -> str:
    """`layer 12, C 0.01`: what was chosen on validation, curves left out."""
    plain = {name: value for name, value in chosen.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {_value_text(value)}" for name, value in plain.items())


def text_table(rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Lines for a terminal: the first column on the left, and cut where it has to be; the others on the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    widths[0] = max(5, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    return [
        "  ".join([_clipped(name, widths[0]).ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for name, *cells in rows
    ]


def spread(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[list[object]]:
    """Intervals take three columns, so that every cell is one number."""
    wide = [any(isinstance(row[place], Interval) for row in rows) for place in range(len(header))]
    names = [
        [name, f"{name}_low", f"{name}_high"] if is_wide else [name] for name, is_wide in zip(header, wide, strict=True)
    ]
    table: list[list[object]] = [[name for some in names for name in some]]
    for row in rows:
        line: list[object] = []
        for cell, is_wide in zip(row, wide, strict=True):
            whole = [cell.value, cell.low, cell.high] if isinstance(cell, Interval) else [cell, None, None]
            line += whole if is_wide else [cell]
        table.append(line)
    return table


def write_texts(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Files by name, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        publish(folder / name, text.encode("utf-8", "replace"))
    return [folder / name for name in texts]


def csv_text(rows: Sequence[Sequence[object]]) -> str:
    """Numbers in full; what is no number is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if cell != cell or cell == DASH else cell for cell in row])  # only NaN differs from itself
    return text.getvalue()


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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
