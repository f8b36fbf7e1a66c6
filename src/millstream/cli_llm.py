"""The commands for traces of language models: extract, label, featurize."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli_common import Json, finish, print_json

Store = Annotated[Path, typer.Argument(help="A trace store (a folder).", metavar="STORE")]
Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings as listed below, or a YAML file of them.", metavar="KEY=VALUE")
]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray for many machines.", metavar="NAME")]
Address = Annotated[
    str | None, typer.Option(help="Of the Ray cluster; without it a local one is started.", metavar="HOST:PORT")
]
Workers = Annotated[
    int | None, typer.Option(help="How many on the cluster.", show_default="one a GPU or machine", metavar="N")
]


def extract(
    questions: Annotated[
        str,
        typer.Argument(
            help="JSONL, JSON, CSV or Parquet file, facts, world, or NAME:CONFIG:SPLIT of the hub.", metavar="QUESTIONS"
        ),
    ],
    store: Store,
    settings: Settings = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(help="Take the questions in an order drawn by this seed.", metavar="N")
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Ask again what failed before.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Ask a causal language model questions and keep its traces. Run the same command again to go on.

    For example: millstream extract questions.jsonl traces model=Qwen/Qwen3-4B tier=probe max_new_tokens=64
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import format_bytes
    from millstream.engine import Engine
    from millstream.source.llm.settings import ExtractSettings

    given = read_settings(ExtractSettings, settings or [])
    where = Engine(engine, address, workers)
    from millstream.store.extract import extract as trace

    options = {"shuffle_seed": shuffle_seed, "retry_errors": retry_errors, "engine": where}
    with redirect_stdout(sys.stderr):  # Ray tells of dead workers on stdout, which is for data
        done = trace(questions, store, **options, **asdict(given))
    if as_json:
        print_json(asdict(done))
    failed = f", {done.errors} of them failed (again with --retry-errors)" if done.errors else ""
    size = f"{done.path}: {done.records:,} traces{failed}, {format_bytes(done.bytes)}"
    if done.interrupted:
        finish(f"{size}\ninterrupted; the same command goes on from here")
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
    """Compare answers with their aliases and write labels.parquet: right, wrong, ambiguous, refused, or no verdict."""
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import progress, say
    from millstream.dataset.label import LabelSettings
    from millstream.dataset.label import label as write_labels
    from millstream.engine import Engine
    from millstream.store.traces import Traces

    given = read_settings(LabelSettings, settings or [])
    where = Engine(engine, address, workers)
    given.check()
    with redirect_stdout(sys.stderr), progress("label", len(Traces(store))) as update:
        done = write_labels(store, **asdict(given), progress=update, map=where.map)
    if as_json:
        print_json(asdict(done))
    for verdict, count in done.counts.items() if not as_json else ():
        print(f"{verdict:<12}{count:>10,}")
    if done.conflicting:
        say(
            f"{done.conflicting} of the unlabelled share a question_id with a record that differs in verdict; labels "
            "are joined by question_id, so give each record one of its own"
        )
    said = f"{done.path}: {done.records:,} records by the rule {done.rule} ({done.label_version})"
    finish(said, "train", f"data={store}")


def featurize(
    store: Store,
    out: Annotated[Path, typer.Argument(help="The store of features to write, or to go on with.", metavar="OUT")],
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compute a feature of every trace once and keep it in a store of its own. Run again to go on."""
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import format_bytes, progress, within
    from millstream.dataset.featurize import FeaturizeSettings
    from millstream.dataset.featurize import featurize as compute
    from millstream.engine import Engine
    from millstream.store.traces import Traces

    given = read_settings(FeaturizeSettings, settings or [])
    where = Engine(engine, address, workers)
    num_records = len(Traces(store))
    with redirect_stdout(sys.stderr), progress("featurize", num_records, memory=within(given.memory)) as update:
        done = compute(store, out, engine=where, progress=update, **asdict(given))
    if as_json:
        print_json(asdict(done))
    without = f", {done.left_out} traces have no such tensors" if done.left_out else ""
    finish(f"{done.path}: {done.records:,} records, {format_bytes(done.bytes)}{without}", "inspect", done.path)
