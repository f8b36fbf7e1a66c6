"""The commands for traces, and how traces are inspected and verified."""

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millstream.cli.app import (
    MAINTAIN,
    TRAIN,
    Address,
    EngineName,
    Json,
    RunFolder,
    Settings,
    Workers,
    finish,
    parse_path,
    print_json,
    show_report,
    with_settings,
)
from millstream.core.bucket import is_url
from millstream.core.config import list_settings, read_settings
from millstream.core.console import format_bytes, plural, progress, say, show
from millstream.core.engine import Engine
from millstream.errors import BadSource
from millstream.traces.kind import EvaluateSettings, ExtractSettings, FeaturizeSettings, LabelSettings

if TYPE_CHECKING:
    from millstream.traces.report.transfer import Matrix

PANEL = "Language models: from questions to labelled traces"

Store = Annotated[Path, typer.Argument(help="A trace store (a folder or URL).", metavar="STORE", parser=parse_path)]
Out = Annotated[Path, typer.Argument(help="The store to write; must not exist yet.", metavar="OUT", parser=parse_path)]


def add_commands(app: typer.Typer) -> None:
    """Add the commands for traces to the command line."""
    for command, settings in ((extract, ExtractSettings), (label, LabelSettings), (featurize, FeaturizeSettings)):
        app.command(rich_help_panel=PANEL, cls=_listing(settings))(command)
    app.command(rich_help_panel=PANEL)(convert)
    app.command(rich_help_panel=TRAIN, cls=_listing(EvaluateSettings))(evaluate)
    for command in (repair, merge, subset):
        app.command(rich_help_panel=MAINTAIN)(command)


def inspect(path: Path, other: Path | None, *, examples: int, tolerance: float, as_json: bool) -> None:
    """Print a summary of a store; with another one, of both and of their differences."""
    from millstream.traces.store.inspect import Summary, compare, show_comparison, show_summary, summarise
    from millstream.traces.store.traces import Traces

    summaries: list[Summary] = []
    for store in [path] if other is None else [path, other]:
        with progress("inspect", len(Traces(store)) if store.is_dir() else 0) as update:
            summaries.append(summarise(store, examples=examples, progress=update))
    comparison = None
    if other is not None:
        with progress("compare", summaries[0].records) as update:
            comparison = compare(path, other, tolerance=tolerance, progress=update)
    if as_json:
        output: dict[str, Any] = {"stores": [asdict(summary) for summary in summaries]}
        if comparison:
            output["comparison"] = asdict(comparison)
        print_json(output if comparison else output["stores"][0])
        return
    for summary in summaries:
        show(show_summary(summary))
    if comparison:
        show(show_comparison(comparison, str(path), str(other)))


def verify(path: Path, *, fast: bool, as_json: bool) -> None:
    """Print the shard, record and field of all damage in a store; exit with code 1 if there is any."""
    from millstream.traces.store.manifest import list_shards
    from millstream.traces.store.repair import verify as find_damage
    from millstream.traces.store.traces import Traces

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
        show(damage)
    if unsealed:
        shards = plural(unsealed, "unsealed shard")
        say(f"{shards}: a writer is running, or was interrupted (repair recovers its records)")
    if damages:
        finish(f"{path}: {plural(len(damages), 'problem')} in {len(traces):,} records", "repair", path)
        raise typer.Exit(1)
    result = "structure intact" if fast else "all checksums match"
    size = f"{len(traces):,} records, {format_bytes(traces.num_bytes)}"
    finish(f"{path}: {size}: {result}", *(("repair", path) if unsealed else ("inspect", path)))


def extract(
    questions: Annotated[
        str,
        typer.Argument(
            help="JSONL, JSON, CSV or Parquet file, a folder that datasets saved, - (JSONL on stdin), facts, world, or "
            "NAME:CONFIG:SPLIT on the hub.",
            metavar="QUESTIONS",
        ),
    ],
    store: Store,
    settings: Settings = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Shuffle the questions with this seed.", metavar="N", min=0)
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Retry the questions that failed.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Run a causal language model on questions and store its traces.

    Run the same command again to resume.

    Example: millstream extract questions.jsonl traces model=Qwen/Qwen3-4B tier=probe
    """
    given = read_settings(ExtractSettings, settings or [])
    where = Engine(engine, address, workers)
    from millstream.traces.extract import extract as trace  # slow to import: after the settings are checked

    options = {"shuffle_seed": shuffle_seed, "retry_errors": retry_errors, "engine": where}
    with redirect_stdout(sys.stderr):  # Ray reports dead workers on stdout, which is for data
        done = trace(questions, store, **options, **asdict(given))
    if as_json:
        print_json(asdict(done))
    failed = f", {done.errors} of them failed (run again with --retry-errors)" if done.errors else ""
    size = f"{done.path}: {done.records:,} traces{failed}, {format_bytes(done.bytes)}"
    if done.interrupted:
        finish(f"{size}\ninterrupted; progress saved; run the same command to resume")
        raise typer.Exit(130)
    finish(size, "label", done.path)


def label(
    store: Store,
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare answers with the correct ones, or have a model compare them, and write labels.

    Writes labels.parquet: right, wrong, ambiguous or refused.
    An answer that cannot be judged has no label.
    """
    from millstream.traces.examples import missing_in_splits
    from millstream.traces.label import label as write_labels
    from millstream.traces.rules import rule_of
    from millstream.traces.store.traces import Traces

    given = read_settings(LabelSettings, settings or [])
    where = Engine(engine, address, workers)
    rule = rule_of(given)
    with redirect_stdout(sys.stderr), progress("label", len(Traces(store))) as update:
        done = write_labels(store, **asdict(given), progress=update, map=where.map)
    if as_json:
        print_json(asdict(done))
    say(f"rule {rule}: {rule.meaning}")
    for verdict, count in done.counts.items() if not as_json else ():
        show(f"{verdict:<12}{count:>10,}")
    if done.human:
        say(f"verdicts of people replace those of the rule: {done.human:,}")
    for line in (*done.agreements, *done.notes):
        say(str(line))
    if done.conflicting:
        say(
            f"{done.conflicting} records are unlabelled because another record with the same id has a "
            "different verdict. Labels are joined by id: give each a unique record_id"
        )
    labelled = f"{done.path}: {done.records:,} records, rule {done.rule} ({done.label_version})"
    fewest = min(done.counts["right"], done.counts["wrong"])
    if fewest:
        missing = missing_in_splits(store) if fewest < 1000 else ""  # with more, all splits have both
        finish(*((f"{labelled}\n{missing}", "inspect", store) if missing else (labelled, "train", f"data={store}")))
    elif done.counts["right"] or done.counts["wrong"]:
        only = "right" if done.counts["right"] else "wrong"
        finish(f"{labelled}\nno answer but {only} ones; training needs right and wrong answers", "inspect", store)
    else:
        finish(
            f"{labelled}\nno answer is labelled right or wrong; to give correct answers: references=FILE",
            *("inspect", store),
        )


def featurize(
    store: Store,
    out: Annotated[
        Path, typer.Argument(help="The feature store to write or to resume.", metavar="OUT", parser=parse_path)
    ],
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compute a feature of every trace and store it.

    Run the same command again to resume.
    """
    from millstream.core.memory import Allowance
    from millstream.traces.features import featurize as compute
    from millstream.traces.store.traces import Traces

    given = read_settings(FeaturizeSettings, settings or [])
    where = Engine(engine, address, workers)
    num_records = len(Traces(store))
    with (
        redirect_stdout(sys.stderr),
        progress("featurize", num_records, memory=Allowance(given.memory).usage) as update,
    ):
        done = compute(store, out, engine=where, progress=update, **asdict(given))
    if as_json:
        print_json(asdict(done))
    if done.note:
        say(done.note)
    without = f"; {done.left_out} traces lack the required tensors" if done.left_out else ""
    finish(f"{done.path}: {done.records:,} records, {format_bytes(done.bytes)}{without}", "inspect", done.path)


def convert(
    paths: Annotated[
        list[str],
        typer.Argument(help="Files, folders or patterns, then the store to write.", metavar="FILES... OUT"),
    ],
    compression: Annotated[
        Literal["none", "lz4", "zstd"] | None,
        typer.Option(help="none, lz4 or zstd.", show_default="none", metavar="NAME"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory budget.", show_default="the free memory", metavar="SIZE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Import traces of other programs into a store.

    Reads .pkl, .pkl.gz and .pt files of the old scripts, hidden states of vLLM
    and speculators (.safetensors), and folders that datasets saved.
    No code in them is run. Run the same command again to resume.
    """
    from millstream.traces.convert import convert as import_files
    from millstream.traces.convert import expand

    if len(paths) < 2:
        raise typer.BadParameter("give the files, then the store to write: millstream convert 'old/*.pkl' traces/")
    *patterns, out = paths
    files = expand(patterns)
    with progress("convert", sum(file.stat().st_size for file in files), unit="bytes") as update:
        written = import_files(
            files, parse_path(out), compression=compression, memory=memory, notify=say, progress=update
        )
    _finish_store(written, as_json)


def evaluate(
    run: RunFolder,
    stores: Annotated[
        list[str] | None,
        typer.Argument(help="Labelled stores, more runs, and settings.", metavar="STORE|RUN|KEY=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score other stores, or the test split again, with the detectors of a run.

    Nothing is fitted. The report of the run compares all stores.
    With several runs, the best detector of each is shown: trained on (rows),
    tested on (columns).

    Example: millstream evaluate runs/first other_traces more_traces
    """
    from millstream.traces.evaluate import evaluate as score

    runs, others, settings = _told_apart(run, stores or [])
    given = asdict(read_settings(EvaluateSettings, settings))
    data = given.pop("data")
    others = others or ([data] if data else [])
    if len(runs) > 1 and not others:
        raise typer.BadParameter("give the stores to score, too: millstream evaluate RUN RUN STORE STORE")
    if len(runs) == 1 and len(others) < 2:
        folder = score(run, *others, **given)
        if others and not given["out"]:
            _write_report(run)
        show_report(folder, as_json)
        return
    if given["out"]:
        raise typer.BadParameter(f"out={given['out']} is the folder of one run and one store")
    matrices = {one: _evaluate_stores(one, others, given) for one in runs}
    _show_transfer(matrices, given["model"], as_json)


def _told_apart(run: Path, given: Sequence[str]) -> tuple[list[Path], list[str], list[str]]:
    """Runs, stores and settings."""
    from millstream.training.folder import CONFIG

    runs, stores, settings = [run], list[str](), list[str]()
    for text in given:
        is_pair = "=" in text and not is_url(text) and not Path(text).exists()
        if is_pair or text.endswith((".yaml", ".yml")):
            settings.append(text)
        elif ((path := parse_path(text)) / CONFIG).is_file():
            runs.append(path)
        else:
            stores.append(text)
    return list(dict.fromkeys(runs)), list(dict.fromkeys(stores)), settings


def _evaluate_stores(run: Path, stores: Sequence[str], given: Mapping[str, Any]) -> "Matrix":
    """Score stores and write the pages of all evaluations and of the run. Returns how its detectors transfer."""
    from millstream.traces.evaluate import evaluate as score
    from millstream.traces.report import report_on
    from millstream.traces.report.evaluate import read_results
    from millstream.traces.report.transfer import transfer_of
    from millstream.training.remote_run import writing_run

    folders = [folder for folder in score(run, stores, **given) if folder != run]
    for folder in folders:
        _write_report(folder)
    with writing_run(run) as place:
        results = read_results(place)
        found = transfer_of(results)
        report_on(results, found).write(place / "report.html")
    return found.only([folder.name for folder in folders])


def _write_report(run: Path) -> None:
    """The page of a run, without showing it."""
    from millstream.report import report_of
    from millstream.training.remote_run import writing_run

    with writing_run(run) as folder:
        try:
            report_of(folder).write(folder / "report.html")
        except BadSource as error:  # of an evaluation: answers of one kind only; others can still be compared
            say(str(error))


def _show_transfer(matrices: Mapping[Path, "Matrix"], models: str | None, as_json: bool) -> None:
    from millstream.traces.report.transfer import joined, matrix_text

    found = joined(matrices, models=models)
    if as_json:
        print_json(found.json)
    else:
        show(matrix_text(found))
    first = next(iter(matrices))
    finish(f"{first}: {plural(len(found.stores), 'store')} compared. Open {first / 'report.html'}", "view", first)


def repair(path: Store, as_json: Json = False) -> None:
    """Recover interrupted shards and set damaged records aside.

    Damaged shards are rebuilt without the lost records.
    The ids of lost records are in damaged/lost.jsonl.
    """
    from millstream.traces.store.repair import repair as repair_store
    from millstream.traces.store.traces import Traces

    with progress("repair", Traces(path).num_bytes, unit="bytes") as update:
        result = repair_store(path, progress=update)
    if as_json:
        print_json(asdict(result))
    else:
        for recovery in result.recovered:
            kept = recovery.shard.records if recovery.shard else 0
            show(
                f"shard {recovery.number}: recovered {plural(kept, 'record')}, "
                f"removed {recovery.cut_bytes} bytes of an incomplete one"
            )
        for name in result.resealed:
            show(f"{name}: footer and sidecar rewritten; no record lost")
        for name in result.rebuilt:
            show(f"{name}: rewritten without the damaged records; the old file is {path}/damaged/{name}")
        for name in result.set_aside:
            show(f"{name}: set aside as {path}/damaged/{name}; no record lost")
        for record in result.lost:
            where = f" row {record.row} ({record.id!r})" if record.row is not None else ""
            show(f"lost: {record.shard}{where}: {record.reason}")
    if result.lost:
        lost = plural(len(result.lost), "record")
        say(f"{lost} lost; to extract them again, see the ids in {path}/damaged/lost.jsonl")
    finish(f"{path}: {len(Traces(path)):,} records", "verify", path)


def merge(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Stores to merge, then the store to write.", metavar="A B ... OUT", parser=parse_path),
    ],
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Allow different models or settings, and the same id twice.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Merge several stores into one by copying their shards and labels."""
    from millstream.traces.store.rewrite import merge as merge_stores
    from millstream.traces.store.traces import Traces

    if len(paths) < 2:
        raise typer.BadParameter("give the stores to merge, then the store to write: millstream merge A B OUT")
    *sources, out = paths
    with progress("merge", sum(Traces(source).num_bytes for source in sources), unit="bytes") as update:
        _finish_store(merge_stores(sources, out, mixed=mixed, progress=update), as_json)


def subset(
    path: Store,
    out: Out,
    shards: Annotated[str | None, typer.Option(help="Shard numbers, such as 0,3-5.", metavar="NUMBERS")] = None,
    ids: Annotated[
        Path | None,
        typer.Option(
            help="File of question ids, one per line (or JSON lines); - is stdin.", metavar="FILE", parser=parse_path
        ),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="SQL condition on scalar fields and labels, such as verdict.", metavar="SQL")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy some shards or records of a store, with their labels, into a new one."""
    from millstream.traces.store.rewrite import find_ids, subset_records, subset_shards
    from millstream.traces.store.traces import Traces
    from millstream.traces.store.where import select_where

    if sum(option is not None for option in (shards, ids, where)) != 1:
        raise typer.BadParameter("give exactly one of --shards, --ids and --where")
    if shards is not None:
        numbers = _parse_numbers(shards, [shard.number for shard in Traces(path).shards])
        with progress("subset", len(numbers), unit="shards") as update:
            _finish_store(subset_shards(path, out, numbers, progress=update), as_json)
        return
    traces = Traces(path)
    records = select_where(traces, where) if where is not None else find_ids(traces, ids or Path())
    with progress("subset", len(records)) as update:
        _finish_store(subset_records(traces, out, records, progress=update), as_json)


def _listing(settings: type[Any]) -> Any:
    return with_settings(lambda: {"Settings": list_settings(settings)})


def _parse_numbers(text: str, known: Sequence[int]) -> list[int]:
    """`0,3-5` -> [0, 3, 4, 5], of which the first that is not known ends the list: it is refused."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,99})(?:-([0-9]{1,99}))?\s*", part)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise typer.BadParameter(f"--shards {text[:99]}: must be numbers and ranges, such as 0,3-5")
        last = int(found[2] or found[1])
        numbers += range(int(found[1]), min(last, max(known, default=0)) + 1)
        if last not in known:
            return [*numbers, last]
    return numbers


def _finish_store(written: Any, as_json: bool) -> None:
    if written.note:
        say(written.note)
    if as_json:
        print_json({"path": str(written.path), "records": written.records, "bytes": written.bytes})
    finish(f"{written.path}: {written.records:,} records, {format_bytes(written.bytes)}", "inspect", written.path)
