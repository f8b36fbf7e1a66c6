"""The report on classifiers as a page, and as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from millstream.core.console import format_bytes
from millstream.reads.report.evaluate import read_results
from millstream.reads.report.figures import draw
from millstream.reads.report.judge import VAL
from millstream.reads.report.results import TRAIN, ReadClass, ReadResults, class_rows, confused_pairs
from millstream.reads.report.tables import (
    ABOUT,
    CLASSES,
    COSTS,
    PAIRS,
    RANKS,
    TARGETS,
    Scored,
    comparison,
    comparison_text,
    rows_of,
    summary,
    tables,
)
from millstream.report.drawing import Drawing
from millstream.report.page import (
    Block,
    FiguresBlock,
    FoldBlock,
    HeadingBlock,
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
from millstream.report.run import Report
from millstream.report.tables import Column, Table, branch, counted

MAX_ROWS = 300  # classes in a table of the page: those with the lowest F1; all are in tables/classes.csv
MAX_PAIRS = 15
_CARD_TABLES = ("classes", "ranks", "files", "formats", "bases", "bytes", "reads", "no_class")  # shown as tables
_LEFT_OUT = "Left out: no classifier was evaluated."


def report_of_classifiers(run: Path) -> Report:
    results = read_results(run)
    return Report(
        text=comparison_text(results),
        findings=results.findings,
        summary=summary(results),
        compared=counted(len(results.models), "classifier"),
        draw=partial(draw, results),
        write_page=lambda out, drawings: write_report(results, out, drawings=drawings),
        tables=partial(tables, results),
    )


def write_report(results: ReadResults, out: Path, *, drawings: Sequence[Drawing] | None = None) -> Path:
    """The report as the file `out`, whole or not at all; with these figures, if they are already drawn.

    >>> write_report(read_results("run"), Path("run/report.html"))  # doctest: +SKIP
    """
    drawings = draw(results) if drawings is None else drawings
    files = _files(results.data, TRAIN)
    page = Page(
        what="classifier",
        title=files[0] if files else results.run.name,
        facts=_facts(results),
        findings=results.findings,
        sections=list(_sections(results, drawings)),
        settings=results.config,
        environment=results.environment,
        not_run=results.missing,
    )
    return write_page(page, out)


def _sections(results: ReadResults, drawings: Sequence[Drawing]) -> list[Section]:
    matrices = [drawing for drawing in drawings if drawing.name.startswith("confusion")]
    others = [drawing for drawing in drawings if drawing not in matrices]
    ranks = Table(RANKS, rows_of(results, lambda found: found.ranks))
    rank_text = (
        "At each rank, the taxon whose classes have the highest total probability. Reads of classes without a taxon "
        "at the rank are excluded."
    )
    no_ranks = "Left out: the mapping has no ranks. Add a column genus, or set taxonomy= to the NCBI taxonomy dump."
    difference_text = (
        "Macro F1 of the best classifier on validation minus macro F1 of each other one, on the same "
        f"{results.what}: paired bootstrap, p corrected for all comparisons (Holm)."
    )
    figure_text = "Solid line: the best classifier on validation. Curves are of the first seed."
    costs = Table((*ABOUT, *COSTS), [Scored(VAL, model, model.splits[VAL]) for model in results.models])
    cost = TableBlock(table=costs.known().without("part", "title", "num_reads", "num_unknown"), label="Cost")
    return [
        Section("comparison", "Comparison", _comparison_blocks(results), _LEFT_OUT),
        Section(
            "ranks",
            "By rank",
            [TextBlock(rank_text), TableBlock(table=ranks, label="Results by rank")] if ranks.rows else [],
            no_ranks,
            "Ranks",
        ),
        Section("thresholds", "By threshold", _threshold_blocks(results), _LEFT_OUT, "Thresholds"),
        difference_section(
            results.differences,
            what="classifier",
            key="macro_f1",
            title="macro F1",
            text=difference_text,
            with_split=True,
        ),
        Section("classes", "By class", _class_blocks(results), _LEFT_OUT, "Classes"),
        Section("confusion", "Confusion", [FiguresBlock(matrices, is_large=True), *_pair_blocks(results)]),
        Section(
            "figures",
            "Figures",
            [*([TextBlock(figure_text)] if any(one.figure for one in others) else []), FiguresBlock(others)],
        ),
        Section("cost", "Cost", [cost] if results.models else [], _LEFT_OUT),
        Section("data", "Data", _data_blocks(results)),
    ]


def _comparison_blocks(results: ReadResults) -> list[Block]:
    if not results.models:
        return []
    table = comparison(results).known().without("part", "title", "num_reads", "num_unknown")
    table = table.without(*(column.key for column in COSTS))
    # One scale for all, so that splits can be compared by eye.
    scale = Scale.of([row.found.macro_f1 for row in table.rows], reference=1.0)
    blocks: list[Block] = [
        TextBlock(
            f"Best on validation first. Small numbers are 95 % intervals over {results.what}, with the same draws for "
            "all classifiers. Epochs and thresholds were chosen on validation only. Reads of no known class are "
            "excluded from macro F1 and accuracy. Click a heading to sort."
        )
    ]
    for split in results.splits:
        found = results.models[0].splits[split]
        unknown = f" ({found.num_unknown:,} of no known class)" if found.num_unknown else ""
        blocks += [
            HeadingBlock(f"{split}: {found.num_reads:,} {results.what}{unknown}, {found.num_classes} classes"),
            TableBlock(
                table=replace(table, rows=[row for row in table.rows if row.split == split]),
                label=f"Comparison on {split}",
                css="comparison",
                sort=("macro_f1", "descending") if split == VAL else ("", ""),
                plot=("macro_f1", scale),
                row_css=lambda _: "trained",
                row_note=lambda row: row.model.title,
            ),
        ]
    words = {column.title: column.hint for column in table.columns if column.hint}
    return [*blocks, WordsBlock("What the columns mean", [words])]


def _threshold_blocks(results: ReadResults) -> list[Block]:
    if not results.models:
        return []
    best = results.models[0].name
    text = (
        f"What {best} (first seed) classifies when only reads above a threshold are: the lowest threshold with the "
        "given precision on validation. Classified reads of no known class are errors."
    )
    rows = [row for row in rows_of(results, lambda found: found.targets) if row[1] == best]
    table = Table(TARGETS, rows).without("model")
    return [TextBlock(text), TableBlock(table=table, label="Results by threshold", css="thresholds")]


def _class_blocks(results: ReadResults) -> list[Block]:
    if not results.models:
        return []
    best = results.models[0]
    text = (
        f"Classes as {best.name}, the best on validation, assigns them (first seed, all reads classified), the hardest "
        "first. Precision, recall and F1 are over reads of known classes."
    )
    keys = ("name", "class_id", "f1", "precision", "recall", "support", "called", "unknown_called", "training_reads")
    blocks: list[Block] = [TextBlock(text)]
    for place, split in enumerate(results.splits):
        rows = [(split, best.name, row) for row in class_rows(results, best.splits[split])]
        rows.sort(key=lambda row: (row[2].f1 != row[2].f1, row[2].f1, row[2].of.name))  # without F1: last
        block = TableBlock(
            table=Table(CLASSES, rows[:MAX_ROWS]).only(*keys, "worst"),
            label=f"Classes of {split}",
            css="by-class",
            is_tall=True,
            sort=("f1", "ascending"),
            row_note=lambda row: f"tax id {row[2].of.tax_id}" if row[2].of.tax_id else "",
        )
        left_out = len(rows) - MAX_ROWS
        more = TextBlock(f"{left_out} classes with a higher F1 are in tables/classes.csv.", "missing")
        blocks.append(FoldBlock(split, [block, *([more] if left_out > 0 else [])], is_open=place == 0))
    return blocks


def _pair_blocks(results: ReadResults) -> list[Block]:
    blocks: list[Block] = []
    for place, split in enumerate(results.splits if results.models else []):
        best = results.models[0]
        pairs = [(split, best.name, pair) for pair in confused_pairs(results, best.splits[split], most=MAX_PAIRS)]
        label = f"Most confused pairs of {split}"
        table = Table(PAIRS, pairs).without("model", "part")
        block = TableBlock(table=table, label=label, css="confused", sort=("reads", "descending"))
        nothing = TextBlock("None: every read is classified correctly.", "missing")
        blocks.append(FoldBlock(label, [block if pairs else nothing], is_open=place == 0))
    return blocks


def _data_blocks(results: ReadResults) -> list[Block]:
    data = results.data
    counts = {name: branch(data.get(name)) for name in ("reads", "no_class", "bases", "bytes")}
    titles = {"reads": "reads", "no_class": "of no known class", "bases": "bases", "bytes": "bytes"}
    columns: list[Column[str]] = [
        Column("split", "split", "", lambda split: split, ""),
        Column("files", "files", "", lambda split: ", ".join(_files(data, split)) or "held out from train", ""),
        *(Column(name, titles[name], "", partial(_count, counts[name]), ",d") for name in titles),
    ]
    splits = list(dict.fromkeys(split for one in results.classes for split in one.reads))
    per_class: list[Column[ReadClass]] = [
        Column("name", "class", "", lambda one: one.name, ""),
        Column("class_id", "id", "", lambda one: one.class_id, "d"),
        *(Column[ReadClass](split, split, "", partial(_reads_of, split), ",d") for split in splits),
    ]
    classes = Table(per_class, results.classes[:MAX_ROWS])
    side: list[list[Block]] = [
        [HeadingBlock("Splits"), TableBlock(table=Table(columns, list(counts["reads"])), label="Splits")],
        [HeadingBlock("Reads per class"), TableBlock(table=classes, label="Reads per class", is_tall=True)],
    ]
    card = PairsBlock({name: value for name, value in data.items() if name not in _CARD_TABLES})
    return [SideBlock(side), card]


def _facts(results: ReadResults) -> dict[str, object]:
    """What was run, for the line below the title."""
    reads, peak = branch(results.data.get("reads")), max((held for _, held in results.memory), default=None)
    memory = None if peak is None else f"{format_bytes(peak)} at most"
    if memory and results.budget is not None:
        memory += f", of {format_bytes(results.budget)}"
    return {
        "classes": len(results.classes),
        "reads": ", ".join(f"{name} {count:,}" for name, count in reads.items() if isinstance(count, int)) or None,
        "read pairs": "mates are classified together" if results.data.get("mates") == 2 else None,
        "memory": memory,
        "run": results.run,
        "date": results.environment.get("time"),
    }


def _files(data: Mapping[str, object], split: str) -> list[str]:
    """The names of the files of a split; none if it was held out."""
    files = branch(data.get("files")).get(split)
    return [Path(str(path)).name for path in cast("list[object]", files)] if isinstance(files, list) else []


def _count(counts: Mapping[str, object], name: str) -> int | None:
    count = counts.get(name)
    return count if isinstance(count, int) else None


def _reads_of(split: str, one: ReadClass) -> int | None:
    return one.reads.get(split)
