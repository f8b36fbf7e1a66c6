"""What a run found, as one HTML page that needs no network and runs nothing that the data say."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import MissingExtra
from millstream.report.cells import DASH, Cell, branch, flat, p_text, shown
from millstream.report.drawing import PALETTE, Drawing
from millstream.report.figures import draw
from millstream.report.results import Difference, Interval, ModelResult, Results
from millstream.report.tables import COLUMNS, GROUPS, Column
from millstream.store.layout import publish

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError:
    raise MissingExtra("The report needs the package 'jinja2': pip install 'millstream[report]'") from None

_MAX_TEXT = 400  # characters shown of a question or an answer
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}


def write_report(results: Results, out: Path, *, drawings: Sequence[Drawing] | None = None) -> Path:
    """The report as the file `out`, whole or not at all; with these figures, if they are drawn already.

    >>> write_report(read_results("run"), Path("run/report.html"))  # doctest: +SKIP
    """
    drawings = draw(results) if drawings is None else drawings
    return render(
        "template.html.j2",
        out,
        results=results,
        title=_title(results),
        facts=_facts(results),
        columns=[(column, _chance(column, results)) for column in COLUMNS],
        groups=GROUPS,
        rows=_comparison(results.models),
        differences=_differences(results.differences),
        figures=inlined(drawings),
        not_drawn=[drawing for drawing in drawings if not drawing.figure],
        verdicts=_verdicts(results.data),
        parts=_parts(results.data),
        card=flat({name: value for name, value in results.data.items() if name not in ("verdicts", "parts")}),
        settings=flat(results.config),
        environment=flat(results.environment),
    )


def render(template: str, out: Path, **values: object) -> Path:
    """A template of this folder as the file `out`, in the colours of the figures."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(shown=shown, chance=p_text, clipped=_clipped)
    page = environment.get_template(template).render(palette=PALETTE, **values)
    out.parent.mkdir(parents=True, exist_ok=True)
    publish(out, page.encode("utf-8", "replace"))
    return out


def inlined(drawings: Iterable[Drawing]) -> list[tuple[Drawing, Markup]]:
    """Those that were drawn, as parts of a page."""
    return [(drawing, inline_svg(drawing)) for drawing in drawings if drawing.figure]


def inline_svg(drawing: Drawing) -> Markup:
    """The figure as a part of a page: in the page's colours and letters, with ids that no other figure has."""
    text = drawing.svg(transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would hold for the whole page
    text = re.sub(r"<[^>]*>", lambda found: _inline_tag(found[0], drawing.name), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return Markup(text)  # matplotlib has escaped what was data


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


@dataclass(frozen=True)
class ShownCell:
    """A number of a table that can be sorted."""

    text: str
    interval: str  # below the text
    order: float | str  # what its column is sorted by; empty: last


@dataclass(frozen=True)
class Plot:
    """A dot with its interval and a line of reference, in percent of the width."""

    low: float
    value: float
    high: float
    reference: float


def _comparison(models: Sequence[ModelResult]) -> list[tuple[ModelResult, Plot | None, list[ShownCell]]]:
    plots = plots_of([model.auroc for model in models], reference=0.5)
    cells = [[cell_of(column.value(model), column.spec) for column in COLUMNS] for model in models]
    return list(zip(models, plots, cells, strict=True))


def _differences(differences: Sequence[Difference]) -> list[tuple[Difference, Plot | None, ShownCell]]:
    plots = plots_of([difference.auroc for difference in differences], reference=0.0)
    cells = [cell_of(difference.auroc, "+.3f") for difference in differences]
    return list(zip(differences, plots, cells, strict=True))


def cell_of(value: Cell, spec: str) -> ShownCell:
    number = value.value if isinstance(value, Interval) else value
    text = shown(value, spec)
    interval = f"{shown(value.low, spec)}, {shown(value.high, spec)}" if isinstance(value, Interval) else ""
    order = "" if text == DASH or number is None else number
    return ShownCell(text, interval if text != DASH else "", order)


def plots_of(intervals: Sequence[Interval], *, reference: float) -> list[Plot | None]:
    """All on one scale; None where there is no number."""
    numbers = [number for interval in intervals for number in (interval.low, interval.value, interval.high)]
    numbers = [number for number in (*numbers, reference) if math.isfinite(number)]
    low, width = min(numbers), (max(numbers) - min(numbers)) or 1.0

    def place(number: float) -> float:
        return round(4 + 92 * (number - low) / width, 2)

    return [
        Plot(*(place(number) for number in (i.low, i.value, i.high, reference)))
        if all(map(math.isfinite, (i.low, i.value, i.high)))
        else None
        for i in intervals
    ]


def _chance(column: Column, results: Results) -> str:
    """What a detector that knows nothing would have, for the measures where that needs saying."""
    level = {"auroc": 0.5, "aupr": results.prevalence}.get(column.name)
    return "" if level is None else f"chance {shown(level)}"


def _title(results: Results) -> str:
    store = results.data.get("store")
    return Path(str(store)).name if store else results.run.name


def _facts(results: Results) -> dict[str, str]:
    """What was run, for the line below the title."""
    records = results.data.get("records")
    facts = {
        "store": results.data.get("store"),
        "language model": results.data.get("language_model"),
        "questions": f"{records:,} in all, {results.num_test:,} to test"
        if isinstance(records, int)
        else results.num_test,
        "run": results.run,
        "date": results.environment.get("time"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _verdicts(data: Mapping[str, object]) -> list[tuple[str, int, str]]:
    """Each verdict, how many records have it, and their share."""
    counts = {name: count for name, count in branch(data.get("verdicts")).items() if isinstance(count, int)}
    total = sum(counts.values()) or 1
    return [(name, count, f"{count / total:.1%}") for name, count in counts.items()]


def _parts(data: Mapping[str, object]) -> tuple[list[str], list[tuple[str, list[object]]]]:
    """The columns of the parts' table, and its rows."""
    parts = {name: branch(part) for name, part in branch(data.get("parts")).items()}
    columns = list(dict.fromkeys(column for part in parts.values() for column in part))
    return columns, [(name, [part.get(column) for column in columns]) for name, part in parts.items()]


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
