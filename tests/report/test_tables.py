"""Tables of any rows as text, CSV and LaTeX."""

import csv
import math
import re
from dataclasses import dataclass

import pytest

from millstream.report.measures import Difference, Interval
from millstream.report.tables import Column, Comparison, Table, card_table, difference_table, grouped, shown


@dataclass(frozen=True)
class Row:
    name: str
    area: Interval | None
    loss: float = 1 / 3
    chosen: str = ""


COLUMNS: tuple[Column[Row], ...] = grouped(
    {
        "": (Column("name", "model", "", lambda row: row.name, ""),),
        "ranking": (
            Column("area", "area ± 1", "what it is", lambda row: row.area),
            Column("loss", "loss", "", lambda row: row.loss, ".2f"),
            Column("chosen", "chosen", "", lambda row: row.chosen, ""),
        ),
    }
)
ROWS = [Row("a_b", Interval(1 / 3, 0.25, 0.5)), Row("50 % & more [x]", None, math.nan, "C 0.1")]


@pytest.fixture
def table() -> Table[Row]:
    return Table(COLUMNS, ROWS)


def test_csv_has_full_precision_three_columns_per_interval_and_empty_cells_for_nan(table: Table[Row]):
    first, second = csv.DictReader(table.csv().splitlines())
    assert list(first) == ["name", "area", "area_low", "area_high", "loss", "chosen"]
    assert (float(first["area"]), float(first["area_low"]), float(first["area_high"])) == (1 / 3, 0.25, 0.5)
    assert (second["area"], second["area_high"], second["loss"], second["chosen"]) == ("", "", "", "C 0.1")


def test_latex_is_escaped_and_complete(table: Table[Row]):
    text = table.latex()
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3 and {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {3}
    assert r"a\_b & 0.333 {[}0.250, 0.500] & 0.33 & --" in text and r"50 \% \& more {[}x]" in text
    assert text.startswith(r"\begin{tabular}{lrrl}") and text.endswith("\\bottomrule\n\\end{tabular}\n")
    assert not re.search(r"(?<!\\)[_%#]", text) and text.isascii()


def test_text_fits_the_width_and_shows_intervals_of_selected_columns(table: Table[Row]):
    head, first, second = table.text(width=50, full=["area"])
    assert head.split()[:2] == ["model", "area"] and "0.333 [0.250, 0.500]" in first
    assert max(map(len, (head, first, second))) <= 50
    assert "…" in table.text(width=30)[2] and "[0.250" not in "".join(table.text(width=80))


def test_columns_are_selected_in_any_order_and_empty_ones_can_be_dropped(table: Table[Row]):
    assert [column.key for column in table.only("loss", "name", "unheard_of").columns] == ["loss", "name"]
    assert [column.key for column in table.without("loss").columns] == ["name", "area", "chosen"]
    assert [column.key for column in Table(COLUMNS, ROWS[1:]).known().columns] == ["name", "loss", "chosen"]
    assert [column.group for column in COLUMNS] == ["", "ranking", "ranking", "ranking"]


def test_a_missing_number_is_a_dash_and_a_tiny_p_is_not_zero():
    assert {shown(cell) for cell in (None, "", math.nan, math.inf, Interval(math.nan, 0, 1))} == {"–"}
    assert [shown(p, "p") for p in (0.0004, 0.031)] == ["<0.001", "0.031"]
    assert [shown(True, ""), shown(False, ""), shown(1234, ",d")] == ["yes", "no", "1,234"]


def test_differences_and_cards_are_tables():
    difference = Difference("a", "b", "val", Interval(0.1, 0.05, 0.2), 0.01, 0.02, True)
    for by_split in (False, True):
        table = difference_table([difference], Comparison("model", "f1", "F1", by_split=by_split))
        (row,) = csv.DictReader(table.csv().splitlines())
        assert list(row) == [
            *(["part"] if by_split else []),
            "a",
            "b",
            "f1",
            "f1_low",
            "f1_high",
            "p",
            "p_holm",
            "differs",
        ]
        assert row["differs"] == "True" and float(row["f1_low"]) == 0.05
    card = card_table({"a": {"b": [1, 2.5], "c": None}, "d": {}})
    assert list(card.rows) == [("a.b", "1, 2.5"), ("a.c", "–"), ("d", "–")]
    assert card.csv() == 'name,value\na.b,"1, 2.5"\na.c,\nd,\n' and "midrule" not in card.latex()
