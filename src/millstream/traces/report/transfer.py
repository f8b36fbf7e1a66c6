"""Transfer: the AUROC of detectors on their own test split and on other stores, as a matrix, a table and a heat map."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from millstream.errors import BadSource
from millstream.report.drawing import INK, LINES, Drawing, new_axes, style
from millstream.report.measures import Interval, bootstrap
from millstream.report.page import FiguresBlock, Section, TableBlock, TextBlock
from millstream.report.tables import Column, Table, branch, clipped, shown
from millstream.traces.report.evaluate import RESAMPLES, mean_area
from millstream.traces.report.findings import Contender, best_of
from millstream.traces.report.results import ModelResult, Results, read_run
from millstream.training.folder import DATA, EVALUATED, OWN_TEST, PREDICTIONS, read_mapping

_DEEPEST = 0.6  # opacity of a cell: numbers on it stay readable
_WIDEST = 24  # characters of the name of a store above a column
_MAX_NAME = 40


@dataclass(frozen=True)
class Scored:
    """A detector on the answers of a store."""

    auroc: Interval
    num_right: int
    num_wrong: int
    num_left_out: int  # records, because the run was fitted to their questions
    num_seen: int  # records scored although the run was fitted to their questions
    is_own: bool  # the test split of the run, or its out-of-fold scores


@dataclass(frozen=True)
class Store:
    """A store that detectors were scored on; `version` changes with its records."""

    path: str
    version: str


@dataclass(frozen=True)
class Row:
    """A detector of a run on every store; None where it was not scored."""

    run: Path
    trained_on: Store
    detector: str
    kind: str
    auroc_val: float
    cells: Mapping[Store, Scored]


@dataclass(frozen=True)
class Matrix:
    """Detectors, each trained on a store, and the stores they were scored on."""

    stores: Sequence[Store]
    rows: Sequence[Row]
    folds: int | None = None  # of the run, if its own scores are out of fold
    missing: Mapping[str, str] = field(default_factory=dict[str, str])  # evaluations that cannot be compared, and why
    folders: Mapping[str, Store] = field(default_factory=dict[str, Store])  # in evaluated/ of the run

    def only(self, folders: Sequence[str]) -> "Matrix":
        """The test split of the run, and what is in these folders of evaluations."""
        stores = [self.stores[0], *(self.folders[name] for name in folders if name in self.folders)]
        missing = {name: why for name, why in self.missing.items() if name in folders}
        return replace(self, stores=list(dict.fromkeys(stores)), missing=missing)

    @property
    def has_others(self) -> bool:
        """Whether there is more than the test split."""
        return len(self.stores) > 1 or bool(self.missing)

    @property
    def names(self) -> dict[Store, str]:
        """The name of each store: the end of its path, as much as tells it from the others."""
        stores = list(dict.fromkeys([*self.stores, *(row.trained_on for row in self.rows)]))
        paths = {store: Path(store.path).parts for store in stores}
        names: dict[Store, str] = {}
        for store in stores:
            others = [paths[other] for other in stores if paths[other] != paths[store]]
            size = next((n for n in range(1, 99) if all(other[-n:] != paths[store][-n:] for other in others)), 1)
            name, number = "/".join(paths[store][-size:]), 1
            while (name if number == 1 else f"{name} ({number})") in names.values():  # the same store, changed
                number += 1
            names[store] = name if number == 1 else f"{name} ({number})"
        return names

    def tested(self, store: Store) -> list[Scored]:
        """The cells of a column."""
        return [row.cells[store] for row in self.rows if store in row.cells]

    @property
    def json(self) -> dict[str, object]:
        names = self.names
        return {
            "columns": [{"name": names[store], "store": store.path} for store in self.stores],
            "rows": [
                {
                    "run": str(row.run),
                    "trained_on": names[row.trained_on],
                    "detector": row.detector,
                    "kind": row.kind,
                    "auroc_val": row.auroc_val,
                    "cells": [asdict(row.cells[one]) if one in row.cells else None for one in self.stores],
                }
                for row in self.rows
            ],
            "missing": self.missing,
        }


def transfer_of(results: Results, *, resamples: int = RESAMPLES) -> Matrix:
    """All detectors of a run on its own test split and on the stores it has evaluated."""
    own = _store(results.data)
    cells = {model.name: {own: _own(model, results)} for model in results.models}
    stores: dict[str, Store] = {}
    missing: dict[str, str] = {}
    for file in sorted((results.path / EVALUATED).glob(f"*/{PREDICTIONS}")):
        folder, name = file.parent, file.parent.name
        if name == OWN_TEST:
            continue
        try:
            card = read_mapping(folder / DATA)
            store = _store(card)
            if store == own and card.get("trained_label_rule"):
                store = replace(store, version=f"{store.version} relabelled")
            if store != own:  # else it is the test split once more
                for detector, scored in _read(folder, resamples).items():
                    cells.get(detector, {})[store] = scored
            stores[name] = store
        except BadSource as error:
            missing[name] = str(error)
    rows = [
        Row(results.path, own, model.name, model.kind, model.auroc_val, cells[model.name]) for model in results.models
    ]
    folds = results.config.get("folds")
    columns = list(dict.fromkeys([own, *stores.values()]))
    return Matrix(columns, rows, folds if isinstance(folds, int) else None, missing, stores)


def joined(matrices: Mapping[Path, Matrix], *, models: str | None = None) -> Matrix:
    """The detectors of several runs: of each the best on validation, or those of `models`; of one run, all."""
    rows = [
        replace(row, run=run)
        for run, matrix in matrices.items()
        for row in _chosen(matrix.rows, models, all_of=len(matrices) == 1)
    ]
    stores = dict.fromkeys(store for matrix in matrices.values() for store in matrix.stores)
    missing = {f"{run}: {name}": why for run, matrix in matrices.items() for name, why in matrix.missing.items()}
    return Matrix(list(stores), rows, missing=missing)


def _chosen(rows: Sequence[Row], models: str | None, *, all_of: bool) -> list[Row]:
    if models is not None:
        names = {name.strip() for name in models.split(",")}
        return [row for row in rows if row.detector in names]
    best = best_of(Contender(row.detector, row.kind, row.auroc_val) for row in rows).detector
    return [row for row in rows if all_of or row.detector == best]


def _own(model: ModelResult, results: Results) -> Scored:
    counts = results.num_test - results.num_wrong, results.num_wrong
    return Scored(model.auroc, *counts, *_fitted(results.data), is_own=True)


def _read(folder: Path, resamples: int) -> dict[str, Scored]:
    """The detectors on the records of an evaluation."""
    run = read_run(folder)
    labels = run.test.labels
    wanted = {name: mean_area(trials, labels) for name, trials in run.trials.items()}
    drawn = bootstrap(wanted, labels, groups=run.test.questions, resamples=resamples)
    num_wrong = int(labels.sum())
    counts = len(labels) - num_wrong, num_wrong
    return {name: Scored(one.interval, *counts, *_fitted(run.data), is_own=False) for name, (one,) in drawn.items()}


def _fitted(card: Mapping[str, object]) -> tuple[int, int]:
    """Records whose questions the run was fitted to: those left out, and those scored."""
    seen = branch(card.get("seen"))
    found = sum(count for name in ("train", "val") if isinstance(count := seen.get(name), int))
    return (found, 0) if seen.get("left_out") else (0, found)


def _store(card: Mapping[str, object]) -> Store:
    version = [card.get(name) for name in ("fingerprint", "label_rule", "label_version")]
    return Store(str(card.get("store")), " ".join(map(str, version)))


# -- what is shown


def matrix_table(matrix: Matrix) -> Table[Row]:
    """A row per detector, a column per store."""
    names = matrix.names

    def title(row: Row) -> str:
        return f"trained on {names[row.trained_on]}: {row.detector}"

    def area(store: Store, row: Row) -> Interval | None:
        return row.cells[store].auroc if store in row.cells else None

    columns: list[Column[Row]] = [Column("detector", "detector", "", title, "")]
    columns += [
        Column(
            names[store], names[store], f"AUROC on {store.path}; {about(matrix.tested(store))}", partial(area, store)
        )
        for store in matrix.stores
    ]
    return Table(columns, matrix.rows)


def about(cells: Sequence[Scored]) -> str:
    """The size of a column: `120 right, 80 wrong`; a range if runs were scored on different records."""
    counts = {"right": {one.num_right for one in cells}, "wrong": {one.num_wrong for one in cells}}
    return ", ".join(f"{_range(some)} {name}" for name, some in counts.items()) if cells else "not scored"


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def matrix_text(matrix: Matrix, *, width: int = 120) -> str:
    """The matrix for a terminal, with intervals if they fit, and the size of every column."""
    table, names = matrix_table(matrix), matrix.names
    table = replace(table, columns=[replace(one, title=clipped(one.title, _WIDEST)) for one in table.columns])
    keys = [column.key for column in table.columns[1:]]
    name = min(_MAX_NAME, max((len(table.columns[0].shown(row)) for row in matrix.rows), default=0))
    has_room = name + sum(2 + max(len(column.title), 20) for column in table.columns[1:]) <= width
    lines = [f"AUROC{' [95 %]' if has_room else ''}: trained on (rows), tested on (columns)"]
    lines += table.text(width=width, full=keys if has_room else ())
    lines += [f"{names[store]}: {about(matrix.tested(store))}" for store in matrix.stores]
    lines += [] if has_room else ["Intervals: --json, and tables/transfer.csv in each run."]
    lines += _remarks(matrix)
    return "\n".join(lines) + "\n"


def _remarks(matrix: Matrix) -> list[str]:
    """What a reader of the numbers should know."""
    names = matrix.names
    left_out = {names[one]: {cell.num_left_out for cell in matrix.tested(one)} - {0} for one in matrix.stores}
    seen = {names[one]: {cell.num_seen for cell in matrix.tested(one)} - {0} for one in matrix.stores}
    remarks = [
        f"{name}: {_range(some)} records are left out because the run was trained or validated on their questions."
        for name, some in left_out.items()
        if some
    ]
    remarks += [
        f"{name}: NOT results on new questions: the run was fitted to those of {_range(some)} records."
        for name, some in seen.items()
        if some
    ]
    return [*remarks, *(f"{name}: left out. {why}" for name, why in matrix.missing.items())]


def transfer_section(matrix: Matrix | None, drawings: Sequence[Drawing]) -> Section:
    """The table and the heat map of a run."""
    if matrix is None:
        missing = "Left out: no other store was evaluated. Next: millstream evaluate RUN STORE"
        return Section("transfer", "Transfer", [], missing)
    names = matrix.names
    own = "its test split"
    if matrix.folds is not None:
        own = f"out-of-fold scores; the scores on other stores are means over the models of {matrix.folds} folds"
    text = (
        f"AUROC on other stores, with detectors, thresholds and calibration unchanged. First column: {own}. "
        "Small numbers are 95 % intervals over questions."
    )
    block = TableBlock(
        table=matrix_table(matrix),
        label="Transfer",
        css="transfer",
        sort=(names[matrix.stores[0]], "descending"),
        notes={names[store]: about(matrix.tested(store)) for store in matrix.stores},
        row_css=lambda row: row.kind,
    )
    remarks = [TextBlock(remark) for remark in _remarks(matrix)]
    return Section("transfer", "Transfer", [TextBlock(text), *remarks, block, FiguresBlock(drawings)])


def transfer_tables(matrix: Matrix | None) -> dict[str, str]:
    if matrix is None:
        return {}
    table = matrix_table(matrix)
    return {"transfer.csv": table.csv(), "transfer.tex": table.latex()}


def draw_transfer(matrix: Matrix | None) -> list[Drawing]:
    """A heat map: the deeper a cell, the higher its AUROC; its own test split has a frame."""
    if matrix is None:
        return []
    names = matrix.names
    cells = [
        (place, number, row.cells[store])
        for place, row in enumerate(matrix.rows)
        for number, store in enumerate(matrix.stores)
        if store in row.cells
    ]
    best = max((cell.auroc.value for _, _, cell in cells), default=1.0)
    with style():
        size = (2.6 + 0.95 * len(matrix.stores), 1.1 + 0.27 * len(matrix.rows))
        figure, axes = new_axes("tested on", f"trained on {names[matrix.stores[0]]}", size)
        _shade(axes, cells, best)
        for place, number, cell in cells:
            axes.text(number, place, shown(cell.auroc), ha="center", va="center", fontsize=8, color=INK)
        axes.set_xlim(-0.5, len(matrix.stores) - 0.5)
        axes.set_ylim(len(matrix.rows) - 0.5, -0.5)
        titles = [clipped(names[store], _WIDEST) for store in matrix.stores]
        axes.set_xticks(range(len(titles)), titles, rotation=30, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(matrix.rows)), [row.detector for row in matrix.rows])
        axes.tick_params(length=0, labelsize=8)
        axes.grid(visible=False)
    own = "its own test split" if matrix.folds is None else "out-of-fold scores"
    caption = f"AUROC of each detector. No colour: chance or below; deepest: {shown(best)}. Framed: {own}."
    return [Drawing("transfer", "Transfer to other stores", caption, figure)]


def _shade(axes: Any, cells: Sequence[tuple[int, int, Scored]], best: float) -> None:
    """One colour with varying opacity, which the page replaces on a dark background; it stays ordered in grey."""
    span = max(best - 0.5, 1e-9)
    depths = [_DEEPEST * float(np.clip((cell.auroc.value - 0.5) / span, 0, 1)) for _, _, cell in cells]
    boxes = [Rectangle((number - 0.48, place - 0.48), 0.96, 0.96) for place, number, _ in cells]
    fills = [(*to_rgb(LINES[0]), depth) for depth in depths]
    axes.add_collection(PatchCollection(boxes, facecolors=fills, edgecolors="none", match_original=False))
    own = [box for box, (_, _, cell) in zip(boxes, cells, strict=True) if cell.is_own]
    axes.add_collection(PatchCollection(own, facecolors="none", edgecolors=INK, linewidths=0.7, match_original=False))
