"""What mkdocs fills in when the site is built, so that nothing is written twice: commands, settings, errors.

A page says `<!-- commands -->`, `<!-- errors -->` or `<!-- settings: NAME -->`. What stands there in the site comes
from the command line, from errors.py, and from the dataclasses of settings with the comments beside their fields.
"""

import ast
import inspect
import io
import re
import tokenize
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints

SETTINGS = {
    "extract": "millstream.source.llm.settings:ExtractSettings",
    "label": "millstream.dataset.label:LabelSettings",
    "featurize": "millstream.dataset.featurize:FeaturizeSettings",
    "detectors": "millstream.train.settings:TrainSettings",
    "reads": "millstream.train.read_settings:ReadSettings",
    "evaluate": "millstream.train.evaluate:EvaluateSettings",
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with every page."""
    return expand(markdown)


def expand(markdown: str) -> str:
    """The page with everything filled in."""
    markdown = re.sub(r"<!-- commands -->", lambda _: commands(), markdown)
    markdown = re.sub(r"<!-- errors -->", lambda _: errors(), markdown)
    return re.sub(r"<!-- settings: (\w+) -->", lambda match: settings_table(match[1]), markdown)


def commands() -> str:
    """A section for every command along the flow, with its usage, help, arguments and options."""
    import typer.main

    from millstream.cli import app
    from millstream.cli_help import FLOW

    group: Any = typer.main.get_command(app)
    parts = [
        [f"## {title}", *(_command(name, group.commands[name]) for name in names)] for title, names in FLOW.items()
    ]
    return "\n\n".join(text for part in parts for text in part)


def errors() -> str:
    """The tree of exceptions, as it stands at the top of errors.py."""
    text = inspect.getdoc(import_module("millstream.errors")) or ""
    return f"```text\n{text[text.index('MillstreamError') :]}\n```"


def settings_of(kind: type[Any], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every setting; those within settings by their whole names."""
    hints, meanings = get_type_hints(kind), _meanings(kind)
    found: list[tuple[str, str, str, str]] = []
    for field in fields(kind):
        hint: Any = hints[field.name]
        if is_dataclass(hint):
            found += settings_of(hint, f"{prefix}{field.name}.")
            continue
        types = " or ".join("none" if part is type(None) else part.__name__ for part in get_args(hint) or (hint,))
        default = "" if field.default in (MISSING, "") else _shown(field.default)
        found.append((prefix + field.name, types, default, meanings.get(field.name, "")))
    return found


def settings_of_name(name: str) -> list[tuple[str, str, str, str]]:
    module, _, kind = SETTINGS[name].partition(":")
    return settings_of(getattr(import_module(module), kind))


def settings_table(name: str) -> str:
    rows = settings_of_name(name)
    lines = [f"| `{key}` | {types} | {_code(default)} | {_cell(meaning)} |" for key, types, default, meaning in rows]
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


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The comment beside each field; a subclass that only changes a default keeps the meaning."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        source = inspect.cleandoc(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in comments:
                found[node.target.id] = comments[node.end_lineno]
    return found


def _shown(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _prose(text: str) -> str:
    """Help as Markdown: what looks like a tag or a field is code, so that nothing is swallowed."""
    return re.sub(r"(<[^>\s]*>)", r"`\1`", text).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def _cell(text: str) -> str:
    return _prose(" ".join(text.split()))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
