"""What lies at a path -> the views that show it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from millstream.errors import BadSetting, BadSource, MillstreamError
from millstream.store.kinds import are_reads
from millstream.train.folder import CONFIG, DATA, METRICS, PREDICTIONS, READS, kind_of
from millstream.view.view import View


def views_of(
    path: Path, *, run: Path | None = None, tokenizer: str | None = None, notify: Callable[[str], None]
) -> list[View]:
    """Of a trace store, a run folder or reads; the first is the one that was asked for."""
    if is_run(path):
        from millstream.view.run_view import run_view

        if run is not None:
            raise BadSetting(f"--run {run}: {path} is a run itself; --run goes with a trace store")
        return [run_view(path), *_traces_of(path, tokenizer, notify)]
    if are_reads(path):
        from millstream.view.reads_view import reads_view

        if run is not None:
            raise BadSetting(f"--run {run}: goes with a trace store, and {path} holds reads")
        return [reads_view(path, tokenizer=tokenizer)]
    from millstream.view.run_view import run_view
    from millstream.view.traces_view import traces_view

    if run is not None and not is_run(run):
        raise BadSource(f"--run {run}: is no run of millstream train")
    found = run or find_run(path)
    if found is not None and run is None:
        notify(f"detector scores are those of {found}; another run: --run FOLDER")
    traces = traces_view(path, run=found, tokenizer=tokenizer)
    return [traces] if found is None else [traces, run_view(found)]


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file() and ((path / METRICS).exists() or (path / DATA).exists())


def find_run(store: Path) -> Path | None:
    """The newest run beside the store, or in a folder beside it, that is about this store."""
    around = store.resolve().parent
    cards = [card for pattern in (f"*/{DATA}", f"*/*/{DATA}") for card in around.glob(pattern)]
    runs = [card.parent for card in cards if (card.parent / PREDICTIONS).exists()]
    ours = [run for run in runs if _store_of(run) == store.resolve()]
    return max(ours, key=lambda run: (run / PREDICTIONS).stat().st_mtime, default=None)


def _traces_of(run: Path, tokenizer: str | None, notify: Callable[[str], None]) -> list[View]:
    """The view of the store a run is about, if that is still where it was."""
    store = None if kind_of(run) == READS else _store_of(run)
    if store is None:
        return []
    from millstream.view.traces_view import traces_view

    try:
        return [traces_view(store, run=run, tokenizer=tokenizer)]
    except (MillstreamError, OSError) as error:
        notify(f"its traces cannot be shown: {error}")
        return []


def _store_of(run: Path) -> Path | None:
    try:
        card = cast("dict[str, object]", json.loads((run / DATA).read_text()))
        return Path(str(card["store"])).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
