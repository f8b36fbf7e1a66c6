"""`ms.evaluate`: the detectors of a run on their own test part again, or on another store."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from millstream.collection import Collection
from millstream.config import parse_bytes, read_settings
from millstream.console import quoted, say
from millstream.dataset.split import Split
from millstream.errors import BadSource
from millstream.model.detector import Means
from millstream.store.layout import publish
from millstream.train.checkpoint import load
from millstream.train.data import data_card, open_labelled
from millstream.train.detection import scores_table
from millstream.train.detectors import AskedDetector
from millstream.train.devices import make_fabric
from millstream.train.environment import environment
from millstream.train.folder import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    DETECTOR,
    ENVIRONMENT,
    METRICS,
    READS,
    SCORES,
    SPLIT,
    kind_of,
    write_json,
    write_table,
)
from millstream.train.log import Log, read_lines
from millstream.train.run import write_predictions
from millstream.train.settings import TrainSettings
from millstream.train.trained import Workplace


@dataclass(frozen=True)
class EvaluateSettings:
    """What `millstream evaluate` takes as `key=value`."""

    data: str | None = None  # another labelled store; the test part of the run if not given
    model: str | None = None  # those of the run if not given
    memory: int | str = "2GB"  # for the loader and for what a model works on
    out: str | None = None  # the folder to write; evaluated/ and the name of the data, in the run, if not given


def evaluate(run: str | Path, **settings: object) -> Path:
    """Score with the detectors of a run, and give the folder with the predictions, which reads like a run.

    All labelled records of another store are its test part; thresholds and calibration stay those that were chosen on
    the validation part of the run. Without `data`, the run's own test part is scored again.

    >>> folder = ms.evaluate("runs/first", data="other_traces/")
    """
    given = read_settings(EvaluateSettings, settings)
    path = Path(run)
    trained = read_run_settings(path)
    collection, card = _records(path, trained, given.data)
    name = Path(given.data).resolve().name if given.data else "test"
    out = Path(given.out) if given.out else path / "evaluated" / name
    jobs = _finished(path, given.model)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / DATA, card)
    write_json(out / ENVIRONMENT, environment())
    publish(out / CONFIG, yaml.safe_dump({**asdict(trained), "evaluates": str(path)}, sort_keys=False).encode())
    (out / METRICS).unlink(missing_ok=True)
    log = Log(out)
    fits = {(line["model"], line["seed"]): line for line in read_lines(path) if line["kind"] == "fit"}
    fabric = make_fabric(replace(trained, devices=1))
    for name, seed in jobs:
        folder = path / CHECKPOINTS / f"{name}-{seed}"
        means = Means(seed, parse_bytes(given.memory) // 2)
        asked = AskedDetector(name, collection.field_names)
        built = asked.build(means=means, place=Workplace(trained, fabric, str(given.data or trained.data)))
        tensors, _ = load(folder / DETECTOR)
        built.model.arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        begun = time.perf_counter()
        scores = built.model.score(collection)
        fit = {key: value for key, value in fits.get((name, seed), {}).items() if key not in ("kind", "time_s")}
        log.write("fit", **{**fit, "score_s": time.perf_counter() - begun, "num_scored": len(collection)})
        before = pq.read_table(folder / SCORES)
        validation = before.filter(pa.array([part == "val" for part in before.column("part").to_pylist()]))
        target = out / CHECKPOINTS / f"{name}-{seed}"
        target.mkdir(parents=True, exist_ok=True)
        write_table(target / SCORES, pa.concat_tables([validation, scores_table("test", collection, scores)]))
        say(f"{name} seed {seed}: {len(collection)} records scored")
    write_predictions(out)
    return out


def read_run_settings(run: Path) -> TrainSettings:
    """The settings a run of detectors was made with."""
    if kind_of(run) == READS:
        raise BadSource(f"{run}: its models name reads. Next: millstream classify {quoted(run)} READS -o calls.tsv")
    try:
        found = cast("dict[str, Any]", yaml.safe_load((run / CONFIG).read_text()))
        return read_settings(TrainSettings, found)
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise BadSource(
            f"{run}: is no run of millstream train ({_why(error)}). Next: millstream train data=STORE"
        ) from None


def _records(run: Path, trained: TrainSettings, data: str | None) -> tuple[Collection, dict[str, object]]:
    """What is scored, and its card."""
    before = cast("Mapping[str, Any]", json.loads((run / DATA).read_text()))
    if data is None:
        store = trained.data if Path(trained.data).exists() else str(before["store"])
        collection = open_labelled(store, trained.label)
        test = Split.load(run / SPLIT, collection)["test"]
        return test, data_card(store, test, {"test": test}, str(before["split"]))
    collection = open_labelled(data, trained.label)
    card = data_card(data, collection, {"test": collection}, "all of it is the test part")
    if card["language_model"] != before["language_model"]:
        raise BadSource(
            f"{data}: holds traces of {card['language_model']!r}, and the detectors of {run} read the inside of "
            f"{before['language_model']!r}; extract the questions with that model"
        )
    return collection, card


def _finished(run: Path, names: str | None) -> list[tuple[str, int]]:
    """The models that are trained, of those named."""
    wanted = None if names is None else {name.strip() for name in names.split(",")}
    found: list[tuple[str, int]] = []
    for file in sorted((run / CHECKPOINTS).glob(f"*/{SCORES}")):
        name, _, seed = file.parent.name.rpartition("-")
        if wanted is None or name in wanted:
            found.append((name, int(seed)))
    if not found:
        raise BadSource(f"{run}: no trained detector{f' among {names}' if names else ''} is in it")
    return found


def _why(error: Exception) -> str:
    return f"it has no {CONFIG}" if isinstance(error, FileNotFoundError | NotADirectoryError) else str(error)
