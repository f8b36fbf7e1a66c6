"""The `millstream` command: a thin layer over functions; data goes to stdout, messages to stderr.

The commands here know no kind of record. Each kind has a `commands` module with its own commands, which also inspects
and verifies what is at a path of that kind.
"""

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from millstream.cli.process import PART, close_quietly, report_interrupt
from millstream.core.bucket import is_url
from millstream.core.config import Between, Setting, check_limits, list_settings
from millstream.core.registry import extensions, kind_at, kinds_with, plug, plugs
from millstream.errors import BadSetting, MillstreamError

# The groups of commands in `millstream --help`. A kind of record adds its own group, shown after the first.
START, TRAIN, REPORT, MAINTAIN = "Start here", "Train and apply models", "Report and explore", "Inspect and maintain"
_LAST = (TRAIN, REPORT, MAINTAIN)


class CommandInterrupted(Exception):
    """Ctrl-C in a command; the argument is its name."""


class OutputClosed(Exception):
    """The program that reads our output has closed it."""


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
            raise CommandInterrupted(ctx.invoked_subcommand) from None
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


def parse_path(text: str) -> Path:
    """A local path or a URL."""
    from millstream.core.remote import to_path  # imports numpy

    return to_path(text)


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings, or YAML files with settings.", metavar="KEY=VALUE")
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder or URL.", metavar="RUN", parser=parse_path)]
EngineName = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="local, or ray for many machines.", metavar="NAME")
]
Address = Annotated[
    str | None, typer.Option(help="Address of the Ray cluster.", show_default="start one here", metavar="HOST:PORT")
]
Workers = Annotated[
    int | None, typer.Option(help="Workers on the cluster.", show_default="one per GPU or machine", metavar="N", min=1)
]

_REMEDIES = {
    errno.ENOSPC: "Free some space and run the same command again",
    errno.EDQUOT: "Free some space and run the same command again",
    errno.EACCES: "Choose a path that you can read and write",
    errno.EPERM: "Choose a path that you can read and write",
    errno.EROFS: "Choose a writable path",
}


def main() -> None:
    """Run the command line. Our own errors are one line and exit code 1; wrong usage is exit code 2."""
    try:
        code = make_app()(args=sys.argv[1:] or ["--help"], prog_name="millstream", standalone_mode=False)
        sys.stdout.flush()
    except MillstreamError as error:
        _fail(str(error), code=2 if isinstance(error, BadSetting) else 1)
    except (BrokenPipeError, OutputClosed):
        close_quietly()
    except OSError as error:
        message = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        remedy = _REMEDIES.get(error.errno or 0)
        _fail(f"{message}. {remedy}" if remedy else message)
    except CommandInterrupted as interrupted:
        report_interrupt(str(interrupted))
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of typer
            raise
        _fail_usage(error)
    else:
        sys.exit(code or 0)


def make_app() -> typer.Typer:
    """The app with the commands of every kind of record."""
    app = typer.Typer(name="millstream", cls=Group, epilog=_EPILOG, pretty_exceptions_enable=False)
    app.callback()(_about)
    app.command(rich_help_panel=TRAIN, cls=with_settings(_train_settings))(train)
    app.command(rich_help_panel=REPORT)(report)
    app.command(rich_help_panel=REPORT)(view)
    app.command(rich_help_panel=MAINTAIN)(inspect)
    app.command(rich_help_panel=MAINTAIN)(verify)
    app.command(rich_help_panel=MAINTAIN)(copy)
    for module in (*extensions("commands"), *plugs("commands")):
        module.add_commands(app)
    return app


def print_json(answer: object) -> None:
    from millstream.core.console import printable_json

    print(printable_json(json.dumps(answer, indent=1, default=str, ensure_ascii=False)))


def finish(done: str, *following: object) -> None:
    """Print what a command wrote, and the command to run next, ready to paste."""
    from millstream.core.console import say

    say(done)
    if following and PART not in os.environ:
        say(f"Next: {shlex.join(['millstream', *map(str, following)])}")


def show_report(run: Path, as_json: bool, out: Path | None = None) -> None:
    """Print the comparison of a run and write its page."""
    from millstream.core.console import show
    from millstream.report import report_of
    from millstream.training.remote_run import writing_run

    with writing_run(run) as folder:
        found = report_of(folder)
        if as_json:
            print_json({**found.summary, "run": run})
        else:
            show(found.lines())
        page = found.write(out or folder / "report.html")
    finish(f"{run}: {found.compared} compared. Open {page}", "view", run)


def train(
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Train and compare hallucination detectors or read classifiers.

    Detectors learn from a labelled trace store, data=STORE.
    Classifiers learn from read files, data.train=FILE.
    Run the same command again to resume.

    Example: millstream train data=traces model=lstm,gnn,baselines out=runs/first
    """
    from dataclasses import asdict

    from millstream.core.config import read_settings

    kinds = [plug(kind, "kind") for kind in kinds_with("study")]
    kind = next((one for one in kinds if one.is_training_on(settings or [])), kinds[0])
    given = read_settings(kind.TRAIN_SETTINGS, settings or [])
    given.check()
    from millstream.core.engine import Engine
    from millstream.training.run import train as fit

    with redirect_stdout(sys.stderr):  # Ray reports dead workers on stdout, which is for data
        run = fit(engine=Engine(engine, address, workers), **asdict(given))
    if not run.is_first:
        return
    if run.interrupted:
        finish(f"{run.path}: interrupted; progress saved; run the same command to resume")
        raise typer.Exit(130)
    show_report(run.path, as_json)


def report(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The page to write.",
            show_default="report.html in the run folder",
            metavar="FILE",
            parser=parse_path,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the comparison of a run as one HTML page.

    Next to the page: figures/ (SVG, PNG) and tables/ (CSV, LaTeX).
    """
    if out is not None and is_url(out):
        raise BadSetting(f"{out}: --out is a local file. Without it, the report of a run at a URL is written there")
    show_report(run, as_json, out)


def view(
    path: Annotated[
        Path,
        typer.Argument(
            help="A trace store, a run folder, reads, or what classify wrote.",
            metavar="STORE|RUN|READS|OUTPUT",
            parser=parse_path,
        ),
    ],
    port: Annotated[
        int, typer.Option(help="Port on this machine.", metavar="NUMBER", show_default="any free", min=0, max=65535)
    ] = 0,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run whose scores to show.", metavar="RUN", show_default="one next to the store", parser=parse_path
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or tokenizer.json; for reads also base or kmer(6).", metavar="NAME"),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(help="Table with the names of the classes of reads.", metavar="FILE", parser=parse_path),
    ] = None,
    label: Annotated[bool, typer.Option("--label", help="Judge the answers of a store, by single keys.")] = False,
) -> None:
    """Explore traces, reads, a run or a classified sample in the browser.

    A run can be watched while it trains. The page is served on this machine only.
    """
    from millstream.core.console import say
    from millstream.view.server import serve, views_of

    views = views_of(path, run=run, tokenizer=tokenizer, mapping=mapping, label=label, notify=say)
    serve(views, port=port, title=path.resolve().name, notify=say)


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A trace store, an old .pkl, .pkl.gz or .pt file, a table, or reads.", metavar="PATH")
    ],
    other: Annotated[Path | None, typer.Argument(help="Another trace store, to compare with.", metavar="OTHER")] = None,
    examples: Annotated[int, typer.Option(help="Number of example records to show.", metavar="N", min=0)] = 0,
    tolerance: Annotated[
        float, typer.Option(help="Numbers x and y are equal if |x - y| <= X (1 + |y|).", metavar="X")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Show what is in a store, in a table or in reads, or compare two stores."""
    check_limits("--tolerance", tolerance, [Between(0)])
    if tolerance and other is None:
        raise typer.BadParameter("--tolerance compares two stores: give another one")
    from millstream.core.remote import to_path

    path, other = to_path(path), to_path(other) if other else None
    _kind_at(path).inspect(path, other, examples=examples, tolerance=tolerance, as_json=as_json)


def verify(
    path: Annotated[Path, typer.Argument(help="A trace store, a table, or indexed or packed reads.", metavar="PATH")],
    fast: Annotated[bool, typer.Option("--fast", help="Check the structure only, not the checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Verify every checksum, and list what is damaged."""
    from millstream.core.remote import to_path

    path = to_path(path)
    _kind_at(path).verify(path, fast=fast, as_json=as_json)


def copy(
    source: Annotated[
        str, typer.Argument(help="A trace store, a run, a pack, reads, a table, or any folder.", metavar="SOURCE")
    ],
    target: Annotated[
        str, typer.Argument(help="A new path or URL; for a file also a folder, with a slash.", metavar="TARGET")
    ],
    as_json: Json = False,
) -> None:
    """Copy between local disk, object stores and the Hugging Face hub.

    Every file is verified at the target. Indexes are copied with their files.
    A trace store on the hub can be read with datasets.load_dataset.
    Run the same command again to resume.

    Example: millstream copy traces s3://bucket/traces
    """
    from dataclasses import asdict

    from millstream.core.console import format_bytes, plural
    from millstream.core.copy import copy as copy_files

    copied = copy_files(source, target)
    if as_json:
        print_json(asdict(copied))
    before = copied.num_files - copied.num_new
    there = f", {before} of them were there before" if before else ""
    finish(f"{copied.target}: {plural(copied.num_files, 'file')}, {format_bytes(copied.num_bytes)}, verified{there}")


_EPILOG = (
    "Start with: millstream demo. README.md and docs/ explain how to use your own data. "
    "For the options and settings of a command: millstream COMMAND --help."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"millstream {version('millstream')}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train on data far larger than memory: language-model traces and sequencing reads."""


def _kind_at(path: Path) -> Any:
    """The commands module of the kind of record that lies at a path."""
    return plug(kind_at(path), "commands")


def _train_settings() -> Mapping[str, Sequence[Setting]]:
    """The settings of each kind, including shared ones with another default; then the settings all kinds share."""
    from millstream.training import LoopSettings

    shared = list_settings(LoopSettings)
    trained = [plug(kind, "kind") for kind in kinds_with("study")]
    kinds = {f"Settings for {kind.TRAINS}": list_settings(kind.TRAIN_SETTINGS) for kind in trained}
    own = {title: [one for one in found if one not in shared] for title, found in kinds.items()}
    return own | {"Settings for every model": [one for one in shared if any(one in found for found in kinds.values())]}


def _fail(message: str, code: int = 1) -> None:
    from millstream.core.console import colorize, printable

    sentence = printable(" ".join(message.split()))
    print(f"{colorize('millstream:', '1;31', sys.stderr)} {sentence}", file=sys.stderr)
    sys.exit(code)


def _fail_usage(error: Any) -> None:
    """Report wrong usage in one line that names the help to read."""
    message = str(error.message if getattr(error, "param", 1) is None else error.format_message()).rstrip(".")
    message = message.replace("Value error, ", "")  # which typer adds to a value that is not among the choices
    context = getattr(error, "ctx", None)
    command = "millstream" if context is None else context.command_path
    where = command.removeprefix("millstream").strip()
    message = f"{message[:1].lower()}{message[1:]}{'' if message.endswith('?') else '.'}"
    _fail(f"{f'{where}: ' if where else ''}{message} See: {command} --help", code=2)
