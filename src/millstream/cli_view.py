"""The command that shows: view."""

from pathlib import Path
from typing import Annotated

import typer


def view(
    path: Annotated[Path, typer.Argument(help="A trace store, a run folder, or reads.", metavar="STORE|RUN|READS")],
    port: Annotated[int, typer.Option(help="Of this machine.", metavar="NUMBER", show_default="any free one")] = 0,
    run: Annotated[
        Path | None,
        typer.Option(help="Whose detectors scored the traces.", metavar="RUN", show_default="one beside the store"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Of traces: a folder or tokenizer.json. Of reads also base or kmer(6).", metavar="NAME"),
    ] = None,
) -> None:
    """Look at traces, at a run while it trains, or at reads, in a browser: a page on this machine alone."""
    from millstream.console import say
    from millstream.view.open import views_of
    from millstream.view.server import serve

    serve(views_of(path, run=run, tokenizer=tokenizer, notify=say), port=port, title=path.resolve().name, notify=say)
