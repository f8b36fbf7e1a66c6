"""Detectors of wrong answers, compared on one split of a labelled store; `ms.evaluate` scores with a finished run."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from millstream.core.collection import Collection
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import quoted, say
from millstream.core.files import publish, publish_json, publish_table
from millstream.core.split import LABEL, Split, labelled, split
from millstream.errors import BadSource, BadSplit, MissingLabel
from millstream.traces.detectors import DetectorSpec, detector_specs, scores_of
from millstream.traces.detectors.logistic import Scores
from millstream.traces.kind import EvaluateSettings, TrainSettings
from millstream.traces.store.traces import LABELS_FILE, Traces
from millstream.training.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    METRICS,
    SCORES,
    SPLIT,
    WEIGHTS,
    Log,
    card_kind,
    environment,
    finished_jobs,
    job_folder,
    load,
    load_run,
    read_lines,
)
from millstream.training.run import make_fabric, write_predictions
from millstream.training.study import Built, ModelSpec, Workplace
from millstream.training.task import FitResources

VERDICTS = {"right": 0, "wrong": 1}


def open_labelled(path: str, label: str) -> Collection:
    """The records labelled right or wrong; the data card counts the others."""
    traces = Traces(path)
    labels_file = traces.path / LABELS_FILE
    has_verdicts = labels_file.exists() and label in pq.ParquetFile(labels_file).schema_arrow.names
    if label == "verdict" and not has_verdicts and LABEL not in traces.field_names:
        raise MissingLabel(f"{path}: its answers are not labelled. Next: millstream label {quoted(path)}")
    if label == "verdict" and has_verdicts:
        return labelled(traces, column=label, values=cast("dict[object, float]", VERDICTS), missing="drop")
    return labelled(traces, column=LABEL if label == "verdict" else label, missing="drop")


def split_of(collection: Collection, settings: TrainSettings) -> Split:
    """Train, val and test splits, by question unless set otherwise. Each must have right and wrong answers."""
    shares = {"train": settings.train, "val": settings.val, "test": 1 - settings.train - settings.val}
    parts = split(collection, shares, by=settings.by, salt=settings.salt)
    for name in shares:
        labels = np.asarray(parts[name].column(LABEL).to_numpy(), np.float64)
        if len(np.unique(labels)) < 2 or not np.isin(labels, (0, 1)).all():
            found = dict(Counter[object](labels.tolist()))
            raise BadSplit(
                f"{settings.data}: the {name} split has {len(labels)} records with the labels {found}; "
                "a detector needs 0 (right) and 1 (wrong) in each split: label or extract more, or choose another salt="
            )
    return parts


def data_card(path: str, collection: Collection, parts: Mapping[str, Collection], how: str) -> dict[str, object]:
    """A summary of the data that accounts for every record."""
    traces = Traces(path)
    names = traces.field_names
    verdicts: Counter[str] = Counter()
    labels_file = traces.path / LABELS_FILE
    about: dict[str, object] = {}
    if labels_file.exists():
        table = pq.read_table(labels_file)
        written = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        about = {name: written.get(f"millstream.{name}") for name in ("rule", "label_version")}
        if "verdict" in table.column_names:
            verdicts.update(str(v or "unlabelled") for v in table.column("verdict").to_pylist())
    if "status" in names:
        failed = sum(status == "error" for status in traces.column("status").to_pylist())
        verdicts["unlabelled"] = max(0, verdicts["unlabelled"] - failed)  # a failed record has no verdict
        verdicts["error"] = failed
    config = dict(traces.config)
    return {
        "store": str(Path(path).resolve()),
        "fingerprint": traces.fingerprint,
        "records": len(traces),
        "label_digest": _digest(collection),
        "used": len(collection),
        "verdicts": dict(verdicts),
        "parts": {name: _counts(part) for name, part in parts.items()},
        "split": how,
        "language_model": str(config.get("model", "")),
        "label_rule": about.get("rule"),
        "label_version": about.get("label_version"),
        "trace_bytes": traces.num_bytes // max(1, len(traces)),
        "fields": names,
        "config": config,
    }


def make_study(settings: Mapping[str, object]) -> "Detection":
    return Detection(read_settings(TrainSettings, settings))


class Detection:
    """A comparison of detectors: all of them see the same splits, by question."""

    keys: Sequence[str] = ("fingerprint", "label_digest")  # other records or labels make another run
    libraries: Sequence[str] = ("torch_geometric.nn", "sklearn.decomposition")

    def __init__(self, settings: TrainSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data
        self.collection = open_labelled(settings.data, settings.label)
        self.parts: Split = split_of(self.collection, settings)
        self.specs: Sequence[ModelSpec] = detector_specs(settings, self.collection.field_names)
        self.card = self._card()

    @property
    def train(self) -> Collection:
        return self.parts["train"]

    @property
    def scored(self) -> Mapping[str, Collection]:
        return {name: self.parts[name] for name in ("val", "test")}

    def _card(self) -> Mapping[str, object]:
        rule = self.parts.rule
        parts = {name: self.parts[name] for name in rule.shares}
        return data_card(self.source, self.collection, parts, f"by a hash of {rule.by}, salt {rule.salt!r}")

    def keep(self, run: Path) -> None:
        self.parts.save(run / SPLIT)

    def summary(self) -> str:
        used = f"{self.source}: {len(self.collection)} of {self.card['records']} records are right or wrong"
        return f"{used}\n{self.parts.report(LABEL)}"

    def table(self, built: Built, part: str) -> pa.Table:
        return scores_table(part, self.parts[part], scores_of(built.model, self.parts[part]))


def scores_table(name: str, part: Collection, scores: Scores) -> pa.Table:
    """Rows of predictions.parquet, without the model and its seed."""
    records = part.record_numbers(np.arange(len(part)))
    ids = part.column("question_id").to_pylist() if "question_id" in part.field_names else records.tolist()
    return pa.table(
        {
            "part": pa.array([name] * len(part), pa.string()),
            "record": pa.array(records),
            "question_id": pa.array([None if name is None else str(name) for name in ids], pa.string()),
            "label": pa.array(np.asarray(part.column(LABEL).to_numpy(), np.int8)),
            "score": pa.array(np.asarray(scores, np.float64)),
        }
    )


def _digest(collection: Collection) -> str:
    """Changes when a label changes, or the set of labelled records."""
    numbers = collection.record_numbers(np.arange(len(collection)))
    labels = np.asarray(collection.column(LABEL).to_numpy(), np.float64)
    return blake2b(numbers.tobytes() + labels.tobytes(), digest_size=8).hexdigest()


def _counts(part: Collection) -> dict[str, int]:
    """Records, questions and wrong answers of a split."""
    questions = part.column("question_id") if "question_id" in part.field_names else None
    wrong = int(np.asarray(part.column(LABEL).to_numpy(), np.int64).sum())
    num_questions = len(part) if questions is None else len(set(questions.to_pylist()))
    return {"records": len(part), "questions": num_questions, "wrong": wrong}


def evaluate(run: str | Path, **settings: object) -> Path:
    """Score records with the detectors of a run. Returns the folder of the predictions, laid out like a run.

    All labelled records of another store are its test split; thresholds and calibration stay as chosen on the
    validation split of the run. Without `data`, the test split of the run is scored again.

    >>> folder = ms.evaluate("runs/first", data="other_traces/")
    """
    given = read_settings(EvaluateSettings, settings)
    path = Path(run)
    trained, before = load_detector_run(path)
    collection, card = _records(path, trained, before, given.data)
    name = Path(given.data).resolve().name if given.data else "test"
    out = Path(given.out) if given.out else path / "evaluated" / name
    jobs = _jobs(path, given.model)
    out.mkdir(parents=True, exist_ok=True)
    publish_json(out / DATA, card)
    publish_json(out / ENVIRONMENT, environment())
    publish(out / CONFIG, yaml.safe_dump({**asdict(trained), "evaluates": str(path)}, sort_keys=False).encode())
    (out / METRICS).unlink(missing_ok=True)
    log = Log(out)
    fits = {(line["model"], line["seed"]): line for line in read_lines(path) if line["kind"] == "fit"}
    fabric = make_fabric(replace(trained, devices=1))
    for name, seed in jobs:
        folder = job_folder(path, name, seed)
        resources = FitResources(seed, parse_bytes(given.memory) // 2)
        spec = DetectorSpec(name, collection.field_names)
        built = spec.build(resources=resources, place=Workplace(trained, fabric, str(given.data or trained.data)))
        tensors, _ = load(folder / WEIGHTS)
        built.model.arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        begun = time.perf_counter()
        scores = scores_of(built.model, collection)
        fit = {key: value for key, value in fits.get((name, seed), {}).items() if key not in ("kind", "time_s")}
        log.write("fit", **{**fit, "score_s": time.perf_counter() - begun, "num_scored": len(collection)})
        scored = pq.read_table(folder / SCORES)
        validation = scored.filter(pa.array([part == "val" for part in scored.column("part").to_pylist()]))
        target = job_folder(out, name, seed)
        target.mkdir(parents=True, exist_ok=True)
        publish_table(target / SCORES, pa.concat_tables([validation, scores_table("test", collection, scores)]))
        say(f"{name} seed {seed}: {len(collection)} records scored")
    write_predictions(out)
    return out


def load_detector_run(run: Path) -> tuple[TrainSettings, Mapping[str, Any]]:
    """The settings and the data card of a run of detectors."""
    found, card = load_run(run, remedy="Next: millstream train data=STORE")
    if card_kind(card) != "traces":
        raise BadSource(
            f"{run}: this run contains read classifiers, not detectors. "
            f"Next: millstream classify {quoted(run)} READS -o calls.tsv"
        )
    return read_settings(TrainSettings, found), card


def _records(
    run: Path, trained: TrainSettings, before: Mapping[str, Any], data: str | None
) -> tuple[Collection, dict[str, object]]:
    """The records to score, and their data card; `before` is the data card of the run."""
    if data is None:
        store = trained.data if Path(trained.data).exists() else str(before["store"])
        collection = open_labelled(store, trained.label)
        test = Split.load(run / SPLIT, collection)["test"]
        return test, data_card(store, test, {"test": test}, str(before["split"]))
    collection = open_labelled(data, trained.label)
    card = data_card(data, collection, {"test": collection}, "all records are the test split")
    if card["language_model"] != before["language_model"]:
        raise BadSource(
            f"{data}: contains traces of {card['language_model']!r}, but the detectors of {run} were trained on "
            f"those of {before['language_model']!r}. Extract the questions with that model"
        )
    return collection, card


def _jobs(run: Path, names: str | None) -> list[tuple[str, int]]:
    """Name and seed of the trained models of a run, or of those named."""
    wanted = None if names is None else {name.strip() for name in names.split(",")}
    found = [(name, seed) for name, seed in finished_jobs(run) if wanted is None or name in wanted]
    if not found:
        raise BadSource(f"{run}: contains no trained detector{f' among {names}' if names else ''}")
    return found
