"""The kinds of record, and how the engine reaches them: a kind is a folder with one module per room it plugs into.

plug("reads", "kind")      millstream.reads.kind: what is at a path, how to open it, which models train on it
plug("traces", "view")     millstream.traces.view: its page in the explorer
extensions("importers")    modules outside the kinds that extend the command line or a kind
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType

# A new kind of record is a new folder and a name here.
KINDS = ("traces", "reads")

# Extensions from outside the kinds: commands, importers of other file formats, built-in data and models.
EXTENSIONS = {
    "commands": ("millstream.demo",),
    "importers": ("millstream.classic.importer",),
    "built_ins": ("millstream.demo.facts",),
}


def plug(kind: str, room: str) -> ModuleType:
    """The module that plugs a kind into a room: `plug("reads", "commands")` is `millstream.reads.commands`."""
    return import_module(f"millstream.{kind}.{room}")


def plugs(room: str) -> list[ModuleType]:
    """The modules of all kinds for one room, in the order of KINDS."""
    return [plug(kind, room) for kind in KINDS]


def extensions(of: str) -> list[ModuleType]:
    """The modules that add `commands`, `importers` or `built_ins`."""
    return [import_module(name) for name in EXTENSIONS[of]]


def kind_at(path: Path) -> str:
    """The kind of record at a path; the first kind if there is none, whose `open` reports what is missing."""
    found = (kind for kind in KINDS if plug(kind, "kind").is_at(path))
    return next(found, KINDS[0])
