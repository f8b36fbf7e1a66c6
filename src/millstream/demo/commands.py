"""The command `demo`."""

from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.help import START


def add_commands(app: typer.Typer) -> None:
    app.command(rich_help_panel=START)(demo)


def demo(
    path: Annotated[Path, typer.Argument(help="Output folder of the demo.", metavar="FOLDER")] = Path("demo"),
    model: Annotated[
        str, typer.Option(help="Language model: facts (tiny) or smollm2 (135 M parameters).", metavar="NAME")
    ] = "facts",
    only: Annotated[str | None, typer.Option(help="Run one half only: traces or reads.", metavar="KIND")] = None,
) -> None:
    """Run everything on small synthetic data, in a few minutes.

    Extracts traces of a small language model, kills the extraction halfway,
    resumes it and trains detectors; then simulates reads and trains classifiers.
    """
    from millstream.demo import reads_story, traces_story

    traces_story.check_half(only)
    if only != "reads":
        traces_story.run(path, traces_story.story_of(model))
    if only != "traces":
        reads_story.run(path / "reads", reads_story.ReadStory())
