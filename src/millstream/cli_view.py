"""The command that shows: view."""

from pathlib import Path
from typing import Annotated

import typer


def view(
    path: Annotated[Path, typer.Argument(help="A trace store, a run folder, or reads.", show_default=False)],
    port: Annotated[int, typer.Option(help="On this machine.", show_default="any free one")] = 0,
    run: Annotated[
        Path | None,
        typer.Option(help="The run whose detectors scored the traces.", show_default="one found beside the store"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of reads: base, kmer(6) or hf(FOLDER). Of traces: a folder or tokenizer.json.")
    ] = None,
) -> None:
    """Look at traces, at a run while it trains, or at reads, in a browser: a page on this machine alone."""
    from millstream.console import say
    from millstream.view.open import views_of
    from millstream.view.server import serve

    serve(views_of(path, run=run, tokenizer=tokenizer, notify=say), port=port, title=path.resolve().name, notify=say)
