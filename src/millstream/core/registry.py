"""The kinds of record, and how the engine reaches them: a kind is a folder with one module per room it plugs into.

Every kind has `kind` and `commands`; `study`, `report` and `view` only if models train on it, or it has a page.

plug("reads", "kind")      millstream.reads.kind: what is at a path, how to open it, which models train on it
plug("traces", "view")     millstream.traces.view: its page in the explorer
extensions("importers")    modules outside the kinds that extend the command line or a kind
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from millstream.errors import BadSetting

# A new kind of record is a new folder and a name here.
KINDS = ("traces", "tables", "reads")  # asked in this order what is at a path; reads take any other file

# Extensions from outside the kinds: commands, importers of other file formats, built-in data and models.
EXTENSIONS = {
    "commands": ("millstream.demo",),
    "importers": ("millstream.classic.importer", "millstream.traces.hidden_files"),
    "imported_fields": ("millstream.classic.importer",),
    "built_ins": ("millstream.demo.facts",),
}


def plug(kind: str, room: str) -> ModuleType:
    """The module that plugs a kind into a room: `plug("reads", "commands")` is `millstream.reads.commands`."""
    if kind not in kinds_with(room):
        raise BadSetting(f"{room}: works with {' and '.join(kinds_with(room))}, not with {kind}")
    return import_module(f"millstream.{kind}.{room}")


@cache
def kinds_with(room: str) -> list[str]:
    """The kinds that plug into a room, in the order of KINDS."""
    return [kind for kind in KINDS if find_spec(f"millstream.{kind}.{room}")]


def plugs(room: str) -> list[ModuleType]:
    """The modules of all kinds for one room, in the order of KINDS."""
    return [plug(kind, room) for kind in kinds_with(room)]


def extensions(of: str) -> list[ModuleType]:
    """The modules that add `commands`, `importers`, `imported_fields` or `built_ins`."""
    return [import_module(name) for name in EXTENSIONS[of]]


def kind_at(path: Path) -> str:
    """The kind of record at a path; the first kind if there is none, whose `open` reports what is missing."""
    from millstream.core.bucket import is_url  # not at the top: `millstream --help` is fast

    if is_url(path):  # to look there takes requests
        for kind in KINDS:
            if plug(kind, "kind").is_named(path):
                return kind
    found = (kind for kind in KINDS if plug(kind, "kind").is_at(path))
    return next(found, KINDS[0])
