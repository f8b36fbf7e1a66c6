"""What a run of classifiers found, as one HTML page, made with what makes the page of detectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from millstream.console import format_bytes
from millstream.report.cells import branch, flat
from millstream.report.drawing import Drawing
from millstream.report.page import Plot, ShownCell, cell_of, inlined, plots_of, render
from millstream.report.reads.figures import draw, part_names
from millstream.report.reads.per_class import ClassRow, Pair, class_rows, confused_pairs
from millstream.report.reads.results import TRAIN, VAL, ModelResult, PartResult, RankResult, ReadClass, ReadResults
from millstream.report.reads.tables import CARD_TABLES, COLUMNS, COSTS, GROUPS, Column, columns_of

MAX_ROWS = 300  # classes in a table of the page: those with the lowest F1, all others are in tables/classes.csv
MAX_PAIRS = 15


@dataclass(frozen=True)
class _PartTable:
    """The comparison on one part."""

    part: str
    name: str  # as an id
    found: PartResult  # of the best model
    rows: Sequence[tuple[ModelResult, Plot | None, Sequence[ShownCell]]]


@dataclass(frozen=True)
class _ClassTable:
    """The best model on one part, class by class."""

    part: str
    name: str
    rows: Sequence[tuple[ClassRow, Sequence[ShownCell]]]
    num_left_out: int
    pairs: Sequence[tuple[Pair, ShownCell]]


def write_report(results: ReadResults, out: Path, *, drawings: Sequence[Drawing] | None = None) -> Path:
    """The report as the file `out`, whole or not at all; with these figures, if they are drawn already.

    >>> write_report(read_results("run"), Path("run/report.html"))  # doctest: +SKIP
    """
    drawings = draw(results) if drawings is None else drawings
    matrices = [drawing for drawing in drawings if drawing.name.startswith("confusion")]
    others = [drawing for drawing in drawings if drawing not in matrices]
    columns, costs = columns_of(results, COLUMNS), columns_of(results, COSTS)
    names = part_names(results.parts)
    differences = [(one, cell_of(one.macro_f1, "+.3f")) for one in results.differences]
    return render(
        "reads/template.html.j2",
        out,
        results=results,
        best=results.models[0] if results.models else None,
        title=_title(results),
        facts=_facts(results),
        columns=columns,
        groups=_groups(columns),
        comparison=_comparison(results, columns, names),
        costs=costs,
        cost_rows=[(model, _cells(costs, model, model.parts[VAL])) for model in results.models],
        ranks=_ranks(results),
        thresholds=_thresholds(results),
        differences=list(
            zip(differences, plots_of([one.macro_f1 for one, _ in differences], reference=0.0), strict=True)
        )
        if differences
        else [],
        classes=_classes(results, names),
        matrices=inlined(matrices),
        no_matrices=[drawing for drawing in matrices if not drawing.figure],
        figures=inlined(others),
        not_drawn=[drawing for drawing in others if not drawing.figure],
        parts=_parts(results.data),
        read_counts=_read_counts(results.classes),
        card=flat({name: value for name, value in results.data.items() if name not in CARD_TABLES}),
        settings=flat(results.config),
        environment=flat(results.environment),
    )


def _cells(columns: Sequence[Column], model: ModelResult, found: PartResult) -> list[ShownCell]:
    return [cell_of(column.value(model, found), column.spec) for column in columns]


def _comparison(results: ReadResults, columns: Sequence[Column], names: Mapping[str, str]) -> list[_PartTable]:
    """All plots on one scale, so that parts can be compared by eye."""
    if not results.models:
        return []
    asked = [(part, model) for part in results.parts for model in results.models]
    intervals = [model.parts[part].macro_f1 for part, model in asked]
    plots = dict(zip(((part, model.name) for part, model in asked), plots_of(intervals, reference=1.0), strict=True))
    return [
        _PartTable(
            part,
            names[part],
            results.models[0].parts[part],
            [(model, plots[part, model.name], _cells(columns, model, model.parts[part])) for model in results.models],
        )
        for part in results.parts
    ]


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Headings over columns, of which some may have been left out."""
    shown = {column.name for column in columns}
    groups: list[tuple[str, int]] = []
    start = 0
    for group, span in GROUPS.items():
        left = sum(column.name in shown for column in COLUMNS[start : start + span])
        groups += [(group, left)] if left else []
        start += span
    return groups


def _ranks(results: ReadResults) -> list[tuple[str, ModelResult, RankResult, ShownCell, ShownCell]]:
    return [
        (part, model, one, cell_of(one.accuracy, ".3f"), cell_of(one.macro_f1, ".3f"))
        for part in results.parts
        for model in results.models
        for one in model.parts[part].ranks
    ]


def _thresholds(results: ReadResults) -> list[tuple[str, list[ShownCell]]]:
    """Of the best model, for each part."""
    if not results.models:
        return []
    targets = [(part, one) for part in results.parts for one in results.models[0].parts[part].targets]
    return [
        (part, [cell_of(one.precision, "g"), *(cell_of(cell, ".3f") for cell in (one.threshold, *one.numbers))])
        for part, one in targets
    ]


def _classes(results: ReadResults, names: Mapping[str, str]) -> list[_ClassTable]:
    if not results.models:
        return []
    tables: list[_ClassTable] = []
    for part in results.parts:
        found = results.models[0].parts[part]
        rows = class_rows(results, found)
        rows.sort(key=lambda row: (row.f1 != row.f1, row.f1, row.of.name))  # what has no F1 is last
        pairs = confused_pairs(results, found, most=MAX_PAIRS)
        tables.append(
            _ClassTable(
                part,
                names[part],
                [(row, _class_cells(row)) for row in rows[:MAX_ROWS]],
                num_left_out=max(len(rows) - MAX_ROWS, 0),
                pairs=[(pair, cell_of(pair.share, ".1%")) for pair in pairs],
            )
        )
    return tables


def _class_cells(row: ClassRow) -> list[ShownCell]:
    numbers = [cell_of(value, ".3f") for value in (row.f1, row.precision, row.recall)]
    return [*numbers, *(cell_of(count, ",d") for count in (row.support, row.called, row.unknown, row.training))]


def _title(results: ReadResults) -> str:
    files = _files(results.data, TRAIN)
    return files[0] if files else results.run.name


def _files(data: Mapping[str, object], part: str) -> list[str]:
    """The names of the files of a part; none if it was held out."""
    files = branch(data.get("files")).get(part)
    return [Path(str(path)).name for path in cast("list[object]", files)] if isinstance(files, list) else []


def _facts(results: ReadResults) -> dict[str, str]:
    """What was run, for the line below the title."""
    reads, peak = branch(results.data.get("reads")), max((held for _, held in results.memory), default=None)
    memory = None if peak is None else format_bytes(peak)
    if memory and results.budget is not None:
        memory += f" at most, of {format_bytes(results.budget)}"
    facts = {
        "classes": len(results.classes),
        "reads": ", ".join(f"{name} {count:,}" for name, count in reads.items() if isinstance(count, int)) or None,
        "pairs": "mates are called together" if results.what == "pairs" else None,
        "memory": memory,
        "run": results.run,
        "date": results.environment.get("time"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _parts(data: Mapping[str, object]) -> list[tuple[str, str, list[ShownCell]]]:
    """Each part: its files, and its reads, those of no known class, its bases and bytes."""
    columns = [branch(data.get(name)) for name in ("reads", "no_class", "bases", "bytes")]
    rows: list[tuple[str, str, list[ShownCell]]] = []
    for part in columns[0]:
        counts = [column.get(part) for column in columns]
        names = ", ".join(_files(data, part)) or "held out from train"
        rows.append((part, names, [cell_of(count if isinstance(count, int) else None, ",d") for count in counts]))
    return rows


def _read_counts(classes: Sequence[ReadClass]) -> tuple[list[str], list[tuple[ReadClass, list[ShownCell]]]]:
    """The parts, and the reads of each class in them."""
    parts = list(dict.fromkeys(part for one in classes for part in one.reads))
    return parts, [(one, [cell_of(one.reads.get(part), ",d") for part in parts]) for one in classes[:MAX_ROWS]]
