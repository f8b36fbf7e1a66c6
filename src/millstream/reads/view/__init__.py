"""The explorer page of reads, and what the explorer has to know to offer it."""

from pathlib import Path

from millstream.view.view import View

TAKES_RUN = False  # the page shows the reads alone


def view_of(path: Path, *, run: Path | None = None, tokenizer: str | None = None) -> View:
    from millstream.reads.view.page import reads_view  # not for traces

    return reads_view(path, tokenizer=tokenizer)
