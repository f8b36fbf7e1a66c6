"""The columns of a report on classifiers, and its tables as text, as files and as JSON."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from millstream.reads.report.judge import PRECISION, AtThreshold, Target
from millstream.reads.report.results import (
    GENUS,
    ClassRow,
    ModelResult,
    Pair,
    RankResult,
    ReadResults,
    SplitResult,
    class_rows,
    confused_pairs,
)
from millstream.report.tables import Cell, Column, Table, card_table, chosen_text, difference_table, grouped, titled

_AT = f"at the threshold with precision {PRECISION} on validation"
_SHORT = ("macro_f1", "accuracy", "genus_macro_f1", "coverage", "precision", "recall", "ece", "abundance_l1")
"""The measures for a terminal and for a paper."""
_TERMINAL = {"macro_f1": "macro F1 [95 %]", "genus_macro_f1": "genus", "abundance_l1": "L1"}
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
        "all reads classified": (
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
                "distance of the predicted from the true class abundances, 0 to 2; half of it is Bray-Curtis",
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
# Below, a row is a split, the name of a model, and one of several things the model has on the split.
_SPLIT: Column[Any] = Column("part", "split", "", lambda row: row[0], "")
_MODEL: Column[Any] = Column("model", "classifier", "", lambda row: row[1], "")
RANKS: tuple[Column[tuple[str, str, RankResult]], ...] = (
    _SPLIT,
    _MODEL,
    Column("rank", "rank", "", lambda row: row[2].rank, ""),
    Column("num_taxa", "taxa", "taxa that the split has reads of", lambda row: row[2].num_taxa, "d"),
    Column("accuracy", "accuracy", "share of correctly classified reads", lambda row: row[2].accuracy),
    Column("macro_f1", "macro F1", "mean over these taxa", lambda row: row[2].macro_f1),
)
TARGETS: tuple[Column[tuple[str, str, Target]], ...] = (
    _MODEL,
    _SPLIT,
    Column("val_precision", "precision on validation", "target of the threshold", lambda row: row[2].precision, "g"),
    Column(
        "threshold",
        "threshold",
        "0: all reads are classified; –: no threshold reaches the target",
        lambda row: row[2].threshold,
    ),
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
    Column("reads", "reads", "of the class that are assigned so", lambda row: row[2].reads, ",d"),
    Column("share", "share", "of the class", lambda row: row[2].share, ".1%"),
    Column("genus", "same genus", "", lambda row: row[2].same_genus, ""),
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
    lines.append(f"{results.what}: {', '.join(counts)}. Coverage, precision, recall {_AT}. L1: abundance error.")
    return "\n".join(lines) + "\n"


def summary(results: ReadResults) -> dict[str, object]:
    """What `--json` prints: the numbers, without curves and counts of pairs."""
    models = [
        {
            **{name: value for name, value in vars(model).items() if name != "splits"},
            "parts": {split: _numbers(found) for split, found in model.splits.items()},
        }
        for model in results.models
    ]
    renamed = {"split": "part", "value": "macro_f1"}
    return {
        "run": results.run,
        "kind": results.data.get("kind"),
        "best": results.models[0].name if results.models else None,
        "models": models,
        "differences": [
            {renamed.get(name, name): value for name, value in asdict(one).items()} for one in results.differences
        ],
        "findings": results.findings,
        "missing": results.missing,
    }


def tables(results: ReadResults) -> dict[str, str]:
    """`comparison`, `ranks`, `differences`, `data` as .csv and as LaTeX, others as .csv only, by file name."""
    whole = comparison(results)
    ranks = Table(RANKS, rows_of(results, lambda found: found.ranks))
    differences = difference_table(
        results.differences, what="classifier", key="macro_f1", title="macro F1", with_split=True
    )
    card = card_table({name: value for name, value in results.data.items() if name not in ("classes", "ranks")})

    def by_model(of: Callable[[SplitResult], Iterable[T]]) -> list[tuple[str, str, T]]:
        order = [model.name for model in results.models]
        return sorted(rows_of(results, of), key=lambda row: order.index(row[1]))

    classes = Table(CLASSES, by_model(partial(class_rows, results)))
    return {
        "comparison.csv": whole.csv(),
        "comparison.tex": whole.known().only("part", "model", *_SHORT).latex(),
        "ranks.csv": ranks.csv(),
        "ranks.tex": ranks.without("num_taxa").latex(),
        "thresholds.csv": Table(TARGETS, by_model(lambda found: found.targets)).csv(),
        "differences.csv": differences.csv(),
        "differences.tex": differences.without("differs").latex(),
        "classes.csv": classes.without("worst").csv(),
        "confused.csv": Table(PAIRS, by_model(partial(confused_pairs, results, most=1000))).without("genus").csv(),
        "data.csv": card.csv(),
        "data.tex": card.latex(),
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


def _numbers(found: SplitResult) -> dict[str, object]:
    plain = {name: value for name, value in vars(found).items() if isinstance(value, int | float | None)}
    intervals = {"accuracy": asdict(found.accuracy), "macro_f1": asdict(found.macro_f1)}
    lists = {name: [asdict(one) for one in some] for name, some in (("ranks", found.ranks), ("targets", found.targets))}
    return {**plain, **intervals, **lists}
