"""The skeleton of a report: what a run has on disk, and how results become text, tables, figures and a page.

A kind of record fills in a `Report` with its columns, sections and figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from millstream.core.console import quoted
from millstream.core.files import publish
from millstream.core.registry import plug
from millstream.errors import BadSource
from millstream.report.measures import Difference
from millstream.report.tables import Comparison, Table, card_table, counted, difference_table
from millstream.training.folder import CONFIG, DATA, ENVIRONMENT, METRICS, PREDICTIONS, kind_of, read_mapping
from millstream.training.log import Metrics, read_metrics

if TYPE_CHECKING:
    from millstream.report.drawing import Drawing
    from millstream.report.page import Section


STYLE_SHEET, THEME = (Path(__file__).parent / name for name in ("style.css", "theme.js"))  # of the explorer, too


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run that every report needs."""

    path: Path
    config: Mapping[str, object]
    environment: Mapping[str, object]
    data: Mapping[str, object]  # the data card
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class RunResults(RunFiles):
    """What every report shows; a kind of record adds its own numbers."""

    differences: Sequence[Difference]
    findings: Sequence[str]  # plain sentences, the most important first
    missing: Mapping[str, str]  # requested models that have no results, and why


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run as text, tables, figures and a page."""

    results: RunResults
    comparison: Comparison
    num_models: int
    text: str  # the comparison for a terminal
    json: Mapping[str, object]  # entries of the summary besides the common ones
    models: Table[Any]  # every number of every model
    paper: Table[Any]  # the most important ones, for LaTeX
    card: Mapping[str, object]  # the data card, for a table
    more_tables: Callable[[], Mapping[str, str]] = dict[str, str]  # file name -> text
    title: str  # of the page: the data that models were compared on
    facts: Mapping[str, object]  # below the title; None is left out
    draw: "Callable[[], Sequence[Drawing]]"
    sections: "Callable[[Sequence[Drawing]], Sequence[Section]]"

    @property
    def compared(self) -> str:
        """Such as "5 models"."""
        return counted(self.num_models, self.comparison.what)

    @property
    def summary(self) -> dict[str, object]:
        """The output of `--json`."""
        results, compared = self.results, self.comparison
        renamed = {"split": "part", "value": compared.key}
        left_out = () if compared.by_split else ("split",)
        differences = [
            {renamed.get(name, name): value for name, value in asdict(one).items() if name not in left_out}
            for one in results.differences
        ]
        return {"run": results.path, **self.json, "differences": differences, "findings": results.findings}

    def lines(self) -> str:
        """The comparison and the findings."""
        return "\n".join([self.text, *self.results.findings])

    def tables(self) -> dict[str, str]:
        """`comparison`, `differences` and `data`, each as .csv and as LaTeX, and more; by file name."""
        differences, card = difference_table(self.results.differences, self.comparison), card_table(self.card)
        return {
            "comparison.csv": self.models.csv(),
            "comparison.tex": self.paper.latex(),
            "differences.csv": differences.csv(),
            "differences.tex": differences.without("differs").latex(),
            "data.csv": card.csv(),
            "data.tex": card.latex(),
            **self.more_tables(),
        }

    def write(self, out: Path) -> Path:
        """Write the page to `out`, and its figures and tables to folders next to it."""
        from millstream.report.drawing import drawing_files

        drawings = self.draw()
        page = self.write_page(out, drawings)
        write_files(drawing_files(drawings), page.parent / "figures")
        texts = {name: text.encode("utf-8", "replace") for name, text in self.tables().items()}
        write_files(texts, page.parent / "tables")
        return page

    def write_page(self, out: Path, drawings: "Sequence[Drawing] | None" = None) -> Path:
        """Write the page alone, complete or not at all; with these figures, if they are already drawn."""
        from millstream.report.drawing import OVERVIEW
        from millstream.report.page import Page, write_page

        results, drawings = self.results, self.draw() if drawings is None else drawings
        page = Page(
            what=self.comparison.what,
            title=self.title,
            facts=self.facts,
            findings=results.findings,
            overview=next((drawing for drawing in drawings if drawing.name == OVERVIEW), None),
            sections=self.sections([drawing for drawing in drawings if drawing.name != OVERVIEW]),
            settings=results.config,
            environment=results.environment,
            not_run=results.missing,
        )
        return write_page(page, out)


def report_of(run: Path) -> Report:
    """The report of a run, made by the kind of record it was trained on.

    >>> report_of(Path("runs/first")).write(Path("report.html"))
    """
    return cast(Report, _plug(run).report(run))


def read_files(run: str | Path, *, what: str) -> RunFiles:
    """The files of a run; BadSource if the folder is not a run, has no finished model, or if one is damaged."""
    folder = Path(run)
    if not (folder / CONFIG).is_file():
        why = f"has no {CONFIG}, so it is not a run" if folder.is_dir() else "no such folder"
        raise BadSource(f"{folder}: {why}. {_train_again(folder)}")
    for file in (folder / PREDICTIONS, folder / METRICS):
        if not file.exists():
            raise unfinished(folder, what=what)
        if not file.is_file():
            raise damaged(file, "it is not a file")
    return RunFiles(
        path=folder,
        config=read_mapping(folder / CONFIG),
        environment=read_mapping(folder / ENVIRONMENT),
        data=read_mapping(folder / DATA),
        metrics=read_metrics(folder / METRICS),
    )


def unfinished(folder: Path, *, what: str) -> BadSource:
    return BadSource(f"{folder}: no {what} is finished yet. {_train_again(folder)}")


def damaged(file: Path, what: str) -> BadSource:
    return BadSource(f"{file}: is damaged ({what}). {train_elsewhere(file.parent)}")


def train_elsewhere(folder: Path) -> str:
    """The command that trains into another folder."""
    return f"{_train_again(folder)}-again"


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write files by name, each complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        publish(folder / name, data)
    return [folder / name for name in files]


def _train_again(folder: Path) -> str:
    return f"Next: millstream train {_plug(folder).TRAIN_SETTINGS} out={quoted(folder)}"


def _plug(run: Path) -> ModuleType:
    return plug(kind_of(run), "report")
