"""Scoring with the detectors of a finished run: its own test split again, or other labelled stores."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import yaml

from millstream.core.arguments import checked
from millstream.core.collection import Collection
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import quoted, say
from millstream.core.files import publish, publish_json
from millstream.core.remote import to_path
from millstream.core.split import LABEL, Split
from millstream.core.tables import publish_table, read_table
from millstream.errors import BadSetting, BadSource
from millstream.traces.detectors import DetectorSpec, is_ours, scores_of
from millstream.traces.examples import fields_of, open_labelled, split_of
from millstream.traces.kind import EvaluateSettings, TrainSettings
from millstream.traces.store.traces import Traces
from millstream.traces.study import SEEN, data_card, digest_of, scores_table, seen_card, seen_in
from millstream.training.devices import make_fabric
from millstream.training.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    EVALUATED,
    METRICS,
    OWN_TEST,
    SCORES,
    SPLIT,
    WEIGHTS,
    JobKey,
    Line,
    card_kind,
    damaged_file,
    environment,
    finished_jobs,
    job_folder,
    load,
    load_run,
    read_mapping,
    read_scores,
)
from millstream.training.log import DAMAGED_LINE, Log, read_lines
from millstream.training.remote_run import local_run, writing_run
from millstream.training.run import write_predictions
from millstream.training.study import Workplace
from millstream.training.task import FitResources


@overload
def evaluate(run: str | Path, data: str | Path | None = None, **settings: object) -> Path: ...
@overload
def evaluate(run: str | Path, data: Sequence[str | Path], **settings: object) -> list[Path]: ...  # pyright: ignore[reportOverlappingOverload]
@checked
def evaluate(
    run: str | Path, data: str | Path | Sequence[str | Path] | None = None, **settings: object
) -> Path | list[Path]:
    """Score records with the detectors of a run. Returns the folder of the predictions, laid out like a run.

    The labelled records of another store are its test split, without the questions that the run was trained or
    validated on (`include_seen=True` scores these too, and the report says so). Thresholds and calibration stay as
    chosen on the validation split of the run. Without `data`, the test split of the run is scored again.

    A list of stores gives a list of folders. The store that the run was trained on is not scored again: its folder is
    the run. The report of the run compares all stores.

    >>> folder = ms.evaluate("runs/first", "other_traces/")
    """
    given = read_settings(EvaluateSettings, settings)
    is_one, stores = True, list[str | None]()
    if data is None or isinstance(data, str | Path):
        stores = [None if data is None else str(data)]
    else:
        is_one, stores = False, [str(store) for store in data]
    if given.out:
        if len(stores) != 1:
            raise BadSetting(f"out={given.out}: is one folder, but {len(stores)} stores are given. Leave it out")
        with writing_run(given.out) as out:
            _Evaluation(local_run(run), given).work([replace(given, data=stores[0])], out)
        found = [to_path(given.out)]
    else:
        with writing_run(run) as path:
            folders = _Evaluation(path, given, skips_own=not is_one).work([replace(given, data=one) for one in stores])
            found = [to_path(run) / folder.relative_to(path) for folder in folders]
    return found[0] if is_one else found


@dataclass(frozen=True)
class _Work:
    """Records to score, and the settings that say which."""

    records: Collection
    card: Mapping[str, object]
    given: EvaluateSettings


class _Evaluation:
    """The detectors of a run, and the stores that they score."""

    def __init__(self, run: Path, given: EvaluateSettings, *, skips_own: bool = False) -> None:
        self._run, self._skips_own = run, skips_own and not given.include_seen
        self._trained, self._card = load_detector_run(run)
        self._jobs = _jobs(run, given.model)

    def work(self, wanted: Sequence[EvaluateSettings], out: Path | None = None) -> list[Path]:
        """The folder of each evaluation. Everything is checked before anything is scored."""
        works: dict[Path, _Work] = {}
        folders: list[Path] = []
        for given in wanted:
            if self._skips_own and given.data is not None and self._is_own(given.data):
                say(f"{given.data}: not scored again; {self._run} has scores of models that did not see the questions")
                folders.append(self._run)
                continue
            records, card = _records(self._run, self._trained, self._card, given)
            folder = out or self._folder_of(given.data, card["store"], works)
            works[folder] = _Work(records, card, given)
            folders.append(folder)
        for folder, work in works.items():
            self._score(folder, work)
        return folders

    def _is_own(self, store: str) -> bool:
        """Whether the run was trained on these records with these labels."""
        if Traces(store).fingerprint != self._card.get("fingerprint"):
            return False
        labelled = open_labelled(store, self._trained.label, self._trained.positive)
        return digest_of(labelled) == self._card.get("label_digest")

    def _folder_of(self, data: str | None, store: object, taken: Mapping[Path, _Work]) -> Path:
        """evaluated/NAME; NAME-2 if another store of this name was evaluated before."""
        if data is None:
            return self._run / EVALUATED / OWN_TEST
        name, number = Path(data).resolve().name, 1
        while True:
            folder = self._run / EVALUATED / (name if number == 1 else f"{name}-{number}")
            holds = taken[folder].card["store"] if folder in taken else _store_of(folder)
            if folder.name != OWN_TEST and holds in (None, store):
                return folder
            number += 1

    def _score(self, out: Path, work: _Work) -> None:
        run, trained, collection, data = self._run, self._trained, work.records, work.given.data
        out.mkdir(parents=True, exist_ok=True)
        publish_json(out / DATA, work.card)
        publish_json(out / ENVIRONMENT, environment())
        publish(out / CONFIG, yaml.safe_dump({**asdict(trained), "evaluates": str(run)}, sort_keys=False).encode())
        (out / METRICS).unlink(missing_ok=True)
        log = Log(out)
        fits = _fit_lines(run)
        fabric = make_fabric(replace(trained, devices=1))
        folds = split_of(collection, trained) if trained.folds and data is None else None
        for job in self._jobs:
            name, folder = job.model, job_folder(run, job)
            records = collection if folds is None else folds[f"fold {job.fold}"]
            resources = FitResources(job.seed, parse_bytes(work.given.memory) // 2)
            spec = DetectorSpec(name, fields_of(collection))
            built = spec.build(resources=resources, place=Workplace(trained, fabric, str(data or trained.data)))
            tensors, _ = load(folder / WEIGHTS)
            built.model.arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
            begun = time.perf_counter()
            scores = scores_of(built.model, records)
            fit = {key: value for key, value in fits.get(job, {}).items() if key not in ("kind", "time_s")}
            log.write("fit", **{**fit, "score_s": time.perf_counter() - begun, "num_scored": len(records)})
            scored = read_scores(run, job)
            validation = scored.filter(pa.array([part == "val" for part in scored.column("part").to_pylist()]))
            target = job_folder(out, job)
            target.mkdir(parents=True, exist_ok=True)
            tables = [validation, scores_table("test", records, scores)]
            publish_table(target / SCORES, pa.concat_tables(tables, promote_options="default"))
            say(f"{job}: {len(records)} records scored")
        write_predictions(out)


def _fit_lines(run: Path) -> dict[JobKey, Line]:
    """What the log says of every training; damaged lines are left out."""
    found: dict[JobKey, Line] = {}
    for line in read_lines(run):
        with suppress(*DAMAGED_LINE):
            if line["kind"] == "fit":
                found[JobKey.of_line(line)] = line
    return found


def _store_of(folder: Path) -> object:
    """The store whose evaluation is in a folder; None if there is none that could be overwritten by mistake."""
    try:
        return read_mapping(folder / DATA).get("store")
    except BadSource:
        return None


def load_detector_run(run: Path) -> tuple[TrainSettings, Mapping[str, Any]]:
    """The settings and the data card of a run of detectors."""
    found, card = load_run(run, remedy="Next: millstream train data=STORE")
    if card_kind(card) != "traces":
        raise BadSource(
            f"{run}: this run contains read classifiers, not detectors. "
            f"Next: millstream classify {quoted(run)} READS -o calls.tsv"
        )
    missing = [name for name in ("store", "split", "language_model") if name not in card]
    if missing:
        raise damaged_file(run / DATA, f"it has no {', '.join(missing)}")
    return read_settings(TrainSettings, found), card


def _records(
    run: Path, trained: TrainSettings, before: Mapping[str, Any], given: EvaluateSettings
) -> tuple[Collection, dict[str, object]]:
    """The records to score, and their data card; `before` is the data card of the run."""
    data = given.data
    if data is None:
        store = trained.data if to_path(trained.data).exists() else str(before["store"])
        whole = open_labelled(store, trained.label, trained.positive)
        test: Collection = whole if trained.folds else Split.load(run / SPLIT, whole)["test"]
        how, seen = str(before["split"]), before.get("seen")
    else:
        store, whole = data, open_labelled(data, trained.label, trained.positive)
        test, seen = _unseen(run, whole, given)
        how = "all records are the test split"
    card = data_card(store, test, {"test": test}, how)
    if card["language_model"] != before["language_model"]:
        raise BadSource(
            f"{store}: contains traces of {card['language_model']!r}, but the detectors of {run} were trained on "
            f"those of {before['language_model']!r}. Extract the questions with that model"
        )
    is_relabelled = card["fingerprint"] == before.get("fingerprint") and digest_of(whole) != before.get("label_digest")
    has_other_rule = trained.label in ("verdict", LABEL) and card["label_version"] != before.get("label_version")
    if is_relabelled or has_other_rule:
        card["trained_label_rule"] = before.get("label_rule") or "unknown"
    if data is not None:
        card["trained_on"] = before["store"]
    return test, {**card, "seen": seen}


def _unseen(run: Path, collection: Collection, given: EvaluateSettings) -> tuple[Collection, Mapping[str, object]]:
    """The records whose questions the run was not fitted to, and how many others there are; all with `include_seen`."""
    try:
        seen = seen_in(collection, read_table(run / SEEN))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise BadSource(
            f"{run / SEEN}: the list of questions that the run was trained on is missing or damaged "
            f"({type(error).__name__}). Run the same millstream train command again to write it"
        ) from None
    counted = seen_card(seen, left_out=not given.include_seen)
    if given.include_seen or not (seen != "").any():
        return collection, counted
    unseen = np.flatnonzero(seen == "")
    if not len(unseen):
        raise BadSource(
            f"{given.data}: all {len(seen)} labelled records have questions that {run} was trained or validated on. "
            "Extract other questions, or score these anyway: include_seen=true"
        )
    say(
        f"{len(seen) - len(unseen)} of {len(seen)} records left out: the run was trained ({counted['train']}) or "
        f"validated ({counted['val']}) on their questions. To score these too: include_seen=true"
    )
    return collection.subset(unseen), counted


def _jobs(run: Path, names: str | None) -> list[JobKey]:
    """The trained models of a run, or those named; of a learning curve, those of all labels.

    A run folder names no code: a detector of one's own is imported only if it is among `names`.
    """
    finished = [job for job in finished_jobs(run) if not job.labels]
    wanted = None if names is None else {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted((wanted or set[str]()) - {job.model for job in finished})
    if unknown:
        found = ", ".join(dict.fromkeys(job.model for job in finished)) or "none"
        raise BadSource(f"{run}: contains no trained detector {', '.join(unknown)}; trained are: {found}")
    if wanted is not None:
        return [job for job in finished if job.model in wanted]
    ours = [job for job in finished if is_ours(job.model)]
    others = ",".join(dict.fromkeys(job.model for job in finished if not is_ours(job.model)))
    if not ours:
        remedy = f". Name those of your own to import them: model={others}" if others else ""
        raise BadSource(f"{run}: contains no trained detector of millstream{remedy}")
    if others:
        say(f"{others}: left out; detectors of your own are imported only if you name them: model={others}")
    return ours
