"""`ms.train`: trains every model of a study on the same data, into a run folder. Run again to resume."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
import yaml

from millstream.core.arguments import checked
from millstream.core.collection import Collection
from millstream.core.config import config_diff, parse_bytes
from millstream.core.console import format_seconds, interruptible, say
from millstream.core.engine import Engine
from millstream.core.files import publish, publish_json
from millstream.core.memory import Allowance
from millstream.core.registry import kinds_with, plug
from millstream.core.remote import RemotePath, spool_folder, to_path
from millstream.core.tables import publish_table
from millstream.errors import BadSetting, BadSource, ConfigMismatch, MissingFields
from millstream.training.devices import make_fabric, precision_of
from millstream.training.folder import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    PREDICTIONS,
    SCORES,
    WEIGHTS,
    JobKey,
    Line,
    environment,
    finished_jobs,
    job_folder,
    read_mapping,
    read_scores,
    save,
)
from millstream.training.log import Log, read_lines
from millstream.training.remote_run import RemoteRun, writing_run
from millstream.training.study import Built, Fold, Interrupted, ModelSpec, Study, StudyPlug, Workplace
from millstream.training.task import FitResources

_SELDOM = 20  # times the time of a write until the next


@dataclass(frozen=True)
class Run:
    """A run folder, or its URL; `interrupted` if some models are not finished."""

    path: Path
    models: list[str]
    interrupted: bool = False
    is_first: bool = True  # whether this is the first of the processes that train together

    def _repr_html_(self) -> str:
        """For notebooks: the comparison of its models and what it shows."""
        from millstream.core.notebook import table_html
        from millstream.report import report_of

        try:
            report = report_of(self.path)
        except BadSource as error:  # no model is finished
            return table_html(f"Run in {self.path}", [], [], [str(error)])
        table = report.paper.known()
        rows = [[column.shown(row, full=True) for column in table.columns] for row in table.rows]
        return table_html(
            f"Run in {self.path}", [column.title for column in table.columns], rows, report.results.findings
        )


@checked
def train(
    data: str | Path | Mapping[str, object] | None = None, *, engine: Engine | str = "local", **settings: object
) -> Run:
    """Train and compare models on labelled records, into a run folder.

    The settings are those of `millstream train --help` for the kind of record that `data` holds. All models see the
    same data; each is trained once per seed; all choices are made on the validation split. Finished models are not
    trained again, and an interrupted one resumes from its checkpoint. With `engine="ray"`, models, seeds and folds are
    trained by the workers of a cluster.

    >>> run = ms.train("traces/", model="lstm,mean_logprob", out="runs/second", seeds=1, epochs=3, memory="500MB")
    >>> run = ms.train({"train": "train.fa.gz", "val": "val.fa"}, mapping="species.tsv", model="kmer-linear", bits=12)
    """
    if isinstance(data, Mapping):
        data = {name: str(value) if isinstance(value, Path) else value for name, value in data.items()}
    given = {**settings, **({} if data is None else {"data": str(data) if isinstance(data, Path) else data})}
    return TrainingRun(study_of(given), engine=engine if isinstance(engine, Engine) else Engine(engine)).work()


def study_of(settings: Mapping[str, object]) -> Study:
    """The study of the kind of record that these settings are for."""
    for kind in kinds_with("study"):
        if plug(kind, "kind").is_training_on(settings):
            return cast(StudyPlug, plug(kind, "study")).make_study(settings)
    raise BadSetting(f"data={settings.get('data')}: not data of a known kind. See: millstream train --help")


def write_predictions(run: Path) -> None:
    """predictions.parquet: every score of every finished model, enough to recompute every measure."""
    tables: list[pa.Table] = []
    jobs = finished_jobs(run)
    for job in jobs:
        table = read_scores(run, job)
        table = table.append_column("model", pa.array([job.model] * table.num_rows))
        for name in ("seed", *(("fold", "labels") if any(job.fold or job.labels for job in jobs) else ())):
            table = table.append_column(name, pa.array(np.full(table.num_rows, getattr(job, name), np.int32)))
        tables.append(table)
    try:
        publish_table(run / PREDICTIONS, pa.concat_tables(tables))
    except pa.ArrowException as error:
        why = str(error).partition("\n")[0]
        raise BadSource(f"{run}: the {SCORES} of its models have different columns ({why}); one is damaged") from None


@dataclass(frozen=True)
class Fitted:
    """A trained model, and how long it took."""

    built: Built
    seconds: float


class TrainingRun:
    """The models of a study, trained into its run folder."""

    def __init__(self, study: Study, *, engine: Engine) -> None:
        self.study, self.settings, self.engine = study, study.settings, engine
        if engine.name != "local" and self.settings.devices > 1:
            raise BadSetting(f"devices={self.settings.devices}: with --engine {engine.name}, each model has one device")
        self.out = to_path(self.settings.out or Path("runs") / Path(study.source).resolve().name)
        self.path = spool_folder(self.out)
        self.fabric = make_fabric(self.settings)
        # Not auto, which is another one on another machine: a run ends with the precision that it began with.
        self.settings = replace(self.settings, precision=precision_of(self.settings))
        self.memory = parse_bytes(self.settings.memory)
        self._is_stale = False  # whether predictions.parquet may lack scores
        self._write_after = 0.0

    @property
    def is_first(self) -> bool:
        return bool(self.fabric.global_rank == 0)

    def work(self) -> Run:
        if not self.is_first:
            return self._work()
        with writing_run(self.out):
            return self._work()

    def _work(self) -> Run:
        if self.is_first:
            self._prepare()
        self.fabric.barrier()
        if not self.is_first and isinstance(self.out, RemotePath):
            RemoteRun(self.out).fetch()  # if this is another machine
        log = Log(self.path, tensorboard=self.settings.tensorboard and self.is_first)
        if self.engine.name == "local":
            self.import_libraries()
        self.allowance = Allowance(self.memory)
        done, is_interrupted = list[str](), False
        with ExitStack() as stack:
            if not gc.get_freeze_count():  # what a caller has frozen stays frozen
                gc.freeze()  # else collecting over all imports takes 0.25 s after each model
                stack.callback(gc.unfreeze)
            stop = stack.enter_context(interruptible())
            if self.is_first:
                stack.enter_context(log.memory(self.allowance))
            if self.engine.name != "local":
                return self._train_on_workers(log, stop)
            # nets first: the other processes end after them
            for spec in sorted(self.study.specs, key=lambda spec: not spec.by_gradients):
                if not self.is_first and not spec.by_gradients:
                    break
                try:
                    finished = self._train_seeds(spec, log, stop)
                except Interrupted:
                    is_interrupted = True
                    break
                done += [spec.name] if finished else []
        if self.is_first:
            if self._is_stale and finished_jobs(self.path):
                write_predictions(self.path)
            self.study.finish(self.path)
        return Run(self.out, done, interrupted=is_interrupted, is_first=self.is_first)

    def import_libraries(self) -> None:
        """Import what models need before the memory is counted: libraries do not count."""
        for library in self.study.libraries:
            with suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(library)

    def _train_on_workers(self, log: Log, stop: Callable[[], bool]) -> Run:
        left = [job for spec in self.study.specs for job, _ in self.jobs(spec) if not self._is_finished(job)]
        missing: dict[str, str] = {}
        wanted = takewhile(lambda job: not stop(), (job for job in left if job.model not in missing))
        make = partial(TrainWorker, asdict(self.settings), os.getcwd())
        for done in self.engine.run(make, wanted) if left else ():  # for nothing, no cluster is started
            for line in done.lines:
                log.write(**cast(Any, line))
            if done.missing:
                missing[done.job.model] = done.missing
                say(f"{done.job.model}: left out, {done.missing.partition(', only ')[0]}")
                continue
            folder = job_folder(self.path, done.job)
            folder.mkdir(parents=True, exist_ok=True)
            for name in (WEIGHTS, SCORES):  # scores mark a job as finished
                publish(folder / name, done.files[name])
            say(f"{done.job}: done")
        write_predictions(self.path)
        self.study.finish(self.path)
        unfinished = {job.model for job in left if not self._is_finished(job)}
        models = [spec.name for spec in self.study.specs if spec.name not in unfinished]
        return Run(self.out, models, interrupted=bool(unfinished - missing.keys()))

    def jobs(self, spec: ModelSpec) -> Iterator[tuple[JobKey, Fold]]:
        """What to train of a model: every fold with every seed; models that are not nets once."""
        seeds = range(self.settings.seed, self.settings.seed + (self.settings.seeds if spec.by_gradients else 1))
        for fold, seed in product(self.study.folds, seeds):
            yield JobKey(spec.name, seed, fold.number, fold.labels), fold

    def _is_finished(self, job: JobKey) -> bool:
        return (job_folder(self.path, job) / SCORES).exists()

    def _prepare(self) -> None:
        """Refuse the folder of another run; write the settings and the data card."""
        card = self.study.card
        science = {**self.settings.science(), **{name: card[name] for name in self.study.keys}}
        config = self.path / CONFIG
        if config.exists():
            before = read_mapping(config)
            described = read_mapping(self.path / DATA)
            keys = {name: described.get(name) for name in self.study.keys}
            old = {**{name: before.get(name) for name in self.settings.science()}, **keys}
            if old["precision"] == "auto":  # of a run of an earlier version
                old["precision"] = science["precision"]
            if old != science:
                raise ConfigMismatch(
                    f"{self.path}: holds a run with other settings ({config_diff(old, science)}). Choose another "
                    "folder with out=, or remove this one"
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise BadSource(f"{self.path}: exists but is not a run. Choose another folder with out=")
        self.path.mkdir(parents=True, exist_ok=True)
        publish_json(self.path / DATA, card)
        self.study.keep(self.path)
        publish_json(self.path / ENVIRONMENT, environment())
        publish(config, yaml.safe_dump(asdict(self.settings), sort_keys=False).encode())
        say(self.study.summary())
        if self.settings.batch_size == 1 and any(spec.by_gradients for spec in self.study.specs):
            usual = type(self.settings)().batch_size
            say(f"batch_size=1: every step sees one record, which is slow and noisy; the default is {usual}")

    def _train_seeds(self, spec: ModelSpec, log: Log, stop: Callable[[], bool]) -> bool:
        """Train a model with every seed. Returns whether the data has what it needs."""
        if spec.by_gradients and self.fabric.world_size > 1:
            stop = partial(self._any, stop)
        jobs = list(self.jobs(spec))
        left = [(job, fold) for job, fold in jobs if not self._is_finished(job)]
        self._is_stale = self._is_stale or len(left) < len(jobs)
        fitted: Mapping[JobKey, Fitted] | None = None
        for job, fold in left:
            if stop():
                raise Interrupted
            try:
                if fitted is None:
                    fitted = self.fit_together(spec, left, log, stop)
                self.train_one(spec, job, fold, log, stop, fitted.get(job))
                if self.is_first:
                    self._update_predictions()
            except MissingFields as error:
                if self.is_first:
                    log.write("missing", model=spec.name, why=str(error))
                    say(f"{spec.name}: left out, {str(error).partition(', only ')[0]}")  # without the list of fields
                return False
            finally:
                gc.collect()
        return True

    def _update_predictions(self) -> None:
        """Write predictions.parquet, which has the scores of all models, unless that would take much of the time."""
        started = time.monotonic()
        self._is_stale = started < self._write_after
        if not self._is_stale:
            write_predictions(self.path)
            ended = time.monotonic()
            self._write_after = ended + _SELDOM * (ended - started)

    def _any(self, stop: Callable[[], bool]) -> bool:
        """Whether any process should stop: then all stop at the same step, or the others would wait forever."""
        wanted = torch.tensor(float(stop()), device=self.fabric.device)
        return bool(self.fabric.all_reduce(wanted, reduce_op="sum") > 0)

    def fit_together(
        self, spec: ModelSpec, left: Sequence[tuple[JobKey, Fold]], log: Log, stop: Callable[[], bool]
    ) -> Mapping[JobKey, "Fitted"]:
        """The models of these folds, fitted in the same passes over the data, if these models can.

        Each is the one that it would be without the others: a run that resumes, or is divided, gives the same models.
        """
        whole = left[0][1].whole
        if whole is None or spec.by_gradients:
            return {}
        (first, _), *others = left
        built = {first: self._build(spec, first, log, stop)}
        fit = getattr(built[first].model, "fit_together", None)
        if fit is None:
            return {}
        built |= {job: self._build(spec, job, log, stop) for job, _ in others}
        started = time.perf_counter()
        fit([one.model for one in built.values()], whole, [(fold.train, fold.scored["val"]) for _, fold in left])
        seconds = (time.perf_counter() - started) / len(left)
        return {job: Fitted(one, seconds) for job, one in built.items()}

    def _build(self, spec: ModelSpec, job: JobKey, log: Log, stop: Callable[[], bool]) -> Built:
        share = self.memory * 3 // 8  # the rest is for the model itself and the malloc heap
        resources = FitResources(job.seed, share, threads=self.settings.threads)
        place = Workplace(self.settings, self.fabric, self.study.source, log, self.allowance, stop)
        return spec.build(resources=resources, place=place, folder=job_folder(self.path, job))

    def train_one(
        self,
        spec: ModelSpec,
        job: JobKey,
        fold: Fold,
        log: Log,
        stop: Callable[[], bool],
        fitted: "Fitted | None",
    ) -> None:
        """One model with one seed on one fold: fit it, unless it is, score the splits, save its weights and scores."""
        study, folder = self.study, job_folder(self.path, job)
        if fitted is None:
            built = self._build(spec, job, log, stop)
            started = time.perf_counter()
            built.model.fit(built.train or fold.train, fold.scored["val"])
            fitted = Fitted(built, time.perf_counter() - started)
        built, model = fitted.built, fitted.built.model
        started = time.perf_counter()
        tables = [study.table(built, split, records) for split, records in fold.scored.items()]
        scored = time.perf_counter()
        if not self.is_first:
            return
        _save_arrays(folder / WEIGHTS, getattr(model, "arrays", {}), job.about)
        log.write(
            "fit",
            **job.about,
            family=built.kind,
            title=built.title,
            parameters=getattr(model, "parameters", None),
            fit_s=fitted.seconds,
            score_s=scored - started,
            num_scored=sum(map(len, fold.scored.values())),
            trace_bytes=_mean_bytes(fold.scored["val"], model.fields),
            extra_forwards=built.extra_forwards,
            extra_tokens=getattr(model, "extra_tokens", 0.0),
            probabilities=bool(getattr(model, "probabilities", False)),
            chosen=getattr(model, "chosen", {}),
        )
        publish_table(folder / SCORES, pa.concat_tables(tables))
        say(f"{job}: done in {format_seconds(fitted.seconds + scored - started)}")


@dataclass(frozen=True)
class Finished:
    """One training by a worker: its lines of the log, its files by name, and why there are none."""

    job: JobKey
    lines: Sequence[Line]
    files: Mapping[str, bytes]
    missing: str = ""


class TrainWorker:
    """Trains one model at a time, on any machine that can read the data."""

    def __init__(self, settings: Mapping[str, object], folder: str) -> None:
        with suppress(OSError):  # settings may have relative paths
            os.chdir(folder)
        self._training = TrainingRun(study_of(settings), engine=Engine())
        self._training.import_libraries()

    def do(self, job: JobKey) -> Finished:
        training = self._training
        spec = next(spec for spec in training.study.specs if spec.name == job.model)
        fold = dict(training.jobs(spec))[job]
        with TemporaryDirectory() as folder:
            training.path = Path(folder)
            training.allowance = Allowance(training.memory)
            log, missing = Log(training.path), ""
            try:
                fitted = training.fit_together(spec, [(job, fold)], log, _never)
                training.train_one(spec, job, fold, log, _never, fitted.get(job))
            except MissingFields as error:
                missing = str(error)
                log.write("missing", model=spec.name, why=missing)
            written = job_folder(training.path, job)
            files = {} if missing else {name: (written / name).read_bytes() for name in (WEIGHTS, SCORES)}
            lines = [
                {key: value for key, value in line.items() if key != "time_s"} for line in read_lines(training.path)
            ]
            return Finished(job, lines, files, missing)

    def close(self) -> None:
        """Nothing to close."""


def _never() -> bool:
    return False


def _save_arrays(path: Path, arrays: Mapping[str, Any], about: Mapping[str, object]) -> None:
    save(path, {name: torch.as_tensor(np.asarray(array, order="C")) for name, array in arrays.items()}, about)


def _mean_bytes(collection: Collection, fields: Sequence[str]) -> float:
    some = np.arange(min(64, len(collection)))
    return float(collection.sizes(some, list(fields)).mean()) if len(some) else 0.0
