"""A report as one HTML page: it needs no network, and nothing in the data can run as code."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from millstream.core.bucket import is_url
from millstream.core.files import already_exists
from millstream.errors import MissingExtra
from millstream.report import write_files
from millstream.report.drawing import PALETTE, Drawing
from millstream.report.measures import Difference, Interval
from millstream.report.tables import (
    DASH,
    Cell,
    Column,
    Comparison,
    Table,
    clipped,
    difference_table,
    flat,
    shown,
)

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError:
    raise MissingExtra("The report needs the package 'jinja2': pip install 'millstream[report]'") from None

_MAX_TEXT = 400  # characters shown of a text or a setting
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}


@dataclass(frozen=True)
class Scale:
    """Numbers -> percent of the width of a plot, on one scale for all rows."""

    reference: float
    low: float
    width: float

    @staticmethod
    def of(intervals: Sequence[Interval], *, reference: float) -> "Scale":
        numbers = [number for one in intervals for number in (one.low, one.value, one.high)]
        numbers = [number for number in (*numbers, reference) if math.isfinite(number)]
        return Scale(reference, min(numbers), (max(numbers) - min(numbers)) or 1.0)

    def place(self, number: float) -> float:
        return round(4 + 92 * (number - self.low) / self.width, 2)


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """A table that can be sorted. The first column names the row."""

    kind: ClassVar = "table"
    table: Table[Any]
    label: str
    css: str = ""
    is_tall: bool = False  # scrolls within itself
    sort: tuple[str, str] = ("", "")  # a column's key, and ascending or descending: how the rows are sorted
    plot: tuple[str, Scale] | None = None  # a column's key: its intervals are drawn next to its numbers
    notes: Mapping[str, str] = field(default_factory=dict[str, str])  # below headings, by key
    row_css: Callable[[Any], str] = lambda _: ""
    row_note: Callable[[Any], str] = lambda _: ""  # below the name of a row

    def groups(self) -> list[tuple[str, int]]:
        """Headings above columns, and how many columns each is above."""
        spans = [(name, len(list(some))) for name, some in groupby(self.table.columns, key=lambda one: one.group)]
        return spans if any(name for name, _ in spans) else []

    def cells(self, row: Any) -> list["ShownCell"]:
        return [self._cell(column, row) for column in self.table.columns]

    def _cell(self, column: Column[Any], row: Any) -> "ShownCell":
        value = column.value(row)
        is_plotted = self.plot is not None and self.plot[0] == column.key
        plot = _plot(value, self.plot[1]) if self.plot is not None and is_plotted else None
        return ShownCell.of(value, column.spec, is_plotted=is_plotted, plot=plot)


@dataclass(frozen=True)
class FiguresBlock:
    """Figures side by side, and a line for each that is missing."""

    kind: ClassVar = "figures"
    drawings: Sequence[Drawing]
    is_large: bool = False

    def inlined(self) -> list[tuple[Drawing, Markup]]:
        return [(drawing, _inline_svg(drawing)) for drawing in self.drawings if drawing.figure]

    def missing(self) -> list[Drawing]:
        return [drawing for drawing in self.drawings if not drawing.figure]


@dataclass(frozen=True)
class TextBlock:
    kind: ClassVar = "text"
    text: str
    css: str = ""


@dataclass(frozen=True)
class ListBlock:
    kind: ClassVar = "list"
    texts: Sequence[str]


@dataclass(frozen=True)
class HeadingBlock:
    kind: ClassVar = "heading"
    text: str


@dataclass(frozen=True)
class KeyBlock:
    """A legend for the marks of rows: CSS class -> meaning."""

    kind: ClassVar = "key"
    marks: Mapping[str, str]


@dataclass(frozen=True)
class WordsBlock:
    """Terms and their meanings, in a collapsible block."""

    kind: ClassVar = "words"
    summary: str
    lists: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class PairsBlock:
    """Names and values of a card or of settings."""

    kind: ClassVar = "pairs"
    tree: Mapping[str, object]

    def rows(self) -> Sequence[tuple[str, str]]:
        return flat(self.tree)


@dataclass(frozen=True)
class CardsBlock:
    """Single records: a note, a title, and texts by name, one or several per name."""

    kind: ClassVar = "cards"
    cards: Sequence[tuple[str, str, Mapping[str, Sequence[str]]]]


@dataclass(frozen=True)
class FoldBlock:
    """Blocks in a collapsible block."""

    kind: ClassVar = "fold"
    summary: str
    blocks: "Sequence[Block]"
    is_open: bool = False


@dataclass(frozen=True)
class SideBlock:
    """Groups of blocks side by side."""

    kind: ClassVar = "side"
    columns: "Sequence[Sequence[Block]]"


Block = (
    TableBlock
    | FiguresBlock
    | TextBlock
    | ListBlock
    | HeadingBlock
    | KeyBlock
    | WordsBlock
    | PairsBlock
    | CardsBlock
    | FoldBlock
    | SideBlock
)


@dataclass(frozen=True)
class Section:
    """A section of the page with an entry in the contents. Without blocks, `missing` says why it is left out."""

    id: str
    title: str
    blocks: Sequence[Block]
    missing: str = ""
    short: str = ""  # its name in the contents, if not the title


@dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of a report. `what` is the kind of model that is compared."""

    what: str
    title: str  # the data they were compared on
    facts: Mapping[str, object]  # below the title; None is left out
    findings: Sequence[str]  # the first is what the page begins with
    overview: Drawing | None = None  # below it
    sections: Sequence[Section]
    settings: Mapping[str, object]
    environment: Mapping[str, object]
    not_run: Mapping[str, str]  # models, and why they have no results


def write_page(page: Page, out: Path) -> Path:
    """Write the page to `out`, complete or not at all."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clipped"] = partial(clipped, length=_MAX_TEXT)
    others = page.findings[1:]
    findings = Section("findings", "More findings", [ListBlock(others)] if others else [], "None.", "Findings")
    overview = FiguresBlock([page.overview] if page.overview else [], is_large=True)
    sections = [
        *page.sections[:1],
        findings,
        *page.sections[1:],
        _pairs_section("settings", "Settings", page.settings, "Left out: the run did not record its settings."),
        _pairs_section("environment", "Environment", page.environment, "Left out: the run did not record it."),
        _pairs_section("not-run", "Not run", page.not_run, f"None: every requested {page.what} has run."),
    ]
    facts = {name: str(value) for name, value in page.facts.items() if value is not None}
    text = environment.get_template("page.html.j2").render(page=page, overview=overview, sections=sections, facts=facts)
    _check_page(out)
    write_files({out.name: text.encode("utf-8", "replace")}, out.parent)
    return out


def _check_page(out: Path) -> None:
    """Only a page is replaced by a page: `--out reads.fa` must not cost the reads."""
    if not is_url(out) and out.is_file():
        with out.open("rb") as file:
            start = file.read(14).lower()
        if start not in (b"", b"<!doctype html"):
            raise already_exists(out)


def difference_section(differences: Sequence[Difference], compared: Comparison, *, text: str) -> Section:
    """Paired differences between models, with their intervals as plots; `text` says which, and on which records."""
    key = compared.key
    block = TableBlock(
        table=difference_table(differences, compared).only("a", "b", "part", key, "p", "p_holm", "differs"),
        label="Paired differences",
        css="differences",
        plot=(key, Scale.of([one.value for one in differences], reference=0.0)),
        row_css=lambda one: "differs" if one.differs else "same",
    )
    missing = f"Left out: there are no two {compared.what}s to compare."
    text = f"{text}: paired bootstrap, p corrected for all comparisons (Holm)."
    blocks = [TextBlock(text), block] if differences else []
    return Section("differences", "Paired differences", blocks, missing, "Differences")


def figure_section(drawings: Sequence[Drawing], *, text: str) -> Section:
    drawn = any(drawing.figure for drawing in drawings)
    return Section("figures", "Figures", [*([TextBlock(text)] if drawn else []), FiguresBlock(drawings)])


def data_section(
    card: Mapping[str, object], tables: Mapping[str, Table[Any]], *, shown: Sequence[str], tall: Sequence[str] = ()
) -> Section:
    """The data card: tables side by side, and its other entries; `shown` names the entries that the tables show."""
    side = [
        [HeadingBlock(title), TableBlock(table=table, label=title, is_tall=title in tall)]
        for title, table in tables.items()
        if table.rows
    ]
    others = PairsBlock({name: value for name, value in card.items() if name not in shown})
    blocks = [SideBlock(side), others] if card else []
    return Section("data", "Data", blocks, "Left out: the run has no data card.")


@dataclass(frozen=True)
class ShownCell:
    """A cell of an HTML table."""

    text: str
    interval: str  # below the text
    order: float | str  # sort key of its column; empty: last
    css: str
    plot: "Plot | None"

    @staticmethod
    def of(value: Cell, spec: str, *, is_plotted: bool = False, plot: "Plot | None" = None) -> "ShownCell":
        text = shown(value, spec)
        number = value.value if isinstance(value, Interval) else value
        interval = f"{shown(value.low, spec)}, {shown(value.high, spec)}" if isinstance(value, Interval) else ""
        order = "" if text == DASH or number is None else number if spec else text
        css = " ".join(["number" if spec else "text", *(["plotted"] if is_plotted else [])])
        return ShownCell(text, interval if text != DASH else "", order, css, plot)


@dataclass(frozen=True)
class Plot:
    """A dot with its interval and a reference line, in percent of the width."""

    low: float
    value: float
    high: float
    reference: float


def _plot(value: Cell, scale: Scale) -> Plot | None:
    numbers = (value.low, value.value, value.high) if isinstance(value, Interval) else (math.nan,)
    return Plot(*map(scale.place, (*numbers, scale.reference))) if all(map(math.isfinite, numbers)) else None


def _pairs_section(id: str, title: str, tree: Mapping[str, object], missing: str) -> Section:
    return Section(id, title, [PairsBlock(tree)] if tree else [], missing)


def _inline_svg(drawing: Drawing) -> Markup:
    """The figure for inlining in a page: in the page's colours and font, with unique ids."""
    text = drawing.svg(transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would apply to the whole page
    text = re.sub(r"<[^>]*>", lambda found: _inline_tag(found[0], drawing.name), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return Markup(text)  # matplotlib has escaped the data


def _inline_tag(tag: str, name: str) -> str:
    if tag.startswith("<svg"):
        size = re.search(r'viewBox="[^"]*"', tag)
        assert size
        return f'<svg {size[0]} role="img" aria-labelledby="{name}-title">'
    tag = re.sub(r"(?<=\.\d\d)\d+", "", tag)  # a hundredth of a point is fine enough
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag).replace("url(#", f"url(#{name}-")
    tag = re.sub(r"font-family: [^;\"]*", "font-family: inherit", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: _VARIABLES.get(colour[0], colour[0]), tag)
