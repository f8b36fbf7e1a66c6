"""Writes the lists of commands, settings and errors into the pages of docs/reference, from the code:

    python docs/make_reference.py

The text between `<!-- commands: GROUP, ... -->`, `<!-- errors -->`, `<!-- layouts -->` or `<!-- settings: NAME -->` and
`<!-- end -->` is replaced with what the command line, errors.py, layouts.py or a dataclass of settings says.
"""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from millstream.core.config import Setting, list_settings

REFERENCE = Path(__file__).parent / "reference"
SETTINGS = {
    "extract": "millstream.traces.kind:ExtractSettings",
    "label": "millstream.traces.kind:LabelSettings",
    "featurize": "millstream.traces.kind:FeaturizeSettings",
    "detectors": "millstream.traces.kind:TrainSettings",
    "reads": "millstream.reads.kind:ReadSettings",
    "evaluate": "millstream.traces.kind:EvaluateSettings",
}


def expand(markdown: str) -> str:
    """The page with its generated parts as they are now."""

    def part(match: re.Match[str]) -> str:
        what, _, names = match[1].partition(": ")
        text = {"commands": commands, "settings": settings_table}.get(what)
        made = text(names) if text else {"errors": errors, "layouts": layouts}[what]()
        return f"<!-- {match[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(
        r"<!-- (errors|layouts|(?:commands|settings): [^>]+) -->\n.*?<!-- end -->", part, markdown, flags=re.DOTALL
    )


def commands(groups: str) -> str:
    """A section per command of these groups of `millstream --help`, with its usage, help, arguments and options."""
    import typer.main

    from millstream.cli.app import make_app

    group: Any = typer.main.get_command(make_app())
    sections: dict[str, list[str]] = {}
    for name in group.list_commands(None):
        command = group.commands[name]
        sections.setdefault(command.rich_help_panel.partition(":")[0], []).append(_command(name, command))
    return "\n\n".join(text for title in groups.split(", ") for text in [f"## {title}", *sections[title]])


def errors() -> str:
    """The exception tree from the docstring of errors.py."""
    text = inspect.getdoc(import_module("millstream.errors")) or ""
    return f"```text\n{text[text.index('MillstreamError') :]}\n```"


def layouts() -> str:
    """The columns that questions are read from, and the datasets whose layout is known."""
    module = import_module("millstream.traces.llm.layouts")
    columns = [f"| `{ours}` | {', '.join(map(_code, theirs))} |" for ours, theirs in module.COLUMNS.items()]
    known = [f"| {one.dataset} | {', '.join(map(_code, one.columns))} | {one.about} |" for one in module.LAYOUTS]
    lines = ["| our name | columns of the file, the first that it has |", "|---|---|", *columns, ""]
    return "\n".join([*lines, "| dataset | recognised by | what becomes of it |", "|---|---|---|", *known])


def settings_of_name(name: str) -> list[Setting]:
    module, _, kind = SETTINGS[name].partition(":")
    return list_settings(getattr(import_module(module), kind))


def settings_table(name: str) -> str:
    lines = [
        f"| `{one.name}` | {one.type} | {_code(_default(one.default))} | {_cell(one.help)} |"
        for one in settings_of_name(name)
    ]
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *lines])


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    context.info_name = f"millstream {name}"
    usage = " ".join(command.collect_usage_pieces(context))
    records = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [
        f"| {_code(names if names.startswith('-') else names.split(' <')[0])} | {_cell(meaning)} |"
        for names, meaning in filter(None, records)
        if "--help" not in names
    ]
    help_text = inspect.cleandoc(command.help or "")
    return "\n".join(
        [f"### {name}", "", "```text", f"millstream {name} {usage}", "```", "", _prose(help_text), ""]
        + (["| argument or option | meaning |", "|---|---|", *rows] if rows else [])
    )


def _default(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _prose(text: str) -> str:
    """Help text as Markdown: tags become code and special characters are escaped, so that all of it is shown."""
    return re.sub(r"(<[^>\s]*>)", r"`\1`", text).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def _cell(text: str) -> str:
    return _prose(" ".join(text.split()))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    for page in REFERENCE.glob("*.md"):
        before = page.read_text(encoding="utf-8")
        if (after := expand(before)) != before:
            page.write_text(after, encoding="utf-8")
