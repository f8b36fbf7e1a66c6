"""Tables as text, CSV and LaTeX: a column defines its values and how they are formatted."""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from millstream.report.measures import Difference, Interval

DASH = "\N{EN DASH}"
Cell = Interval | float | int | str | None
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One value per row: its key in files, its title and explanation for people, and its format."""

    key: str
    title: str
    hint: str
    value: Callable[[Row], Cell]
    spec: str = ".3f"  # empty: a text; "p": a p value
    group: str = ""  # a heading above several columns

    def shown(self, row: Row, *, full: bool = False) -> str:
        return shown(self.value(row), self.spec, full=full)


def grouped(groups: Mapping[str, Sequence[Column[Row]]]) -> tuple[Column[Row], ...]:
    """All columns, each with the heading above it."""
    return tuple(replace(column, group=group) for group, columns in groups.items() for column in columns)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows, and the columns to show."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]

    def only(self, *keys: str) -> "Table[Row]":
        """These columns, in this order; unknown keys are ignored."""
        by_key = {column.key: column for column in self.columns}
        return replace(self, columns=[by_key[key] for key in keys if key in by_key])

    def without(self, *keys: str) -> "Table[Row]":
        return replace(self, columns=[column for column in self.columns if column.key not in keys])

    def known(self) -> "Table[Row]":
        """The columns that have a value in some row."""
        some = [column for column in self.columns if any(column.value(row) is not None for row in self.rows)]
        return replace(self, columns=some)

    def csv(self) -> str:
        """Numbers in full precision, an interval as three columns; NaN and missing values are empty."""
        values = [[column.value(row) for row in self.rows] for column in self.columns]
        wide = [any(isinstance(cell, Interval) for cell in cells) for cells in values]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            name
            for column, is_wide in zip(self.columns, wide, strict=True)
            for name in [column.key, *([f"{column.key}_low", f"{column.key}_high"] if is_wide else [])]
        )
        for place in range(len(self.rows)):
            line: list[object] = []
            for cells, is_wide in zip(values, wide, strict=True):
                cell = cells[place]
                parts = [cell.value, cell.low, cell.high] if isinstance(cell, Interval) else [cell, None, None]
                line += parts if is_wide else parts[:1]
            writer.writerow(["" if cell != cell or cell == DASH else cell for cell in line])  # NaN differs from itself
        return text.getvalue()

    def latex(self) -> str:
        """A tabular; needs only the package booktabs."""
        titles = [column.title for column in self.columns]
        rows = [[column.shown(row, full=True) for column in self.columns] for row in self.rows]
        lines = [" & ".join(map(_latex_text, row)) + r" \\" for row in (titles, *rows)]
        head = [lines[0], r"\midrule"] if any(titles) else []
        align = "".join("r" if column.spec else "l" for column in self.columns)
        begin, end = rf"\begin{{tabular}}{{{align}}}", r"\end{tabular}"
        return "\n".join([begin, r"\toprule", *head, *lines[1:], r"\bottomrule", end, ""])

    def text(self, *, width: int, full: Sequence[str] = ()) -> list[str]:
        """Lines for a terminal. The first column is shortened to fit the width; columns in `full` show intervals."""
        rows = [[column.title for column in self.columns]]
        rows += [[column.shown(row, full=column.key in full) for column in self.columns] for row in self.rows]
        widths = [max(len(row[place]) for row in rows) for place in range(len(self.columns))]
        widths[0] = max(5, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
        return [
            "  ".join([clipped(name, widths[0]).ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
            for name, *cells in rows
        ]


def titled(columns: Sequence[Column[Row]], titles: Mapping[str, str]) -> list[Column[Row]]:
    """The same columns, some under shorter titles."""
    return [replace(column, title=titles.get(column.key, column.title)) for column in columns]


@dataclass(frozen=True)
class Comparison:
    """Which kind of model is compared, and by which measure: `Comparison("model", "auroc", "AUROC")`."""

    what: str
    key: str  # of the measure, in files
    title: str
    by_split: bool = False  # on several splits


def difference_table(differences: Sequence[Difference], compared: Comparison) -> Table[Difference]:
    """Paired differences of a measure between two models."""
    columns: list[Column[Difference]] = [
        Column("part", "split", "", lambda d: d.split, ""),
        Column("a", compared.what, "", lambda d: d.a, ""),
        Column("b", "minus", "", lambda d: d.b, ""),
        Column(compared.key, f"{compared.title} difference", "with its 95 % interval", lambda d: d.value, "+.3f"),
        Column("p", "p", "two-sided, paired bootstrap", lambda d: d.p, "p"),
        Column("p_holm", "p, Holm", "corrected for all comparisons made", lambda d: d.p_holm, "p"),
        Column("differs", "significant", "p after Holm below 0.05", lambda d: d.differs, ""),
    ]
    return Table(columns[0 if compared.by_split else 1 :], differences)


def card_table(card: Mapping[str, object]) -> Table[tuple[str, str]]:
    """Nested settings as names and values."""
    columns: list[Column[tuple[str, str]]] = [
        Column("name", "", "", lambda row: row[0], ""),
        Column("value", "", "", lambda row: row[1], ""),
    ]
    return Table(columns, flat(card))


def shown(cell: Cell, spec: str = ".3f", *, full: bool = False) -> str:
    """A formatted cell: `0.812`, with `full` also its interval; a dash if there is no number."""
    if isinstance(cell, Interval):
        text = shown(cell.value, spec)
        return f"{text} [{shown(cell.low, spec)}, {shown(cell.high, spec)}]" if full and text != DASH else text
    if cell is None or cell == "" or (isinstance(cell, float) and not math.isfinite(cell)):
        return DASH
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if spec == "p":  # a bootstrap never shows that p is 0
        return "<0.001" if cast(float, cell) < 0.001 else format(cell, ".3f")
    return cell if isinstance(cell, str) else format(cell, spec)


def flat(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Every leaf of nested settings with its dotted name, as text."""
    leaves: list[tuple[str, str]] = []
    for name, value in tree.items():
        below = flat(branch(value), f"{prefix}{name}.")
        leaves += below or [(f"{prefix}{name}", _value_text(value))]
    return leaves


def branch(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else an empty mapping."""
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def chosen_text(chosen: Mapping[str, object]) -> str:
    """`depth 12, C 0.01`: what was chosen on the validation split, without curves."""
    plain = {name: value for name, value in chosen.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {_value_text(value)}" for name, value in plain.items())


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def counted(number: int, what: str) -> str:
    """`1 model`, `5 models`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _value_text(value: object) -> str:
    if value is None or value == {} or value == []:
        return DASH
    if isinstance(value, float):
        return shown(value, ".6g")
    if isinstance(value, list | tuple):
        items = cast(Sequence[object], value)
        if any(isinstance(item, Mapping) for item in items):
            return f"{len(items)} entries"
        return ", ".join(map(_value_text, items))
    return str(value)


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
