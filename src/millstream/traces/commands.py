"""The `millstream` command. Every command is a thin layer over a function; data goes to stdout, talk to stderr."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream import __version__, cli_llm, cli_reads, cli_train, cli_view
from millstream.cli_common import Json, finish, print_json
from millstream.cli_help import Commands, Group, Interrupted, OutputClosed
from millstream.process import close_quietly, tell

app = Commands(
    name="millstream",
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Store = Annotated[Path, typer.Argument(help="A trace store (a folder).", metavar="STORE")]
Out = Annotated[Path, typer.Argument(help="The store to write; must not exist yet.", metavar="OUT")]

_REMEDIES = {
    errno.ENOSPC: "Free some space and run the same command again",
    errno.EDQUOT: "Free some space and run the same command again",
    errno.EACCES: "Choose a place that you may read and write",
    errno.EPERM: "Choose a place that you may read and write",
    errno.EROFS: "Choose a place that can be written to",
}


def main() -> None:
    """Run the command line: our own errors are one line and exit code 1, wrong use is exit code 2."""
    from millstream.cli_complete import ASKED, answer
    from millstream.errors import BadSetting, MillstreamError

    if ASKED in os.environ:
        answer(typer.main.get_command(app))
        return
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="millstream", standalone_mode=False)
        sys.stdout.flush()
    except MillstreamError as error:
        _fail(str(error), code=2 if isinstance(error, BadSetting) else 1)
    except (BrokenPipeError, OutputClosed):
        close_quietly()
    except OSError as error:
        said = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        remedy = _REMEDIES.get(error.errno or 0)
        _fail(f"{said}. {remedy}" if remedy else said)
    except Interrupted as interrupted:
        tell(str(interrupted))
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of typer, about the words that were typed
            raise
        _misused(error)
    else:
        sys.exit(code or 0)


def _fail(text: str, code: int = 1) -> None:
    from millstream.console import painted

    print(f"{painted('millstream:', '1;31', sys.stderr)} {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


def _misused(error: Any) -> None:
    """Wrong use, in one line with a hint."""
    said = str(error.message if getattr(error, "param", 1) is None else error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = "millstream" if context is None else context.command_path
    where = command.removeprefix("millstream").strip()
    said = f"{said[:1].lower()}{said[1:]}{'' if said.endswith('?') else '.'}"
    _fail(f"{f'{where}: ' if where else ''}{said} See: {command} --help", code=2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"millstream {__version__}")
        raise typer.Exit


def _install(wanted: bool) -> None:
    if wanted:
        from millstream.cli_complete import detected_shell, install

        shell = detected_shell()
        written = " and ".join(map(str, install(shell)))
        print(f"Completion for {shell} is in {written}. It works in the next shell you open.")
        raise typer.Exit


def _show_script(wanted: bool) -> None:
    if wanted:
        from millstream.cli_complete import SCRIPTS, detected_shell

        print(SCRIPTS[detected_shell()], end="")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion", help="Let the Tab key complete: bash, zsh, fish.", is_eager=True, callback=_install
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option("--show-completion", help="Print the script for that.", is_eager=True, callback=_show_script),
    ] = False,
) -> None:
    """Train on data far larger than memory."""


@app.command()
def demo(
    path: Annotated[Path, typer.Argument(help="Folder for the demo's files.", metavar="FOLDER")] = Path("demo"),
    model: Annotated[
        str, typer.Option(help="Who is asked: facts, or smollm2 for a real model.", metavar="NAME")
    ] = "facts",
    only: Annotated[str | None, typer.Option(help="One part of it: traces or reads.", metavar="PART")] = None,
) -> None:
    """Ask a small language model, kill it half way, go on, train detectors; then train classifiers of reads."""
    from millstream import demo_reads
    from millstream.demo import check_part, run, story_of

    check_part(only)
    if only != "reads":
        run(path, story_of(model))
    if only != "traces":
        demo_reads.run(path / "reads", demo_reads.ReadStory())


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A trace store, an old .pkl, .pkl.gz or .pt file, or reads.", metavar="PATH")
    ],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare with.", metavar="OTHER")] = None,
    examples: Annotated[int, typer.Option(help="How many example records to show.", metavar="N")] = 3,
    as_json: Json = False,
) -> None:
    """Show what is in a store or in reads: counts, fields, lengths, a few records; or how two stores differ."""
    from dataclasses import asdict

    from millstream.console import progress
    from millstream.store.kinds import are_reads
    from millstream.store.summary import compare, summarise
    from millstream.store.traces import Traces

    if other is None and are_reads(path):
        cli_reads.inspect_reads(path, examples=examples, as_json=as_json)
        return
    paths = [path] if other is None else [path, other]
    with progress("inspect", sum(len(Traces(p)) for p in paths if p.is_dir())) as update:
        summaries = [summarise(p, examples=examples, progress=update) for p in paths]
    comparison = None
    if other is not None:
        with progress("compare", summaries[0].records) as update:
            comparison = compare(path, other, progress=update)
    if as_json:
        answer: dict[str, Any] = {"stores": [asdict(summary) for summary in summaries]}
        if comparison:
            answer["comparison"] = asdict(comparison)
        print_json(answer if comparison else answer["stores"][0])
        return
    from millstream.store.show import show_comparison, show_summary

    for summary in summaries:
        print(show_summary(summary))
    if comparison:
        print(show_comparison(comparison, str(path), str(other)))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A trace store, or reads that have an index.", metavar="PATH")],
    fast: Annotated[bool, typer.Option("--fast", help="Check structure only, not the records' bytes.")] = False,
    as_json: Json = False,
) -> None:
    """Check every CRC of a store and name the shard, record and field of each damage; or reads and their index."""
    from dataclasses import asdict

    from millstream.console import format_bytes, progress, say
    from millstream.store.kinds import are_reads
    from millstream.store.layout import list_shards
    from millstream.store.repair import verify as find_damage
    from millstream.store.traces import Traces

    if are_reads(path):
        cli_reads.verify_reads(path, as_json=as_json)
        return
    traces = Traces(path)
    with progress("verify", traces.num_bytes, unit="bytes") as update:
        damages = list(find_damage(path, fast=fast, progress=update))
    unsealed = len(list_shards(path)[1])
    if as_json:
        print_json(
            {
                "records": len(traces),
                "bytes": traces.num_bytes,
                "unsealed_shards": unsealed,
                "damages": [asdict(damage) for damage in damages],
            }
        )
    for damage in damages if not as_json else ():
        print(damage)
    if unsealed:
        say(f"{unsealed} shard(s) not sealed: a writer is at work or was interrupted, which repair recovers")
    if damages:
        finish(f"{path}: {len(damages)} damage(s) in {len(traces):,} records", "repair", path)
        raise typer.Exit(1)
    how = "structure holds" if fast else "every checksum holds"
    size = f"{len(traces):,} records, {format_bytes(traces.num_bytes)}"
    finish(f"{path}: {size}: {how}", *(("repair", path) if unsealed else ("inspect", path)))


@app.command()
def repair(path: Store, as_json: Json = False) -> None:
    """Recover interrupted shards, rebuild damaged ones, set damaged records aside with their ids."""
    from dataclasses import asdict

    from millstream.console import progress, say
    from millstream.store.repair import repair as mend
    from millstream.store.traces import Traces

    with progress("repair", Traces(path).num_bytes, unit="bytes") as update:
        result = mend(path, progress=update)
    if as_json:
        print_json(asdict(result))
    else:
        for recovery in result.recovered:
            kept = recovery.shard.records if recovery.shard else 0
            print(
                f"shard {recovery.number}: recovered {kept} records, "
                f"cut {recovery.cut_bytes} bytes of an unfinished one"
            )
        for name in result.resealed:
            print(f"{name}: footer and sidecar written anew; no record lost")
        for name in result.rebuilt:
            print(f"{name}: written anew without its damage; the old file is {path}/damaged/{name}")
        for record in result.lost:
            where = f" row {record.row} ({record.question_id!r})" if record.row is not None else ""
            print(f"lost: {record.shard}{where}: {record.reason}")
    if result.lost:
        say(f"{len(result.lost)} lost; listed with their ids in {path}/damaged/lost.jsonl, to be extracted again")
    finish(f"{path}: {len(Traces(path)):,} records", "verify", path)


@app.command()
def merge(
    paths: Annotated[
        list[Path], typer.Argument(help="Stores to merge, then the store to write.", metavar="A B ... OUT")
    ],
    as_json: Json = False,
) -> None:
    """Put the records of several stores into one, by copying their shard files."""
    from millstream.console import progress
    from millstream.store.rewrite import merge as join
    from millstream.store.traces import Traces

    if len(paths) < 2:
        raise typer.BadParameter("give the stores to merge and then the store to write: millstream merge A B OUT")
    *sources, out = paths
    with progress("merge", sum(Traces(source).num_bytes for source in sources), unit="bytes") as update:
        _wrote(join(sources, out, progress=update), as_json)


@app.command()
def subset(
    path: Store,
    out: Out,
    shards: Annotated[str | None, typer.Option(help="Shard numbers, as in 0,3-5.", metavar="NUMBERS")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="A file of question ids, one a line (or JSON lines).", metavar="FILE")
    ] = None,
    where: Annotated[str | None, typer.Option(help="An SQL condition over the scalar fields.", metavar="SQL")] = None,
    as_json: Json = False,
) -> None:
    """Copy some shards, or some records, of a store into a new store."""
    from millstream.console import progress
    from millstream.store.rewrite import find_ids, select_where, subset_records, subset_shards
    from millstream.store.traces import Traces

    if sum(option is not None for option in (shards, ids, where)) != 1:
        raise typer.BadParameter("give exactly one of --shards, --ids and --where")
    if shards is not None:
        numbers = _numbers(shards)
        with progress("subset", len(numbers), unit="shards") as update:
            _wrote(subset_shards(path, out, numbers, progress=update), as_json)
        return
    traces = Traces(path)
    records = select_where(traces, where) if where is not None else find_ids(traces, ids or Path())
    with progress("subset", len(records)) as update:
        _wrote(subset_records(traces, out, records, progress=update), as_json)


@app.command()
def convert(
    paths: Annotated[list[str], typer.Argument(help="Old files, folders or patterns, then OUT.", metavar="OLD... OUT")],
    compression: Annotated[
        str | None, typer.Option(help="none, lz4 or zstd.", show_default="none", metavar="NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Import old .pkl, .pkl.gz and .pt files, traces or preprocessed. Runs no code from them; run again to resume."""
    from millstream.console import progress, say
    from millstream.store.convert import convert as bring
    from millstream.store.convert import expand

    if len(paths) < 2:
        raise typer.BadParameter("give old files and then the store to write: millstream convert 'old/*.pkl' traces/")
    if compression not in (None, "none", "lz4", "zstd"):
        raise typer.BadParameter(f"--compression {compression}: it is none, lz4 or zstd")
    *patterns, out = paths
    files = expand(patterns)
    with progress("convert", sum(file.stat().st_size for file in files), unit="bytes") as update:
        written = bring(files, Path(out), compression=compression, notify=say, progress=update)
    _wrote(written, as_json)


def _numbers(text: str) -> list[int]:
    """`0,3-5` as [0, 3, 4, 5]."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise typer.BadParameter(f"--shards {text}: write numbers and ranges, as in 0,3-5")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _wrote(written: Any, as_json: bool) -> None:
    from millstream.console import format_bytes

    if as_json:
        print_json({"path": str(written.path), "records": written.records, "bytes": written.bytes})
    finish(f"{written.path}: {written.records:,} records, {format_bytes(written.bytes)}", "inspect", written.path)


app.command()(cli_llm.extract)
app.command()(cli_llm.label)
app.command()(cli_llm.featurize)
app.command()(cli_train.train)
app.command()(cli_train.evaluate)
app.command()(cli_train.report)
app.command()(cli_train.classify)
app.command()(cli_view.view)
app.command()(cli_reads.index)
app.command()(cli_reads.pack)
app.command()(cli_reads.unpack)
app.command()(cli_reads.simulate)
