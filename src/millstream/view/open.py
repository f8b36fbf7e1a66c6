"""What lies at a path -> the views that show it."""

from collections.abc import Callable
from pathlib import Path

from millstream.errors import BadSource
from millstream.view.view import View


def views_of(
    path: Path, *, run: Path | None = None, tokenizer: str | None = None, notify: Callable[[str], None]
) -> list[View]:
    """Of a trace store, a run folder or reads; the first is the one that was asked for."""
    raise BadSource(f"{path}: not yet")
