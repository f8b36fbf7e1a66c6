"""A trained classifier of a run and reads -> the rows of any range of them, in this process or another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Collection, Numbers, Subset
from millstream.core.config import config_hash, parse_bytes, read_settings
from millstream.core.console import ignore_message, quoted
from millstream.core.features import Feature, fitting_batch
from millstream.core.fingerprint import file_crc32c
from millstream.core.loader import Loader
from millstream.core.memory import Heap
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource
from millstream.reads.calibration import Thresholds, read_calibration, thresholds_at
from millstream.reads.evidence import MOST, Evidence
from millstream.reads.files.names import NameText
from millstream.reads.kind import KMER_EXACT, MACRO_F1, ReadSettings
from millstream.reads.kmers.matcher import KmerMatcher, Predictions
from millstream.reads.kraken import Assignments
from millstream.reads.mapping import Classes, classes_from_card
from millstream.reads.open import (
    NAME,
    NAME_OFFSETS,
    HeaderNames,
    Paths,
    first_of,
    open_files,
    read_files,
    read_lengths,
)
from millstream.reads.pairs import shared_names
from millstream.reads.qualities import check_qualities
from millstream.reads.reads import Part
from millstream.reads.rows import RowFormat, Rows, joined_rows
from millstream.training.folder import (
    CONFIG,
    WEIGHTS,
    JobKey,
    card_kind,
    finished_jobs,
    job_folder,
    load,
    load_arrays,
    load_run,
)
from millstream.training.log import key_of, read_lines
from millstream.training.remote_run import local_run

if TYPE_CHECKING:
    from millstream.training.study import NetModel
    from millstream.training.task import Net


class Predictor(Protocol):
    """A classifier at work: batches of `features`, of about `at_once` reads, to predictions."""

    features: Sequence[Feature]
    at_once: int
    needs_tensors: bool

    def __call__(self, batch: Mapping[str, object], /) -> Predictions: ...


class NetPredictor:
    """A net, and torch."""

    needs_tensors = True

    def __init__(self, model: "NetModel", net: "Net", classes: Classes, group: int) -> None:
        from millstream.reads.classifiers.nets import ReadPredictions

        self.features, self.at_once = model.scoring, model.at_once * net.passes
        self._model, self._net = model, net
        self._predict = ReadPredictions(classes.taxa_by_rank, group, MOST)

    def __call__(self, batch: Mapping[str, object], /) -> Predictions:
        import torch

        from millstream.reads.classifiers.nets import PLAUSIBLE

        with torch.inference_mode():
            found = self._predict(self._net, self._model.fabric.to_device(batch))
        arrays = {name: value.cpu().numpy() for name, value in found.items()}
        return Predictions(arrays, *(arrays.pop(name) for name in PLAUSIBLE))


@dataclass(frozen=True)
class TrainedClassifier:
    """One trained model of one seed. `score` is its macro F1 on validation, if the log has it."""

    run: Path
    name: str
    seed: int
    settings: ReadSettings
    classes: Classes
    score: float | None

    def absolute(self) -> "TrainedClassifier":
        """The same for a process in another folder."""
        return replace(self, run=self.run.absolute())

    @property
    def weights(self) -> Path:
        return job_folder(local_run(self.run), JobKey(self.name, self.seed)) / WEIGHTS

    @cached_property
    def digest(self) -> str:
        """Changes if its predictions or its classes do."""
        taxa = [
            [taxon.name, taxon.tax_id]
            for taxa in (self.classes.taxa, *(r.taxa for r in self.classes.ranks))
            for taxon in taxa
        ]
        return config_hash({"weights": file_crc32c(self.weights), "taxa": taxa, "settings": self.settings.science()})

    def thresholds(self, precision: float) -> Thresholds:
        """Of each level for an expected precision, from the calibration of the run."""
        found = read_calibration(local_run(self.run), JobKey(self.name, self.seed))
        return thresholds_at(precision, found, where=str(self.run), name=self.name)

    def restore(self, collection: Collection, *, memory: int | str) -> "tuple[NetModel, Net]":
        """The model for records like these, and its net. Its weights are loaded once, for any number of samples."""
        if self.is_loaded:
            (model,) = self._loaded
            model.fit_passes(collection)
        else:
            self._loaded.append(model := self._load(memory))
        net = model.restored(collection)
        model.arrays = {}  # the net has them
        net.eval()
        return model, net

    @property
    def is_loaded(self) -> bool:
        return bool(self._loaded)

    @cached_property
    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        arrays = load_arrays(self.weights)
        if not KmerMatcher.fits(arrays):
            raise BadSource(
                f"{self.weights}: the weights do not match the {self.name} of this version of millstream. Train again "
                "with another out="
            )
        return arrays

    @cached_property
    def _loaded(self) -> "list[NetModel]":
        return []

    def _load(self, memory: int | str) -> "NetModel":
        from millstream.reads.classifiers import ClassifierSpec, as_built
        from millstream.training.devices import ScoringDevice
        from millstream.training.study import NetModel, Workplace
        from millstream.training.task import FitResources

        tensors, _ = load(self.weights)
        settings = as_built(self.name, self.settings, {name: tensor.shape for name, tensor in tensors.items()})
        place = Workplace(settings, ScoringDevice.default(), str(self.run))
        spec = ClassifierSpec(self.name, settings, self.classes)
        model = spec.build(resources=FitResources(self.seed, parse_bytes(memory) // 2), place=place).model
        assert isinstance(model, NetModel)
        model.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        return model

    def predictor(self, collection: Collection, *, group: int, memory: int) -> Predictor:
        """Predicts rows of `group` reads each."""
        if self.name == KMER_EXACT:  # without torch, which takes seconds and 200 MB to import
            ranks, least = self.classes.taxa_by_rank, self.settings.min_quality
            return KmerMatcher(self._arrays, len(self.classes), ranks, group, least)
        return NetPredictor(*self.restore(collection, memory=memory), self.classes, group)


def find_classifier(run: Path, name: str | None = None) -> TrainedClassifier:
    """The first finished seed of this model, or of the best one on validation."""
    folder = local_run(run)
    found, card = load_run(folder, remedy="Next: millstream train data.train=FILE mapping=TABLE")
    if card_kind(card) != "reads":
        raise BadSource(
            f"{run}: this run contains detectors, not read classifiers. Next: millstream evaluate {quoted(run)}"
        )
    settings, classes = read_settings(ReadSettings, found), classes_from_card(card)
    seeds: dict[str, int] = {}
    for job in sorted(finished_jobs(folder), key=lambda job: job.seed):
        if (job_folder(folder, job) / WEIGHTS).exists():
            seeds.setdefault(job.model, job.seed)
    if not seeds:
        raise BadSource(
            f"{run}: no classifier is finished yet. Next: millstream train {quoted(run / CONFIG)} out={quoted(run)}"
        )
    if name is not None and name not in seeds:
        raise BadSetting(f"--model {name}: not finished in {run}; must be one of {', '.join(sorted(seeds))}")
    best: dict[str, float] = {}
    key = key_of(MACRO_F1)
    for line in read_lines(folder):
        model = str(line.get("model"))
        if line["kind"] == "epoch" and line.get("seed") == seeds.get(model):
            best[model] = max(best.get(model, -1.0), float(cast(float, line[key])))
    chosen = name or max(seeds, key=lambda one: best.get(one, -1.0))
    return TrainedClassifier(run, chosen, seeds[chosen], settings, classes, best.get(chosen))


@dataclass(frozen=True)
class ReadSource:
    """Files of reads, and of their second mates; opens them in any process."""

    reads: Paths
    mates: Paths | None
    memory: int | str
    index_dir: str | Path | None

    @property
    def files(self) -> list[Path]:
        return read_files(self.reads) + ([] if self.mates is None else read_files(self.mates))

    def absolute(self) -> "ReadSource":
        """The same for a process in another folder."""
        reads, mates = ([file.absolute() for file in read_files(given or [])] for given in (self.reads, self.mates))
        folder = None if self.index_dir is None else to_path(self.index_dir).absolute()
        return ReadSource(reads, mates if self.mates is not None else None, self.memory, folder)

    def open(self) -> tuple[Collection, Sequence[Part]]:
        return open_files(self.reads, self.mates, memory=parse_bytes(self.memory) // 4, index_dir=self.index_dir)


@dataclass(frozen=True)
class ScoreSettings:
    """`group` neighbouring reads get one row: 1, or 2 that are mates. `where` names the reads in messages.

    `kind` is how rows are written.
    """

    group: int
    threshold: float | Sequence[float]
    memory: int
    batch_size: int | None
    where: str
    kind: str = ""


class Scorer:
    """Scores reads batch by batch.

    A row depends on the batch it is scored in only by rounding, and not at all if ranges start at multiples of `size`.
    """

    def __init__(
        self,
        trained: TrainedClassifier,
        collection: Collection,
        parts: Sequence[Part],
        settings: ScoreSettings,
    ) -> None:
        self._collection, self._parts, self._settings = collection, parts, settings
        group, memory = settings.group, settings.memory
        check_qualities(parts, replace(trained.settings, model=trained.name).needs_qualities)
        self._assignments = Assignments(trained.classes)
        self._predict = trained.predictor(collection, group=group, memory=memory)
        self._features = [*self._predict.features, HeaderNames(parts)]
        most = max((settings.batch_size or self._predict.at_once) // group, 1) * group
        size = fitting_batch(collection, self._features, memory=memory // 2, at_most=most)
        self.size = -(-size // group) * group  # reads per batch
        self._format = RowFormat(settings.kind, self._assignments)

    def rows(self, first: int, last: int) -> Iterator[Rows]:
        """The rows of a range of reads, batch by batch."""
        heap = Heap(self._settings.memory // 2)
        is_whole = (first, last) == (0, len(self._collection))
        loader = Loader(
            self._collection if is_whole else Subset(self._collection, Range(first, last)),
            batch_size=self.size,
            features=self._features,
            order="none",
            memory=self._settings.memory // 2,
            rank=0,
            world=1,
            tensors=self._predict.needs_tensors,
            notify=ignore_message,
        )
        with closing(iter(loader)) as batches:
            for batch in batches:
                names = NameText(*(np.asarray(batch.pop(name)) for name in (NAME, NAME_OFFSETS)))
                found = self._rows(first, names, batch)
                del batch
                heap.trim_malloc()
                yield found
                first = found.last

    def _rows(self, first: int, names: NameText, batch: Mapping[str, object]) -> Rows:
        last = first + len(names.offsets) - 1
        if self._settings.group == 2:
            names = NameText.of(shared_names(names.names(), first=first // 2, where=self._settings.where))
        predictions, classes, likely = self._predict(batch)
        numbers, probabilities = self._assignments.choose(predictions, self._settings.threshold)
        lengths = self._lengths(first, last) if self._format.needs_lengths else []
        text = self._format.text(names, numbers, probabilities, lengths)
        is_classified = numbers != self._assignments.unclassified
        counts = np.bincount(numbers, minlength=len(self._assignments))
        evidence = Evidence.of(classes[is_classified], likely[is_classified], len(self._assignments.classes))
        return Rows(first, last, text, counts, is_classified, evidence)

    def _lengths(self, first: int, last: int) -> list[str]:
        """The length of each read; of a pair `100|98`."""
        numbers = self._collection.record_numbers(np.arange(first, last))
        lengths = list(map(str, read_lengths(self._parts, numbers).tolist()))
        group = self._settings.group
        return ["|".join(lengths[at : at + group]) for at in range(0, len(lengths), group)]


class ClassifyWorker:
    """A scorer that opens reads and run where it is. A job is a range of reads."""

    def __init__(
        self, trained: TrainedClassifier, source: ReadSource, fingerprint: str, settings: ScoreSettings
    ) -> None:
        collection, parts = source.open()
        if collection.fingerprint != fingerprint:
            raise BadSource(f"{first_of(source.reads)}: other reads at this path on a worker. All need the same files")
        self._scorer = Scorer(trained, collection, parts, settings)

    def do(self, span: tuple[int, int]) -> Rows:
        return joined_rows(list(self._scorer.rows(*span)))

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Range:
    """The numbers from `first` to before `last`."""

    first: int
    last: int
    keeps_neighbours = True

    def __len__(self) -> int:
        return self.last - self.first

    def take(self, positions: Numbers) -> Numbers:
        return positions + self.first

    def digest(self) -> str:
        return f"range {self.first} {self.last}"
