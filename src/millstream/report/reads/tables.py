"""What a run of classifiers found, as tables: text for a terminal, CSV to compute with, LaTeX for a paper."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from millstream.report.cells import (
    Cell,
    chosen_text,
    csv_text,
    flat,
    latex_table,
    p_text,
    shown,
    spread,
    text_table,
    write_texts,
)
from millstream.report.reads.per_class import class_rows, confused_pairs
from millstream.report.reads.results import GENUS, PRECISION, ModelResult, PartResult, ReadResults

Value = Callable[[ModelResult, PartResult], Cell]
CARD_TABLES = ("classes", "ranks", "files", "formats", "bases", "bytes", "reads", "no_class")  # shown in tables


@dataclass(frozen=True)
class Column:
    """One number of a model on a part: its name in files, its title for people, and how it is written."""

    name: str
    title: str
    hint: str
    value: Value
    spec: str = ".3f"


_AT = f"at the threshold with precision {PRECISION} on validation"
COLUMNS = (
    Column(
        "macro_f1", "macro F1", "mean over the classes that the part has; unknown left out", lambda _, p: p.macro_f1
    ),
    Column("macro_f1_sd", "± sd", "standard deviation of macro F1 over seeds", lambda _, p: p.macro_f1_sd),
    Column("accuracy", "accuracy", "share of right calls; reads of no known class left out", lambda _, p: p.accuracy),
    Column("genus_macro_f1", "genus F1", "macro F1 of the likeliest genus", lambda _, p: rank_f1(p, GENUS)),
    Column("coverage", "coverage", f"share of all reads that are called, {_AT}", lambda _, p: p.coverage),
    Column("precision", "precision", f"share of the called that are right, {_AT}", lambda _, p: p.precision),
    Column("recall", "recall", f"share of known reads that are called rightly, {_AT}", lambda _, p: p.recall),
    Column(
        "unknown_called", "unknown", f"share of unknown reads that are called, {_AT}", lambda _, p: p.unknown_called
    ),
    Column("ece", "ECE", "mean gap between probability and share of right calls", lambda _, p: p.ece),
    Column(
        "confidence", "confidence", "mean probability; well calibrated, it is the accuracy", lambda _, p: p.confidence
    ),
    Column(
        "abundance_l1",
        "abundance L1",
        "of the shares of classes among all calls from the true shares, 0 to 2; half of it is Bray-Curtis",
        lambda _, p: p.abundance_l1,
    ),
)
GROUPS = {"all reads called": 4, f"precision {PRECISION} on validation": 4, "calibration": 2, "profile": 1}
"""How many of the columns, in their order, go under one heading."""

COSTS = (
    Column("parameters", "parameters", "numbers that were fitted", lambda m, _: m.parameters, ",d"),
    Column("seeds", "seeds", "trainings that the numbers are means of", lambda m, _: m.seeds, "d"),
    Column("fit_s", "fit, s", "seconds to fit", lambda m, _: m.fit_s, ",.1f"),
    Column("train_reads_per_s", "training reads/s", "the median over epochs", lambda m, _: m.train_reads_per_s, ",.0f"),
    Column("waiting", "waiting", "share of training that waited for data", lambda m, _: m.waiting, ".1%"),
    Column("score_reads_per_s", "scoring reads/s", "all parts together", lambda m, _: m.score_reads_per_s, ",.0f"),
    Column("memory_mb", "memory, MB", "the most at the end of an epoch", lambda m, _: _mb(m.memory), ",.0f"),
    Column("threshold", "threshold", f"lowest probability {_AT}; of the first seed", lambda m, _: m.threshold),
    Column("chosen", "chosen", "on validation", lambda m, _: chosen_text(m.chosen)),
)
_SHORT = ("macro_f1", "accuracy", "genus_macro_f1", "coverage", "precision", "recall", "ece", "abundance_l1")
"""For a terminal, and for paper."""


def comparison_text(results: ReadResults, *, width: int = 110) -> str:
    """The comparison for a terminal: for every part a line a model, the best on validation first.

    >>> print(comparison_text(read_results("run")))  # doctest: +SKIP
    """
    columns = [column for column in columns_of(results, COLUMNS) if column.name in _SHORT]
    titles = {"macro_f1": "macro F1 [95 %]", "genus_macro_f1": "genus", "abundance_l1": "L1"}
    rows = [["part, model", *(titles.get(one.name, one.title) for one in columns)]]
    for part in results.parts:
        for model in results.models:
            found = model.parts[part]
            cells = [shown(one.value(model, found), one.spec, full=one.name == "macro_f1") for one in columns]
            rows.append([f"{part}  {model.name}", *cells])
    counts = [
        f"{part} {found.num_reads:,}" + (f" ({found.num_unknown:,} of no known class)" if found.num_unknown else "")
        for model in results.models[:1]
        for part, found in ((part, model.parts[part]) for part in results.parts)
    ]
    lines = text_table(rows, width=width)
    lines.append(f"{results.what}: {', '.join(counts)}. Coverage, precision, recall {_AT}. L1: of abundances.")
    return "\n".join(lines) + "\n"


def columns_of(results: ReadResults, columns: Sequence[Column]) -> list[Column]:
    """Those that there is a number for."""
    pairs = [(model, found) for model in results.models for found in model.parts.values()]
    return [one for one in columns if any(one.value(model, found) is not None for model, found in pairs)]


def rank_f1(found: PartResult, rank: str) -> Cell:
    return next((one.macro_f1 for one in found.ranks if one.rank == rank), None)


def write_tables(results: ReadResults, folder: Path) -> list[Path]:
    """`comparison`, `ranks`, `differences`, `data` as .csv and as LaTeX; others as .csv only."""
    paper = [column for column in columns_of(results, COLUMNS) if column.name in _SHORT]
    pairs = [(part, model, model.parts[part]) for part in results.parts for model in results.models]
    ranks = [(part, model.name, one) for part, model, found in pairs for one in found.ranks]
    both = (*COLUMNS, *COSTS)
    card = [*flat({name: value for name, value in results.data.items() if name not in ("classes", "ranks")})]
    texts = {
        "comparison.csv": csv_text(
            spread(
                ["part", "model", "title", "num_reads", "num_unknown", *(one.name for one in both)],
                [
                    [part, m.name, m.title, found.num_reads, found.num_unknown, *(one.value(m, found) for one in both)]
                    for part, m, found in pairs
                ],
            )
        ),
        "comparison.tex": latex_table(
            ["part", "model", *(column.title for column in paper)],
            [
                [part, m.name, *(shown(one.value(m, found), one.spec, full=True) for one in paper)]
                for part, m, found in pairs
            ],
        ),
        "ranks.csv": csv_text(
            spread(
                ["part", "model", "rank", "num_taxa", "accuracy", "macro_f1"],
                [[part, name, one.rank, one.num_taxa, one.accuracy, one.macro_f1] for part, name, one in ranks],
            )
        ),
        "ranks.tex": latex_table(
            ["part", "model", "rank", "accuracy", "macro F1"],
            [
                [part, name, one.rank, shown(one.accuracy, full=True), shown(one.macro_f1, full=True)]
                for part, name, one in ranks
            ],
        ),
        "thresholds.csv": csv_text(_threshold_table(results)),
        "differences.csv": csv_text(
            spread(
                ["part", "a", "b", "macro_f1", "p", "p_holm", "differs"],
                [[d.part, d.a, d.b, d.macro_f1, d.p, d.p_holm, d.differs] for d in results.differences],
            )
        ),
        "differences.tex": latex_table(
            ["part", "a", "b", "macro F1 of a - b", "p, Holm"],
            [[d.part, d.a, d.b, shown(d.macro_f1, "+.3f", full=True), p_text(d.p_holm)] for d in results.differences],
        ),
        "classes.csv": csv_text(_class_table(results)),
        "confused.csv": csv_text(_confused_table(results)),
        "data.csv": csv_text([["name", "value"], *card]),
        "data.tex": latex_table(["", ""], card),
    }
    return write_texts(texts, folder)


def summary(results: ReadResults) -> dict[str, object]:
    """The numbers, without curves and counts of pairs: for `--json`."""
    models = [
        {
            **{name: value for name, value in _own(model).items() if name != "parts"},
            "parts": {part: _numbers(found) for part, found in model.parts.items()},
        }
        for model in results.models
    ]
    return {
        "run": results.run,
        "kind": results.data.get("kind"),
        "best": results.models[0].name if results.models else None,
        "models": models,
        "differences": [asdict(one) for one in results.differences],
        "findings": results.findings,
        "missing": results.missing,
    }


def _own(of: object) -> dict[str, object]:
    return dict(vars(of))


def _numbers(found: PartResult) -> dict[str, object]:
    plain = {name: value for name, value in _own(found).items() if isinstance(value, int | float | None)}
    intervals = {"accuracy": asdict(found.accuracy), "macro_f1": asdict(found.macro_f1)}
    lists = {name: [asdict(one) for one in some] for name, some in (("ranks", found.ranks), ("targets", found.targets))}
    return {**plain, **intervals, **lists}


def _threshold_table(results: ReadResults) -> list[list[object]]:
    rows: list[list[object]] = [["model", "part", "val_precision", "threshold"]]
    rows[0] += ["coverage", "precision", "recall", "unknown_called"]
    for model in results.models:
        for part in results.parts:
            for one in model.parts[part].targets:
                rows.append([model.name, part, one.precision, one.threshold, *one.numbers])
    return rows


def _class_table(results: ReadResults) -> list[list[object]]:
    """Every model, part and class."""
    header = ["model", "part", "class_id", "name", "tax_id", "training_reads", "support", "called"]
    rows: list[list[object]] = [[*header, "precision", "recall", "f1", "unknown_called"]]
    for model in results.models:
        for part in results.parts:
            for row in class_rows(results, model.parts[part]):
                own = row.of
                about: list[object] = [model.name, part, own.class_id, own.name, own.tax_id, row.training, row.support]
                rows.append([*about, row.called, row.precision, row.recall, row.f1, row.unknown])
    return rows


def _confused_table(results: ReadResults) -> list[list[object]]:
    rows: list[list[object]] = [["model", "part", "class", "called", "reads", "share"]]
    for model in results.models:
        for part in results.parts:
            pairs = confused_pairs(results, model.parts[part], most=1000)
            for one in pairs:
                rows.append([model.name, part, one.name, one.called, one.reads, one.share])
    return rows


def _mb(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e6
