"""`millstream demo`: its two halves, a fictional world of facts, and two small language models."""

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.app import START, parse_path


def add_commands(app: typer.Typer) -> None:
    app.command(rich_help_panel=START)(demo)


def demo(
    path: Annotated[
        Path, typer.Argument(help="Output folder of the demo.", metavar="FOLDER", parser=parse_path)
    ] = Path("demo"),
    model: Annotated[
        str, typer.Option(help="Language model: facts (tiny) or smollm2 (135 M parameters).", metavar="NAME")
    ] = "facts",
    only: Annotated[str | None, typer.Option(help="Run one half only: traces or reads.", metavar="KIND")] = None,
) -> None:
    """Run everything on small synthetic data, in a few minutes.

    Extracts traces of a small language model, kills the extraction halfway,
    resumes it and trains detectors; then simulates reads and trains classifiers.
    """
    from millstream.demo import stories

    stories.check_half(only)
    stories.make_folder(path)
    if only != "reads":
        stories.run_traces(path, stories.story_of(model))
    if only != "traces":
        stories.run_reads(path / "reads", stories.ReadStory())
