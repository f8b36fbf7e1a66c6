"""The commands for traces of language models: extract, label, featurize."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli_common import Json, print_json

Store = Annotated[Path, typer.Argument(help="A trace store (a folder).", show_default=False)]
Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, or a YAML file.", metavar="[KEY=VALUE]...")
]
EngineName = Annotated[str, typer.Option("--engine", help="local, or ray for many machines.")]
Address = Annotated[str | None, typer.Option(help="Of the Ray cluster; a local one is started when none is given.")]
Workers = Annotated[int | None, typer.Option(help="How many on the cluster.", show_default="one a GPU or machine")]


def extract(
    questions: Annotated[
        str, typer.Argument(help="JSONL, JSON, CSV or Parquet file, facts, world, or NAME:CONFIG:SPLIT of the hub.")
    ],
    store: Store,
    settings: Settings = None,
    shuffle_seed: Annotated[int | None, typer.Option(help="Take the questions in an order drawn by this seed.")] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Ask again what failed before.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Ask a causal language model questions and keep its traces. Run the same command again to go on.

    Settings: model=NAME_OR_FOLDER (or facts, smollm2), tier=stats, graph, probe or full, or fields=hidden[8,16],edges;
    dtype, stored, device, device_map, quantize, revision; max_new_tokens, num_beams, temperature, top_k, top_p, seed;
    prompt=auto, plain, few-shot, chat or a text with {question}; stop, p_true; columns=id=..,question=..; num_samples,
    shard_records, shard_bytes, memory.
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import format_bytes, say
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
    say(f"{done.path}: {done.records} traces{failed}, {format_bytes(done.bytes)}")
    if done.interrupted:
        say("interrupted; the same command goes on from here")
        raise typer.Exit(130)
    say(f"Next: millstream label {done.path}")


def label(
    store: Store,
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare answers with their aliases and write labels.parquet: right, wrong, ambiguous, refused, or no verdict.

    Settings: rule=default, em, f1@0.5, rougeL@0.3 or scores; scores=FILE, a CSV or Parquet file with question_id, with
    column=NAME and threshold=0.5.
    """
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
        print(f"{verdict:<12}{count:>10}")
    if done.conflicting:
        say(
            f"{done.conflicting} of the unlabelled share a question_id with a record that differs in verdict; labels "
            "are joined by question_id, so give each record one of its own"
        )
    say(
        f"{done.path}: {done.records} records by the rule {done.rule} ({done.label_version}). "
        f"Next: millstream inspect {store}"
    )


def featurize(
    store: Store,
    out: Annotated[Path, typer.Argument(help="The store of features to write, or to go on with.", show_default=False)],
    settings: Settings = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compute a feature of every trace once and keep it in a store of its own. Run again to go on.

    Settings: feature=layers with token=last (or first, mean, last_prompt, first_answer, mean_answer, a number) and
    field=hidden; feature=graphs with k=8 and threshold=0; feature=fields with fields=NAME,NAME; dtype, shard_bytes,
    memory.
    """
    from dataclasses import asdict

    from millstream.config import read_settings
    from millstream.console import format_bytes, progress, say
    from millstream.dataset.featurize import FeaturizeSettings
    from millstream.dataset.featurize import featurize as compute
    from millstream.engine import Engine
    from millstream.store.traces import Traces

    given = read_settings(FeaturizeSettings, settings or [])
    where = Engine(engine, address, workers)
    with redirect_stdout(sys.stderr), progress("featurize", len(Traces(store))) as update:
        done = compute(store, out, engine=where, progress=update, **asdict(given))
    if as_json:
        print_json(asdict(done))
    without = f", {done.left_out} traces have no such tensors" if done.left_out else ""
    say(f"{done.path}: {done.records} records, {format_bytes(done.bytes)}{without}")
    say(f"Next: millstream inspect {done.path}")
