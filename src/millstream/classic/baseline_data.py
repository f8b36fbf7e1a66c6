"""The data of the old training script -> stores, and which of its models train on which of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from millstream.classic.preprocessed_store import SUBFOLDERS, Kind, Scratch, old_files, open_preprocessed, store_name
from millstream.console import progress, say
from millstream.dataset.label import UNLABELLED, label
from millstream.dataset.score_files import USUAL
from millstream.errors import BadSource, ConfigMismatch, MissingLabel
from millstream.source.preprocessed import is_preprocessed
from millstream.store.convert import convert, expand
from millstream.store.layout import MANIFEST, list_shards

KINDS: Mapping[str, Kind] = {"lstm": "lstm", "gnn": "gnn", "gvae": "gnn"}  # what a model reads of preprocessed files
TRACES, TOGETHER = "traces", "all_models"
RUNS = (TOGETHER, *SUBFOLDERS.values())


@dataclass(frozen=True)
class Job:
    """Models that train on one store, in a run folder of this name."""

    run: str
    store: Path
    models: Sequence[str]
    scratch: Scratch | None = None  # lives as long as the store is needed


def preprocessed_jobs(place: Path, models: Mapping[str, bool]) -> list[Job]:
    """For a folder that was preprocessed, a part of one, or a trace store. `models` says which ones have to be there.

    Old files are converted once, into stores beside them.
    """
    if _is_store(place):
        return [Job(TOGETHER, place, list(models))]
    jobs: list[Job] = []
    kinds: tuple[Kind, ...] = ("lstm", "gnn")
    for kind in kinds:
        names = [model for model in models if KINDS[model] == kind]
        if names and (any(models[name] for name in names) or _holds(place, kind)):
            store, scratch = _store_of(place, kind)
            jobs.append(Job(SUBFOLDERS[kind], store, names, scratch))
        elif names:
            say(f"{place}: nothing for {', '.join(names)}, which are left out; no {SUBFOLDERS[kind]} is there")
    if not jobs:
        open_preprocessed(place, KINDS[next(iter(models))], None)  # says what is missing
    return jobs


def traces_job(pattern: str, scores: Path, threshold: float, *, out: Path, models: Sequence[str]) -> Job:
    """For old traces and a CSV of their scores: both in a store, made once, whose labels are those of now."""
    if not scores.is_file():
        raise BadSource(f"{scores}: no such file; it has the columns question_id and {USUAL}")
    files = expand([pattern])
    store = out / TRACES
    try:
        with progress("convert", sum(file.stat().st_size for file in files), unit="bytes") as update:
            convert(files, store, notify=say, progress=update)
    except ConfigMismatch:
        raise ConfigMismatch(
            f"{store}: was made of other files than {pattern} has now; remove it, or choose another --output-dir"
        ) from None
    found = label(store, rule="scores", scores=scores, column=USUAL, threshold=threshold)
    right, wrong, without = (found.counts[name] for name in ("right", "wrong", UNLABELLED))
    if not right + wrong:
        raise BadSource(f"{scores}: has no score for any of the {found.records} traces of {pattern}")
    say(
        f"{store}: {found.records} traces, {right} right and {wrong} wrong ({USUAL} below {threshold:g}); "
        f"{without} without a score are left out"
    )
    return Job(TOGETHER, store, models)


def _holds(place: Path, kind: Kind) -> bool:
    """Whether there is something for models of this kind."""
    for folder in _folders(place, kind):
        if folder.is_dir() and (files := old_files(folder)):
            return is_preprocessed(files[0]) == kind
    return _is_store(place / SUBFOLDERS[kind])


def _store_of(place: Path, kind: Kind) -> tuple[Path, Scratch | None]:
    folders = _folders(place, kind)
    if _is_store(folders[1]):
        return folders[1], None
    scratch: Scratch | None = None
    with suppress(MissingLabel):  # training counts the traces without one and leaves them out
        scratch = open_preprocessed(place, kind, None)[1]
    made = [folder / store_name(kind) for folder in ([scratch.path] if scratch else folders)]
    return next(store for store in made if _is_store(store)), scratch


def _folders(place: Path, kind: Kind) -> tuple[Path, Path]:
    return place, place / SUBFOLDERS[kind]


def _is_store(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).exists() or any(list_shards(folder)))
