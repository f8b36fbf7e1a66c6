"""The commands for traces of language models: label."""

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli_common import Json, print_json

Settings = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, or a YAML file.", metavar="[KEY=VALUE]...")
]

# ---- label


def label(
    store: Annotated[Path, typer.Argument(help="A trace store (a folder).", show_default=False)],
    settings: Settings = None,
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
    from millstream.store.traces import Traces

    try:
        given = read_settings(LabelSettings, settings or [])
        given.check()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with progress("label", len(Traces(store))) as update:
        done = write_labels(store, **asdict(given), progress=update)
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
        f"Next: millstream train data={store}"
    )
