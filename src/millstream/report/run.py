"""The files of any run folder, and what is said when they are not as they should be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from millstream.console import quoted
from millstream.errors import BadSource
from millstream.train.folder import CONFIG, METRICS, PREDICTIONS, READS, kind_of


def check_run(folder: Path, *, what: str) -> None:
    """Refuse a folder that is no run, or one in which nothing is finished."""
    if not (folder / CONFIG).is_file():
        why = f"has no {CONFIG}, so it is no run" if folder.is_dir() else "no such folder"
        raise BadSource(f"{folder}: {why}. {_next(folder)}")
    if not (folder / PREDICTIONS).is_file() or not (folder / METRICS).is_file():
        raise unfinished(folder, what=what)


def read_mapping(file: Path) -> Mapping[str, object]:
    """A JSON or YAML file that holds names and values."""
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
    return BadSource(f"{folder}: no {what} is finished yet. {_next(folder)}")


def damaged(file: Path, what: str) -> BadSource:
    return BadSource(f"{file}: is damaged ({what}). {again(file.parent)}")


def again(folder: Path) -> str:
    """The command that makes another run in place of this one."""
    return f"{_next(folder)}-again"


def _next(folder: Path) -> str:
    data = "data.train=FILE mapping=TABLE" if kind_of(folder) == READS else "data=STORE"
    return f"Next: millstream train {data} out={quoted(folder)}"
