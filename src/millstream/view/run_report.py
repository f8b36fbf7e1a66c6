"""The report of a run as a file: whether there is one, whether it is older than the scores, and making it meanwhile."""

import threading
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.train.folder import PREDICTIONS

PAGE = "report.html"


class RunReport:
    """The page of a run folder. Making it takes matplotlib seconds, so a thread does it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self._error: str | None = None

    @property
    def path(self) -> Path:
        return self._run / PAGE

    def tell(self) -> dict[str, object]:
        written, scored = _modified(self.path), _modified(self._run / PREDICTIONS)
        return {
            "version": None if written is None else str(written),
            "is_older": written is not None and scored is not None and written < scored,
            "can_be_made": scored is not None,
            "is_being_made": self._making is not None and self._making.is_alive(),
            "error": self._error,
        }

    def make(self) -> dict[str, object]:
        """Begin, unless it is being made already."""
        with self._lock:
            if self._making is None or not self._making.is_alive():
                self._error = None
                self._making = threading.Thread(target=self._make)  # no daemon: what was begun is written
                self._making.start()
        return self.tell()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._making is not None:
            self._making.join()

    def _make(self) -> None:
        from millstream.report.reported import report_of

        try:
            report_of(self._run).write(self.path)
        except (MillstreamError, OSError) as error:
            self._error = " ".join(str(error).split())
        except Exception as error:  # a page that waits is told of what nobody thought of, too
            self._error = f"{type(error).__name__}: {error}"
            raise


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
