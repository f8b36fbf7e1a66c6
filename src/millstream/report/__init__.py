"""The skeleton of a report on any kind of record: measures, intervals, tables, figures, page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from millstream.core.console import quoted
from millstream.core.files import publish
from millstream.core.registry import plug
from millstream.errors import BadSource
from millstream.training.folder import CONFIG, METRICS, PREDICTIONS, kind_of

if TYPE_CHECKING:
    from millstream.report.drawing import Drawing


STYLE_SHEET, THEME = (Path(__file__).parent / name for name in ("style.css", "theme.js"))  # of the explorer, too


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run as text; `write` writes the page, with figures/ and tables/ next to it."""

    text: str
    findings: Sequence[str]
    summary: Mapping[str, object]  # as JSON
    compared: str  # such as "5 models"
    draw: Callable[[], "Sequence[Drawing]"]
    write_page: Callable[[Path, "Sequence[Drawing]"], Path]
    tables: Callable[[], Mapping[str, str]]  # file name -> text

    def lines(self) -> str:
        """The comparison and the findings."""
        return "\n".join([self.text, *self.findings])

    def write(self, out: Path) -> Path:
        """Write the page to `out`, and its figures and tables to folders next to it."""
        from millstream.report.drawing import drawing_files

        drawings = self.draw()
        page = self.write_page(out, drawings)
        write_files(drawing_files(drawings), page.parent / "figures")
        texts = {name: text.encode("utf-8", "replace") for name, text in self.tables().items()}
        write_files(texts, page.parent / "tables")
        return page


def report_of(run: Path) -> Report:
    """The report of a run, made by the kind of record it was trained on.

    >>> report_of(Path("runs/first")).write(Path("report.html"))
    """
    return cast(Report, _plug(run).report(run))


def check_run(folder: Path, *, what: str) -> None:
    """Raise BadSource if a folder is not a run or has no finished model."""
    if not (folder / CONFIG).is_file():
        why = f"has no {CONFIG}, so it is not a run" if folder.is_dir() else "no such folder"
        raise BadSource(f"{folder}: {why}. {_train_again(folder)}")
    if not (folder / PREDICTIONS).is_file() or not (folder / METRICS).is_file():
        raise unfinished(folder, what=what)


def read_mapping(file: Path) -> Mapping[str, object]:
    """A JSON or YAML file of names and values."""
    import yaml

    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise damaged(file, "no such file") from None
    except (ValueError, yaml.YAMLError) as error:
        raise damaged(file, str(error).partition("\n")[0]) from None
    if not isinstance(found, dict):
        raise damaged(file, f"a {type(found).__name__}, not a mapping")
    return {str(key): value for key, value in cast("dict[object, object]", found).items()}


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
