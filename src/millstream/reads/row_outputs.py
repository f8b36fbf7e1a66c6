"""Where rows go: to stdout, or, until it is their turn in the output, to a folder beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.core.files import publish
from millstream.core.outputs import RESUME, PartialOutput, stdout
from millstream.reads.rows import Rows

Span = tuple[int, int]  # reads, from the first to before the last


class Stdout:
    """Stdout with the methods of `TextOutput`, or, with `saved`, an output to which nothing is left to write."""

    def __init__(self, out: Path, terms: Mapping[str, object], saved: Mapping[str, Any] | None = None) -> None:
        self.out, self.terms, self.saved, self.is_finished = out, terms, saved, saved is not None

    def __enter__(self) -> "Stdout":
        self._file = stdout()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()

    def write(self, text: bytes) -> None:
        self._file.write(text)

    def save(self, saved: Mapping[str, object]) -> None:
        """Nothing to save."""

    def finish(self, saved: Mapping[str, object]) -> None:
        self.is_finished = True

    def publish(self) -> None:
        """It is published as it is written."""


def early_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.early")


class EarlyRows:
    """Rows that arrive before their turn: on disk in `OUT.early.partial`, safe at once; for stdout in memory."""

    def __init__(self, out: Path | None, terms: Mapping[str, object]) -> None:
        self._output = None if out is None else PartialOutput(early_file(out), terms)
        self._held: dict[Span, Rows | None] = {}  # None: on disk
        if self._output is not None:
            spans: Sequence[Span] = (self._output.load() or {"spans": []})["spans"]
            self._held.update(((first, last), None) for first, last in spans)

    @property
    def spans(self) -> list[Span]:
        return sorted(self._held)

    def __enter__(self) -> "EarlyRows":
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            if not self._held:
                self._output.remove()
            self._output.__exit__()

    def add(self, rows: Rows) -> None:
        span = rows.first, rows.last
        self._held[span] = rows if self._output is None else None
        if self._output is not None:
            publish(self._output.path / _name(span), rows.to_bytes(), RESUME)
            self._commit()

    def take(self, span: Span) -> Rows:
        rows = self._held[span]
        if rows is None:
            assert self._output is not None
            rows = Rows.from_bytes(span, (self._output.path / _name(span)).read_bytes())
        return rows

    def drop_before(self, position: int) -> None:
        """Forget rows that are saved in the output, or that it has passed."""
        past = [span for span in self._held if span[0] < position]
        for span in past:
            del self._held[span]
        if past and self._output is not None:
            self._commit()
            for span in past:
                (self._output.path / _name(span)).unlink()

    def _commit(self) -> None:
        assert self._output is not None
        sizes = {_name(span): (self._output.path / _name(span)).stat().st_size for span in self._held}
        self._output.commit({"spans": self.spans}, sizes)


def _name(span: Span) -> str:
    return f"{span[0]}-{span[1]}"
