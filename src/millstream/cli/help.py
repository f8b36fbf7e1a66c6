"""Additions to typer's `--help`: commands grouped by task, and the settings of a command."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from millstream.core.config import Setting

# The groups of commands in `millstream --help`. A kind of record adds its own group, shown after the first.
START, TRAIN, REPORT, MAINTAIN = "Start here", "Train and apply models", "Report and explore", "Inspect and maintain"
_LAST = (TRAIN, REPORT, MAINTAIN)


class Interrupted(Exception):
    """Ctrl-C in a command; the argument is its name."""


class OutputClosed(Exception):
    """Whoever reads our output has closed it."""


class Group(TyperGroup):
    """All commands, in the order in which data flows through them."""

    def list_commands(self, ctx: Any) -> list[str]:
        def place(name: str) -> int:
            panel = getattr(self.commands[name], "rich_help_panel", None)
            return 0 if panel == START else 2 + _LAST.index(panel) if panel in _LAST else 1

        return sorted(super().list_commands(ctx), key=place)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would only set the exit code
            raise Interrupted(ctx.invoked_subcommand) from None
        except BrokenPipeError:
            raise OutputClosed from None


def with_settings(panels: Callable[[], Mapping[str, Sequence[Setting]]]) -> type[TyperCommand]:
    """A command class whose help lists these settings, by title, at the end."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            _print_panels(panels())

    return Command


def _print_panels(panels: Mapping[str, Sequence[Setting]]) -> None:
    """In the style of typer's own panels."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, settings in panels.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold cyan", no_wrap=True, overflow="ellipsis", max_width=30)
        table.add_column()
        for setting in settings:
            table.add_row(Text(f"{setting.name}={_shown(setting.default)}"), Text(setting.help))
        console.print(Panel(table, title=Text(title), title_align="left", border_style="dim"))


def _shown(default: object) -> str:
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
