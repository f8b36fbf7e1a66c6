"""How commands show themselves: `millstream --help` along the flow of the data, a command with its settings listed."""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from millstream.console import painted

# In the order of the data; a line each, that fits 80 columns.
FLOW = {
    "Begin": {
        "demo": "see all of it on made-up data, in a few minutes",
    },
    "From a language model to labelled traces": {
        "extract": "ask a model questions and keep what goes on inside it",
        "label": "compare its answers with the right ones",
        "featurize": "compute a feature of every trace once, and keep it",
        "convert": "bring old .pkl, .pkl.gz and .pt files into a store",
    },
    "From genomes and sequencers to reads": {
        "simulate": "draw labelled reads from genomes",
        "index": "make any read of FASTA or FASTQ files readable by number",
        "pack": "put reads into one file, 2 bits a base",
        "unpack": "write packed reads as FASTA or FASTQ again",
    },
    "Train": {
        "train": "detectors of wrong answers, or classifiers of reads",
        "evaluate": "ask the detectors of a run about other traces",
        "classify": "name every read of files by a trained classifier",
    },
    "Report": {
        "report": "write a run's comparison as one HTML page",
        "view": "look at a store, a run or reads in the browser",
    },
    "Upkeep": {
        "inspect": "what is in a store or in reads, or how two stores differ",
        "verify": "check every byte, and name what is damaged",
        "repair": "recover what was interrupted, set aside what is damaged",
        "merge": "put several stores into one",
        "subset": "copy some records of a store into a new one",
    },
}
INTRO = "Train on data far larger than memory: language-model traces and sequencing reads."
ENDING = (
    "Two ways to begin: `millstream demo` shows it on made-up data; README.md and docs/ say how to use your own. "
    "`millstream COMMAND --help` lists what a command takes."
)


class Interrupted(Exception):
    """Ctrl-C within a command."""


class OutputClosed(Exception):
    """Nobody reads what is printed any more."""


class Commands(typer.Typer):
    """An application whose commands show themselves as below."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Command, **options)


class Group(TyperGroup):
    """All commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end with the code alone
            raise Interrupted(ctx.invoked_subcommand) from None
        except BrokenPipeError:
            raise OutputClosed from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = _width()
        known = {name for group in FLOW.values() for name in group}
        others = {
            name: self.commands[name].get_short_help_str(width - 15) for name in self.commands if name not in known
        }
        parts = [f"Usage: {ctx.command_path} COMMAND ...", _wrapped(INTRO, width)]
        for heading, group in {**FLOW, "More": others}.items():
            rows = [(name, about) for name, about in group.items() if name in self.commands]
            if rows:
                parts.append(_table(heading, rows, width, first=11))
        parts += [_table("Options", _options(ctx, self.get_params(ctx)), width), _wrapped(ENDING, width)]
        formatter.write("\n\n".join(parts) + "\n")


class _Command(TyperCommand):
    """One command, with its settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from millstream.cli_settings import groups_of

        width = _width()
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        others = [param for param in self.get_params(ctx) if param.param_type_name != "argument"]
        usage = " ".join([ctx.command_path, *map(_shape, arguments), "[OPTIONS]"])
        parts = [_wrapped(f"Usage: {usage}", width, "       ")]
        parts += [_wrapped(text, width) for text in inspect.cleandoc(self.help or "").split("\n\n")]
        parts.append(_table("Arguments", [(_metavar(param), _about(param)) for param in arguments], width))
        for heading, settings in groups_of(self.name or "").items():
            rows = [(f"{setting.name}={setting.default}", setting.about) for setting in settings]
            parts.append(_table(f"{heading}, as key=value or in a YAML file", rows, width))
        parts.append(_table("Options", _options(ctx, others), width))
        formatter.write("\n\n".join(filter(None, parts)) + "\n")


def _width() -> int:
    return max(40, min(80, shutil.get_terminal_size().columns))


def _wrapped(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), width, subsequent_indent=indent, break_on_hyphens=False)


def _table(heading: str, rows: Iterable[tuple[str, str]], width: int, first: int | None = None) -> str:
    """Two columns under a heading; a first one that is too long gets a line of its own."""
    rows = list(rows)
    if not rows:
        return ""
    column = first or min(max(len(row[0]) for row in rows), 26) + 2
    lines = [painted(heading, "1", sys.stdout)]
    for name, about in rows:
        texts = textwrap.wrap(about, width - column - 2, break_on_hyphens=False) or [""]
        if len(name) > column - 2:
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {name:<{column}}{texts[0]}".rstrip(), *(f"  {'':<{column}}{text}" for text in texts[1:])]
    return "\n".join(lines)


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _shape(param: Any) -> str:
    """An argument as the line of usage has it."""
    name = _metavar(param) + ("..." if param.nargs != 1 and not _metavar(param).endswith("OUT") else "")
    return name if param.required else f"[{name}]"


def _options(ctx: Any, params: Iterable[Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for param in params:
        if param.param_type_name == "argument" or param.hidden:
            continue
        names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=lambda name: name.startswith("--")))
        value = "" if param.is_flag or param.count else f" {param.metavar or 'VALUE'}"
        rows.append((names + value, _about(param)))
    return rows


def _about(param: Any) -> str:
    shown = param.show_default
    default = shown if isinstance(shown, str) else None
    if default is None and param.default not in (None, False) and shown and param.name not in ("help", "version"):
        default = {True: "yes"}.get(param.default, str(param.default))
    return f"{param.help or ''}{f' (default: {default})' if default else ''}".strip()
