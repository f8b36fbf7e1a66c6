"""The explorer page of a trace store, and what the explorer needs to serve it."""

from pathlib import Path

from millstream.view.view import View

TAKES_RUN = True  # the page shows the scores of a run with the records


def view_of(path: Path, *, run: Path | None = None, tokenizer: str | None = None) -> View:
    from millstream.traces.view.page import traces_view  # not needed for reads

    return traces_view(path, run=run, tokenizer=tokenizer)
