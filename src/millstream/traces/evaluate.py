"""`ms.evaluate`: score the test split of a run again, or another store, with the detectors of the run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from millstream.core.collection import Collection
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import quoted, say
from millstream.core.files import publish, publish_json, publish_table
from millstream.core.split import Split
from millstream.errors import BadSource
from millstream.traces.detectors.zoo import DetectorSpec, scores_of
from millstream.traces.settings import EvaluateSettings, TrainSettings
from millstream.traces.study import data_card, open_labelled, scores_table
from millstream.training.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    METRICS,
    SCORES,
    SPLIT,
    WEIGHTS,
    card_kind,
    environment,
    finished_jobs,
    job_folder,
    load,
    load_run,
)
from millstream.training.log import Log, read_lines
from millstream.training.run import make_fabric, write_predictions
from millstream.training.task import FitResources
from millstream.training.trained import Workplace


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
