"""A path -> the views that show what it contains."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from millstream.core.registry import kind_at, plug
from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.training.folder import CONFIG, DATA, METRICS, PREDICTIONS, kind_of
from millstream.view.run_page import run_view
from millstream.view.view import View


class KindView(Protocol):
    """How a kind of record plugs into the explorer: the module `millstream.KIND.view`."""

    TAKES_RUN: bool  # whether its page shows the scores of a run

    def view_of(self, path: Path, *, run: Path | None = None, tokenizer: str | None = None) -> View: ...


def views_of(
    path: Path, *, run: Path | None = None, tokenizer: str | None = None, notify: Callable[[str], None]
) -> list[View]:
    """The views of records or of a run folder; the first is that of the path itself."""
    if is_run(path):
        if run is not None:
            raise BadSetting(f"--run {run}: {path} is a run itself; use --run with the records a run was trained on")
        return [run_view(path), *_views_of_records(path, tokenizer, notify)]
    kind = kind_at(path)
    shown = _view_of_kind(kind)
    if not shown.TAKES_RUN:
        if run is not None:
            raise BadSetting(f"--run {run}: {path} contains {kind}, which are shown without scores")
        return [shown.view_of(path, tokenizer=tokenizer)]
    if run is not None and not is_run(run):
        raise BadSource(f"--run {run}: not a run of millstream train")
    found = run or find_run(path)
    if found is not None and run is None:
        notify(f"showing the scores of {found}; for another run: --run FOLDER")
    records = shown.view_of(path, run=found, tokenizer=tokenizer)
    return [records] if found is None else [records, run_view(found)]


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file() and ((path / METRICS).exists() or (path / DATA).exists())


def find_run(store: Path) -> Path | None:
    """The newest run next to the store, or in a folder next to it, that was trained on this store."""
    around = store.resolve().parent
    cards = [card for pattern in (f"*/{DATA}", f"*/*/{DATA}") for card in around.glob(pattern)]
    runs = [card.parent for card in cards if (card.parent / PREDICTIONS).exists()]
    ours = [run for run in runs if _store_of(run) == store.resolve()]
    return max(ours, key=lambda run: (run / PREDICTIONS).stat().st_mtime, default=None)


def _views_of_records(run: Path, tokenizer: str | None, notify: Callable[[str], None]) -> list[View]:
    """The view of the records a run was trained on, if they are still there."""
    shown = _view_of_kind(kind_of(run))
    store = _store_of(run) if shown.TAKES_RUN else None
    if store is None:
        return []
    try:
        return [shown.view_of(store, run=run, tokenizer=tokenizer)]
    except (MillstreamError, OSError) as error:
        notify(f"cannot show the records of this run: {error}")
        return []


def _view_of_kind(kind: str) -> KindView:
    return cast(KindView, plug(kind, "view"))


def _store_of(run: Path) -> Path | None:
    try:
        card = cast("dict[str, object]", json.loads((run / DATA).read_text()))
        return Path(str(card["store"])).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
