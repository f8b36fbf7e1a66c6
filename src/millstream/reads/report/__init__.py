"""The report on classifiers: its columns and the sections of its page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from millstream.core.console import format_bytes
from millstream.reads.report.evaluate import read_results
from millstream.reads.report.figures import draw
from millstream.reads.report.predictions import PRECISION, VAL, AtThreshold, Target
from millstream.reads.report.results import (
    GENUS,
    TRAIN,
    ClassRow,
    ModelResult,
    Pair,
    RankResult,
    ReadClass,
    ReadResults,
    SplitResult,
    class_rows,
    confused_pairs,
)
from millstream.report import Report
from millstream.report.drawing import Drawing
from millstream.report.page import (
    Block,
    FiguresBlock,
    FoldBlock,
    HeadingBlock,
    Scale,
    Section,
    TableBlock,
    TextBlock,
    WordsBlock,
    data_section,
    difference_section,
    figure_section,
)
from millstream.report.tables import Cell, Column, Comparison, Table, branch, chosen_text, grouped, titled

TRAIN_SETTINGS = "data.train=FILE mapping=TABLE"
COMPARISON = Comparison("classifier", "macro_f1", "macro F1", by_split=True)

_AT = f"at the threshold with precision {PRECISION} on validation"
_SHORT = ("macro_f1", "accuracy", "genus_macro_f1", "coverage", "precision", "recall", "ece", "abundance_l1")
"""The measures shown in a terminal and in LaTeX."""
_TERMINAL = {"macro_f1": "macro F1 [95 %]", "genus_macro_f1": "genus", "abundance_l1": "L1"}
MAX_ROWS = 300  # classes in a table of the page, those with the lowest F1; tables/classes.csv has all
MAX_PAIRS = 15
_CARD_TABLES = ("classes", "ranks", "files", "formats", "bases", "bytes", "reads", "no_class")  # shown as tables
_UNCLASSIFIED = "share of reads without evidence for a class; they count as missed"
_LEFT_OUT = "Left out: no classifier was evaluated."
T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """A model on a split."""

    split: str
    model: ModelResult
    found: SplitResult


ABOUT: tuple[Column[Scored], ...] = (
    Column("part", "split", "", lambda s: s.split, ""),
    Column("model", "classifier", "", lambda s: s.model.name, ""),
    Column("title", "title", "", lambda s: s.model.title, ""),
    Column("num_reads", "reads", "", lambda s: s.found.num_reads, ",d"),
    Column("num_unknown", "unknown", "reads of no known class", lambda s: s.found.num_unknown, ",d"),
)
_MEASURES: tuple[Column[Scored], ...] = grouped(
    {
        "without a threshold": (
            Column("unclassified", "unclassified", _UNCLASSIFIED, lambda s: s.found.unclassified or None),
            Column("macro_f1", "macro F1", "mean over the classes of the split", lambda s: s.found.macro_f1),
            Column("macro_f1_sd", "± sd", "standard deviation between seeds", lambda s: s.found.macro_f1_sd),
            Column("accuracy", "accuracy", "share of correctly classified reads", lambda s: s.found.accuracy),
            Column("genus_macro_f1", "genus F1", "macro F1 at genus rank", lambda s: _genus_f1(s.found)),
        ),
        f"precision {PRECISION} on validation": (
            Column("coverage", "coverage", f"share of all reads classified, {_AT}", lambda s: s.found.coverage),
            Column("precision", "precision", f"share of these that are correct, {_AT}", lambda s: s.found.precision),
            Column("recall", "recall", f"share of known reads classified correctly, {_AT}", lambda s: s.found.recall),
            Column(
                "unknown_called",
                "unknown",
                f"share of reads of no known class that are classified, {_AT}",
                lambda s: s.found.unknown_called,
            ),
        ),
        "calibration": (
            Column("ece", "ECE", "mean gap between probability and share of correct reads", lambda s: s.found.ece),
            Column("confidence", "confidence", "mean probability; ideally the accuracy", lambda s: s.found.confidence),
        ),
        "profile": (
            Column(
                "abundance_l1",
                "abundance L1",
                "distance of the abundances among classified reads from the true ones, 0 to 2; half is Bray-Curtis",
                lambda s: s.found.abundance_l1,
            ),
        ),
    }
)
COSTS: tuple[Column[Scored], ...] = (
    Column("parameters", "parameters", "number of fitted parameters", lambda s: s.model.parameters, ",d"),
    Column("seeds", "seeds", "training runs that the numbers are means of", lambda s: s.model.seeds, "d"),
    Column("fit_s", "fit, s", "seconds to fit", lambda s: s.model.fit_s, ",.1f"),
    Column("train_reads_per_s", "training reads/s", "median over epochs", lambda s: s.model.train_reads_per_s, ",.0f"),
    Column("waiting", "waiting", "share of training time spent waiting for data", lambda s: s.model.waiting, ".1%"),
    Column("score_reads_per_s", "scoring reads/s", "over all splits", lambda s: s.model.score_reads_per_s, ",.0f"),
    Column("memory_mb", "memory, MB", "maximum at the end of an epoch", lambda s: _mb(s.model.memory), ",.0f"),
    Column("threshold", "threshold", f"lowest probability {_AT}; first seed", lambda s: s.model.threshold),
    Column("chosen", "chosen", "hyperparameters chosen on validation", lambda s: chosen_text(s.model.chosen), ""),
)
# In the tables below, a row is a split, the name of a model, and a result of the model on the split.
_SPLIT: Column[Any] = Column("part", "split", "", lambda row: row[0], "")
_MODEL: Column[Any] = Column("model", "classifier", "", lambda row: row[1], "")
RANKS: tuple[Column[tuple[str, str, RankResult]], ...] = (
    _SPLIT,
    _MODEL,
    Column("rank", "rank", "", lambda row: row[2].rank, ""),
    Column("num_taxa", "taxa", "taxa with reads in the split", lambda row: row[2].num_taxa, "d"),
    Column("accuracy", "accuracy", "share of correctly classified reads", lambda row: row[2].accuracy),
    Column("macro_f1", "macro F1", "mean over these taxa", lambda row: row[2].macro_f1),
)
TARGETS: tuple[Column[tuple[str, str, Target]], ...] = (
    _MODEL,
    _SPLIT,
    Column("val_precision", "precision on validation", "target of the threshold", lambda row: row[2].precision, "g"),
    Column("threshold", "threshold", "0: none is needed; –: none reaches the target", lambda row: row[2].threshold),
    Column("coverage", "coverage", "share of all reads classified", lambda row: _at(row, lambda at: at.coverage)),
    Column("precision", "precision", "share of these that are correct", lambda row: _at(row, lambda at: at.precision)),
    Column("recall", "recall", "share of known reads classified correctly", lambda row: _at(row, lambda at: at.recall)),
    Column(
        "unknown_called",
        "unknown",
        "share of reads of no known class that are classified",
        lambda row: _at(row, lambda at: at.unknown),
    ),
)
CLASSES: tuple[Column[tuple[str, str, ClassRow]], ...] = (
    _MODEL,
    _SPLIT,
    Column("class_id", "id", "", lambda row: row[2].of.class_id, "d"),
    Column("name", "class", "", lambda row: row[2].of.name, ""),
    Column("tax_id", "tax id", "", lambda row: row[2].of.tax_id, "d"),
    Column("training_reads", "training reads", "", lambda row: row[2].training, ",d"),
    Column("support", "reads", "of the class in this split", lambda row: row[2].support, ",d"),
    Column("called", "assigned", "reads assigned to the class, correctly or not", lambda row: row[2].assigned, ",d"),
    Column("precision", "precision", "share of assigned known reads that are correct", lambda row: row[2].precision),
    Column("recall", "recall", "share of reads of the class assigned to it", lambda row: row[2].recall),
    Column("f1", "F1", "", lambda row: row[2].f1),
    Column("unknown_called", "unknown", "assigned reads of no known class", lambda row: row[2].unknown, ",d"),
    Column("worst", "most often confused with", "", lambda row: row[2].confused_with, ""),
)
PAIRS: tuple[Column[tuple[str, str, Pair]], ...] = (
    _MODEL,
    _SPLIT,
    Column("class", "class", "", lambda row: row[2].name, ""),
    Column("called", "assigned to", "", lambda row: row[2].assigned, ""),
    Column("reads", "reads", "of the class with this assignment", lambda row: row[2].reads, ",d"),
    Column("share", "share", "of the class", lambda row: row[2].share, ".1%"),
    Column("genus", "same genus", "", lambda row: row[2].same_genus, ""),
)


def report(run: Path) -> Report:
    """The report on the classifiers of a run."""
    return report_on(read_results(run))


def report_on(results: ReadResults) -> Report:
    """The report on results.

    >>> report_on(read_results("run")).write(Path("run/report.html"))  # doctest: +SKIP
    """
    models, files = comparison(results), _files(results.data, TRAIN)
    return Report(
        results=results,
        comparison=COMPARISON,
        num_models=len(results.models),
        text=comparison_text(results),
        json={
            "kind": results.data.get("kind"),
            "best": results.models[0].name if results.models else None,
            "models": [_numbers_of(model) for model in results.models],
            "missing": results.missing,
        },
        models=models,
        paper=models.known().only("part", "model", *_SHORT),
        card={name: value for name, value in results.data.items() if name not in ("classes", "ranks")},
        more_tables=partial(_tables, results),
        title=files[0] if files else results.path.name,
        facts=_facts(results),
        draw=partial(draw, results),
        sections=partial(_sections, results),
    )


def comparison_text(results: ReadResults, *, width: int = 110) -> str:
    """The comparison for a terminal: one line per split and model, the best on validation first."""
    name: Column[Scored] = Column("name", "split, model", "", lambda s: f"{s.split}  {s.model.name}", "")
    table = comparison(results).known().only(*_SHORT)
    lines = Table([name, *titled(table.columns, _TERMINAL)], table.rows).text(width=width, full=["macro_f1"])
    counts = [
        f"{split} {found.num_reads:,}" + (f" ({found.num_unknown:,} of no known class)" if found.num_unknown else "")
        for model in results.models[:1]
        for split, found in ((split, model.splits[split]) for split in results.splits)
    ]
    lines.append(
        f"{results.what}: {', '.join(counts)}. Coverage, precision, recall {_AT}. L1: error of the abundances "
        "among classified reads."
    )
    if any(found.unclassified for model in results.models for found in model.splits.values()):
        lines.append(f"Unclassified {results.what} (no evidence for a class) count as missed.")
    return "\n".join(lines) + "\n"


def _tables(results: ReadResults) -> dict[str, str]:
    """Ranks, thresholds, classes and confused pairs."""
    ranks = Table(RANKS, rows_of(results, lambda found: found.ranks))

    def by_model(of: Callable[[SplitResult], Iterable[T]]) -> list[tuple[str, str, T]]:
        order = [model.name for model in results.models]
        return sorted(rows_of(results, of), key=lambda row: order.index(row[1]))

    classes = Table(CLASSES, by_model(partial(class_rows, results)))
    return {
        "ranks.csv": ranks.csv(),
        "ranks.tex": ranks.without("num_taxa").latex(),
        "thresholds.csv": Table(TARGETS, by_model(lambda found: found.targets)).csv(),
        "classes.csv": classes.without("worst").csv(),
        "confused.csv": Table(PAIRS, by_model(partial(confused_pairs, results, most=1000))).without("genus").csv(),
    }


def comparison(results: ReadResults) -> Table[Scored]:
    rows = [Scored(split, model, model.splits[split]) for split in results.splits for model in results.models]
    return Table((*ABOUT, *_MEASURES, *COSTS), rows)


def rows_of(results: ReadResults, of: Callable[[SplitResult], Iterable[T]]) -> list[tuple[str, str, T]]:
    return [
        (split, model.name, one)
        for split in results.splits
        for model in results.models
        for one in of(model.splits[split])
    ]


def _genus_f1(found: SplitResult) -> Cell:
    return next((one.macro_f1 for one in found.ranks if one.rank == GENUS), None)


def _at(row: tuple[str, str, Target], value: Callable[[AtThreshold], float]) -> float | None:
    at = row[2].at
    return None if at is None else value(at)


def _mb(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e6


def _numbers_of(model: ModelResult) -> dict[str, object]:
    """The numbers of a model, without curves and counts of pairs."""
    own = {name: value for name, value in vars(model).items() if name != "splits"}
    return {**own, "parts": {split: _numbers(found) for split, found in model.splits.items()}}


def _numbers(found: SplitResult) -> dict[str, object]:
    plain = {name: value for name, value in vars(found).items() if isinstance(value, int | float | None)}
    intervals = {"accuracy": asdict(found.accuracy), "macro_f1": asdict(found.macro_f1)}
    lists = {name: [asdict(one) for one in some] for name, some in (("ranks", found.ranks), ("targets", found.targets))}
    return {**plain, **intervals, **lists}


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
        "Macro F1 of the best classifier on validation minus macro F1 of each other one, on the same " + results.what
    )
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
        difference_section(results.differences, COMPARISON, text=difference_text),
        Section("classes", "By class", _class_blocks(results), _LEFT_OUT, "Classes"),
        Section("confusion", "Confusion", [FiguresBlock(matrices, is_large=True), *_pair_blocks(results)]),
        figure_section(others, text="Solid line: the best classifier on validation. Curves are of the first seed."),
        Section("cost", "Cost", [cost] if results.models else [], _LEFT_OUT),
        _data_section(results),
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
            "excluded from macro F1 and accuracy; unclassified reads count as missed. Click a heading to sort."
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
        f"Reads that {best} (first seed) classifies above a threshold: the lowest threshold with the given precision "
        "on validation. Classified reads of no known class are errors."
    )
    rows = [row for row in rows_of(results, lambda found: found.targets) if row[1] == best]
    table = Table(TARGETS, rows).without("model")
    return [TextBlock(text), TableBlock(table=table, label="Results by threshold", css="thresholds")]


def _class_blocks(results: ReadResults) -> list[Block]:
    if not results.models:
        return []
    best = results.models[0]
    text = (
        f"Classes as {best.name}, the best on validation, assigns them (first seed, without a threshold), the hardest "
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
        nothing = TextBlock("None: every assigned read is correct.", "missing")
        blocks.append(FoldBlock(label, [block if pairs else nothing], is_open=place == 0))
    return blocks


def _data_section(results: ReadResults) -> Section:
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
    tables = {"Splits": Table(columns, list(counts["reads"])), "Reads per class": classes}
    return data_section(data, tables, shown=_CARD_TABLES, tall=["Reads per class"])


def _facts(results: ReadResults) -> dict[str, object]:
    """The line below the title."""
    reads, peak = branch(results.data.get("reads")), max((held for _, held in results.metrics.memory), default=None)
    memory = None if peak is None else f"{format_bytes(peak)} at most"
    if memory and results.metrics.budget is not None:
        memory += f", of {format_bytes(results.metrics.budget)}"
    return {
        "classes": len(results.classes),
        "reads": ", ".join(f"{name} {count:,}" for name, count in reads.items() if isinstance(count, int)) or None,
        "read pairs": "mates are classified together" if results.data.get("mates") == 2 else None,
        "memory": memory,
        "run": results.path,
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
