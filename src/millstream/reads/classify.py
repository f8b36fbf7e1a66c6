"""Reads -> one row each, with a trained classifier of a run. Progress is saved while it runs."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from millstream.core.collection import Collection
from millstream.core.config import config_hash, parse_bytes, read_settings
from millstream.core.console import Progress, ignore_message, quoted, say, silent
from millstream.core.features import Feature
from millstream.core.files import PartialOutput, TextOutput, already_exists, check_new, publish
from millstream.core.fingerprint import file_crc32c
from millstream.core.finished import STDOUT, done_file, find_finished, forget_finished, remember_finished
from millstream.core.loader import Loader
from millstream.core.memory import Heap
from millstream.errors import BadSetting, BadSource
from millstream.reads.classifiers import ClassifierSpec, as_built, classification_task
from millstream.reads.classifiers.nets import ReadPredictions
from millstream.reads.kind import ReadSettings
from millstream.reads.kraken import Assignments, check_tax_ids, kraken_report, ranks_without_tax_ids
from millstream.reads.mapping import Classes, classes_from_card
from millstream.reads.open import NAME, Paths, first_of, name_feature, open_files, shared_names
from millstream.training.folder import CONFIG, WEIGHTS, card_kind, finished_jobs, job_folder, load, load_run, read_lines
from millstream.training.run import ScoringDevice
from millstream.training.study import NetModel, Workplace
from millstream.training.task import FitResources, Net, fitting_batch

Watch = Callable[[int], AbstractContextManager[Progress]]  # progress over this many reads
HEAD = b"read\tclass\ttax_id\ttaxon\trank\tprobability\n"


@dataclass(frozen=True)
class TrainedClassifier:
    """One trained model of one seed. `score` is its macro F1 on validation, if the log has it."""

    run: Path
    name: str
    seed: int
    settings: ReadSettings
    classes: Classes
    score: float | None

    @property
    def weights(self) -> Path:
        return job_folder(self.run, self.name, self.seed) / WEIGHTS

    @property
    def digest(self) -> str:
        """Changes if its predictions or its classes do."""
        taxa = [
            [taxon.name, taxon.tax_id]
            for taxa in (self.classes.taxa, *(r.taxa for r in self.classes.ranks))
            for taxon in taxa
        ]
        return config_hash({"weights": file_crc32c(self.weights), "taxa": taxa, "settings": self.settings.science()})

    def restore(self, collection: Collection, *, memory: int | str) -> tuple[NetModel, Net]:
        """The model for records like these, and its net with the trained weights."""
        tensors, _ = load(self.weights)
        settings = as_built(self.name, self.settings, {name: tensor.shape for name, tensor in tensors.items()})
        place = Workplace(settings, ScoringDevice.default(), str(self.run))
        spec = ClassifierSpec(self.name, settings, self.classes)
        model = spec.build(resources=FitResources(self.seed, parse_bytes(memory) // 2), place=place).model
        assert isinstance(model, NetModel)
        model.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        net = model.restored(collection)
        model.arrays = {}  # the net has them
        net.eval()
        return model, net


def find_classifier(run: Path, name: str | None = None) -> TrainedClassifier:
    """The first finished seed of this model, or of the best one on validation."""
    found, card = load_run(run, remedy="Next: millstream train data.train=FILE mapping=TABLE")
    if card_kind(card) != "reads":
        raise BadSource(
            f"{run}: this run contains detectors, not read classifiers. Next: millstream evaluate {quoted(run)}"
        )
    settings, classes = read_settings(ReadSettings, found), classes_from_card(card)
    seeds: dict[str, int] = {}
    for model, seed in sorted(finished_jobs(run), key=lambda job: job[1]):
        if (job_folder(run, model, seed) / WEIGHTS).exists():
            seeds.setdefault(model, seed)
    if not seeds:
        raise BadSource(
            f"{run}: no classifier is finished yet. Next: millstream train {quoted(run / CONFIG)} out={quoted(run)}"
        )
    if name is not None and name not in seeds:
        raise BadSetting(f"--model {name}: not finished in {run}; must be one of {', '.join(sorted(seeds))}")
    best: dict[str, float] = {}
    key = classification_task(settings, classes).key
    for line in read_lines(run):
        model = str(line.get("model"))
        if line["kind"] == "epoch" and line.get("seed") == seeds.get(model):
            best[model] = max(best.get(model, -1.0), float(cast(float, line[key])))
    chosen = name or max(seeds, key=lambda one: best.get(one, -1.0))
    return TrainedClassifier(run, chosen, seeds[chosen], settings, classes, best.get(chosen))


@dataclass(frozen=True)
class Classified:
    """What was written. A read pair is one row; `num_resumed` rows were written before, and do not count for speed."""

    out: str
    model: str
    num_reads: int
    num_rows: int
    num_classified: int
    num_unclassified: int
    num_resumed: int
    reads_per_s: float
    interrupted: bool = False


def classify(
    run: str | Path,
    reads: Paths,
    out: str | Path,
    *,
    model: str | None = None,
    mates: Paths | None = None,
    paired: bool = False,
    threshold: float = 0.5,
    report: str | Path | None = None,
    kraken_output: str | Path | None = None,
    memory: int | str = "1GB",
    index_dir: str | Path | None = None,
    force: bool = False,
    watch: Watch = lambda total: nullcontext(silent),
    stop: Callable[[], bool] = lambda: False,
    batch_size: int | None = None,
    save_s: float = 5.0,
) -> Classified:
    """Classify reads with a run's classifier: a TSV of read, class, tax_id, taxon, rank and probability.

    Read pairs, either neighbours (`paired`) or with the second mates in other files (`mates`), get one row each.
    A read whose class is less likely than `threshold` is assigned to the lowest taxon above that reaches it, or to
    none; with `threshold=0` only reads without evidence for any class are unclassified. The same call resumes where it
    was interrupted, and ends with the same bytes; progress is saved every `save_s` seconds. `batch_size` is as large as
    the net and the memory allow if not given. `report` is a Kraken 2-style report to write (`kraken_output` is its old
    name). `out="-"` writes to stdout. A finished output is not written again, unless `force` replaces it.

    >>> done = ms.classify("runs/reads", "sample.fq.gz", "sample.tsv", report="sample.kreport", threshold=0.9)
    """
    path, report = Path(out), Path(given) if (given := report or kraken_output) else None
    if not 0 <= threshold <= 1:
        raise BadSetting(f"threshold={threshold}: must be a probability, from 0 to 1")
    if paired and mates is not None:
        raise BadSetting("paired and mates: mates are either neighbours or in other files, not both")
    if report is not None and report.absolute() == path.absolute():
        raise BadSetting(f"report={report}: is also the output file. Choose another name for the report")
    is_stdout = str(out) == STDOUT
    if not (is_stdout or force or done_file(path).exists()):
        check_new(path)
    trained = find_classifier(Path(run), model)
    if report is not None:
        check_tax_ids(trained.classes, str(run))
    collection, parts = open_files(reads, mates, memory=parse_bytes(memory) // 4, index_dir=index_dir)
    num_mates = 2 if paired or mates is not None else 1
    if len(collection) % num_mates:
        raise BadSource(
            f"{first_of(reads)}: {len(collection)} reads are an odd number, not read pairs. Leave out --paired"
        )
    terms = {
        "model": f"{trained.name}-{trained.seed}",
        "run": trained.digest,
        "reads": collection.fingerprint,
        "mates": num_mates,
        "threshold": float(threshold),
    }
    if force and not is_stdout:
        _remove(path, report)
    known = find_finished(path, terms) if done_file(path).exists() and not is_stdout else None
    if known is not None:
        done = _Work(trained, collection, _Stdout(path, terms, known), num_mates, threshold, where=first_of(reads))
        if report is not None:
            done.write_report(report)
        return done.summary()
    with _Stdout(path, terms) if is_stdout else TextOutput(path, terms) as file:
        if report is not None and not file.is_finished:
            check_new(report)
        work = _Work(trained, collection, file, num_mates, threshold, where=first_of(reads))
        if not file.is_finished:
            why = "the best on validation" if model is None else "as given"
            score = "" if trained.score is None else f", macro F1 {trained.score:.3f}"
            say(f"{run}: {trained.name} seed {trained.seed}, {why}{score}")
            if (report is not None or threshold) and (ranks := ranks_without_tax_ids(trained.classes)):
                say(
                    f"{run}: no tax ids are known for some taxa of {', '.join(ranks)}; they get 0. Train with "
                    f"taxonomy=FOLDER, or a column {ranks[0]}_tax_id in the mapping"
                )
            budget, names = parse_bytes(memory), name_feature(parts)
            if not work.run(names, watch, stop, memory=budget, batch_size=batch_size, save_s=save_s):
                return work.summary(interrupted=True)
        if report is not None:
            work.write_report(report, replace=file.is_finished)
        file.publish()
    if not is_stdout:
        remember_finished(path, terms, work.state())
    return work.summary()


def _remove(out: Path, report: Path | None) -> None:
    """Remove the output, its progress and its report, unless another process is writing it."""
    with PartialOutput(out, {}, rebuild=True):
        forget_finished(out)
        if report is not None:
            report.unlink(missing_ok=True)


class _Stdout:
    """Stdout with the methods of `TextOutput`, or, with `saved`, an output to which nothing is left to write."""

    def __init__(self, out: Path, terms: Mapping[str, object], saved: Mapping[str, Any] | None = None) -> None:
        self.out, self.terms, self.saved, self.is_finished = out, terms, saved, saved is not None

    def __enter__(self) -> "_Stdout":
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()

    def write(self, text: bytes) -> None:
        sys.stdout.buffer.write(text)

    def save(self, saved: Mapping[str, object]) -> None:
        """Nothing to save."""

    def finish(self, saved: Mapping[str, object]) -> None:
        self.is_finished = True

    def publish(self) -> None:
        """It is published as it is written."""


class _Work:
    """Writes the rows of all reads, batch by batch, and counts them per taxon."""

    def __init__(
        self,
        trained: TrainedClassifier,
        collection: Collection,
        file: "TextOutput | _Stdout",
        mates: int,
        threshold: float,
        where: str,
    ) -> None:
        self.trained, self.collection, self.file, self.where = trained, collection, file, where
        self.mates, self.threshold = mates, threshold
        self.assignments = assignments = Assignments(trained.classes)
        saved = file.saved or {"counts": [0] * len(assignments), "loader": None}
        self.counts: NDArray[np.int64] = np.array(saved["counts"], np.int64)
        self._loaded: Mapping[str, object] | None = saved["loader"]
        self._before = int(self.counts.sum())
        self._started = time.perf_counter()
        rows = zip(assignments.class_ids, assignments.taxa, assignments.ranks, strict=True)
        self._middles = [  # of a row, from class to rank
            f"\t{own}\t{taxon.tax_id}\t{' '.join(taxon.name.split())}\t{rank}\t" for own, taxon, rank in rows
        ]

    def run(
        self,
        names: Feature,
        watch: Watch,
        stop: Callable[[], bool],
        *,
        memory: int,
        batch_size: int | None,
        save_s: float,
    ) -> bool:
        """Whether it finished."""
        predict = ReadPredictions(self.trained.classes.taxa_by_rank, self.mates)
        model, net = self.trained.restore(self.collection, memory=memory)
        features, heap = [*model.scoring, names], Heap(memory // 2)
        most = max((batch_size or model.at_once) // self.mates, 1) * self.mates
        size = fitting_batch(self.collection, features, memory=memory // 2, at_most=most)
        loader = Loader(
            self.collection,
            batch_size=-(-size // self.mates) * self.mates,
            features=features,
            order="none",
            memory=memory // 2,
            rank=0,
            world=1,
            notify=ignore_message,
        )
        if self._loaded is None:
            self.file.write(HEAD)
        else:
            loader.load_state_dict(self._loaded)
        self._started = saved = time.perf_counter()
        with torch.inference_mode(), watch(len(self.collection)) as progress:
            progress(self.num_rows * self.mates)
            for batch in loader:
                self._add(batch.pop(NAME), predict(net, model.fabric.to_device(batch)))
                self._loaded = loader.state_dict()
                del batch
                heap.trim_malloc()
                progress(self.num_rows * self.mates)
                is_stopped = stop()
                if is_stopped or time.perf_counter() - saved > save_s:
                    self.file.save(self.state())
                    saved = time.perf_counter()
                if is_stopped and self.num_rows * self.mates < len(self.collection):
                    return False
        self.file.finish(self.state())
        return True

    def write_report(self, report: Path, *, replace: bool = False) -> None:
        """The Kraken-style report; one that exists must be the same, unless it is to be replaced."""
        text = kraken_report(self.assignments, self.counts.tolist()).encode()
        if not replace and report.exists() and report.read_bytes() != text:
            raise already_exists(report)
        publish(report, text)

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def summary(self, *, interrupted: bool = False) -> Classified:
        num_unclassified = int(self.counts[self.assignments.unclassified])
        num_new = (self.num_rows - self._before) * self.mates
        return Classified(
            out=str(self.file.out),
            model=str(self.file.terms["model"]),
            num_reads=self.num_rows * self.mates,
            num_rows=self.num_rows,
            num_classified=self.num_rows - num_unclassified,
            num_unclassified=num_unclassified,
            num_resumed=self._before,
            reads_per_s=round(num_new / max(time.perf_counter() - self._started, 1e-9), 1),
            interrupted=interrupted,
        )

    def _add(self, names: Any, predictions: Mapping[str, torch.Tensor]) -> None:
        """The rows of one batch."""
        if self.mates == 2:
            names = shared_names(names, first=self.num_rows, where=self.where)
        numbers, probabilities = self.assignments.choose(predictions, self.threshold)
        middles = self._middles
        rows = zip(names, numbers.tolist(), probabilities.tolist(), strict=True)
        self.file.write("".join([f"{name}{middles[number]}{likely:.4f}\n" for name, number, likely in rows]).encode())
        self.counts += np.bincount(numbers, minlength=len(self.assignments))

    def state(self) -> dict[str, object]:
        return {"counts": self.counts.tolist(), "loader": self._loaded}
