"""Classifiers of reads, compared on the same files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from millstream.collection import Collection
from millstream.config import config_hash, parse_bytes
from millstream.errors import BadSetting
from millstream.model.detector import Means
from millstream.model.net import Net
from millstream.model.read_zoo import CLASSIFIERS, ReadKit, ReadRecipe, read_kit
from millstream.source.classes import Classes
from millstream.train.checkpoint import load_shapes
from millstream.train.folder import READS
from millstream.train.loop import LATEST, weights_of
from millstream.train.read_data import TRAIN, UNKNOWN, VAL, chosen_by, evenly_drawn, open_parts
from millstream.train.read_settings import ReadSettings
from millstream.train.study import Asked, Built
from millstream.train.task import Labels, Outcome, Task, labels_of
from millstream.train.trained import Kit, NetModel, Workplace

SHOWN = 5
COUNTING = "kmer-linear"


@dataclass(frozen=True)
class AskedClassifier:
    """A classifier that was named."""

    name: str
    settings: ReadSettings
    classes: Classes
    bases: int | None = None  # in all training reads
    reads: Collection | None = None  # to learn from, if not from those that the others learn from
    by_gradients = True

    def kit(self) -> ReadKit:
        try:
            return read_kit(self.name, recipe_of(self.settings, len(self.classes), self.bases))
        except BadSetting:
            raise
        except ValueError as error:  # of tokenizers and features
            raise BadSetting(f"model={self.name}: {error}") from None

    def build(self, *, means: Means, place: Workplace, folder: Path | None = None) -> Built:
        task = task_of(self.settings, len(self.classes))
        task = replace(task, is_balanced=task.is_balanced or self.reads is not None)
        kit = self._begun(folder).kit()
        ranks = {rank.name: rank.of_class for rank in self.classes.ranks}

        def build(example: Mapping[str, Tensor]) -> Net:
            net = kit.build(example)
            net.ask_for(ranks, task.mates)
            return net

        model = NetModel(
            self.name, Kit(kit.features, build, kit.scoring), task=task, means=means, place=place, folder=folder
        )
        return Built(model, CLASSIFIERS[self.name], "trained", train=self.reads)

    def _begun(self, folder: Path | None) -> "AskedClassifier":
        """With the sizes of the checkpoint it goes on from: the memory may be another one now."""
        if folder is None or not (folder / LATEST).exists():
            return self
        return replace(self, settings=as_built(self.name, self.settings, weights_of(load_shapes(folder / LATEST))))


class Classification:
    """All classifiers learn from the same reads and are judged by the same ones."""

    keys: Sequence[str] = ("fingerprint",)  # with other reads or another mapping it is another run

    def __init__(self, settings: ReadSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data.train
        names = [name.strip() for name in settings.model.split(",") if name.strip()]
        for name in names:
            if name not in CLASSIFIERS:
                raise BadSetting(f"model={name}: no such classifier of reads; there is {', '.join(CLASSIFIERS)}")
        if not names:
            raise BadSetting(f"model={settings.model}: name at least one of {', '.join(CLASSIFIERS)}")
        memory = parse_bytes(settings.memory)
        self.parts = open_parts(settings, memory // 4)
        bases = self.parts.files[TRAIN].num_bases
        asked = [AskedClassifier(name, settings, self.parts.classes, bases) for name in dict.fromkeys(names)]
        if settings.balance == "sampling":  # what counts has to see every read once
            once = {COUNTING: self.parts.train}
            asked = [replace(one, reads=once.get(one.name)) for one in asked]
        for one in asked:
            one.kit()  # what is wrong with its settings is said before anything is made
        self.asked: Sequence[Asked] = asked
        mates = 2 if settings.paired else 1
        self.scored: Mapping[str, Collection] = {
            **self.parts.scored,
            VAL: chosen_by(self.parts.scored[VAL], settings.val_reads, mates),
        }
        self.train, self.card = self._train(), self._card()

    def _train(self) -> Collection:
        if self.settings.balance != "sampling":
            return self.parts.train
        memory = parse_bytes(self.settings.memory)
        return evenly_drawn(self.parts.train, len(self.parts.classes), seed=self.settings.seed, memory=memory // 4)

    def _card(self) -> Mapping[str, object]:
        classes, parts = self.parts.classes, self.parts
        rows = [
            {
                "class_id": class_id,
                "name": taxon.name,
                "tax_id": taxon.tax_id,
                **{rank.name: int(rank.of_class[label]) for rank in classes.ranks},
                "reads": {name: int(counts[label]) for name, counts in parts.counts.items()},
            }
            for label, (class_id, taxon) in enumerate(zip(classes.mapping.ids.tolist(), classes.taxa, strict=True))
        ]
        return {
            "kind": READS,
            "fingerprint": config_hash(
                {"header_regex": self.settings.data.header_regex, "paired": self.settings.paired}
                | {"class_ids": classes.mapping.ids.tolist()}
                | {name: reads.fingerprint for name, reads in parts.files.items()}
            ),
            "mapping": str(Path(self.settings.mapping).resolve()),
            "files": {name: [str(path) for path in reads.paths] for name, reads in parts.files.items()},
            "formats": {name: reads.formats for name, reads in parts.files.items()},
            "bases": {name: reads.num_bases for name, reads in parts.files.items()},
            "bytes": {name: reads.num_bytes for name, reads in parts.files.items()},
            "reads": {name: int(counts.sum()) for name, counts in parts.counts.items()},
            "no_class": {name: int(counts[UNKNOWN]) for name, counts in parts.counts.items()},
            "mates": 2 if self.settings.paired else 1,
            "chosen_by": len(self.scored[VAL]),
            "held_out": "reads" if VAL not in parts.files else "files",
            "classes": rows,
            "ranks": {
                rank.name: [{"name": taxon.name, "tax_id": taxon.tax_id} for taxon in rank.taxa]
                for rank in classes.ranks
            },
        }

    def keep(self, run: Path) -> None:
        """All there is to keep is on the card."""

    def told(self) -> str:
        parts, num_classes = self.parts, len(self.parts.classes)
        lines = [f"{self.source}: {len(parts.train):,} reads of {num_classes} classes to learn from"]
        counts = parts.counts[TRAIN][:-1]
        empty = [parts.classes.taxa[label].name for label in map(int, np.flatnonzero(counts == 0))]
        if empty:
            more = f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else ""
            lines.append(f"no training reads of {len(empty)} classes: {', '.join(empty[:SHOWN])}{more}")
        if counts.any() and counts.max() > 2 * counts[counts > 0].min():
            how = {
                "weights": "each class counts the same, by weights",
                "sampling": "each class is drawn as often as the others",
                "none": "each read counts the same",
            }[self.settings.balance]
            lines.append(f"classes have {counts[counts > 0].min():,} to {counts.max():,} reads: {how}")
        for name in self.scored:
            none = int(parts.counts[name][UNKNOWN])
            beside = f", {none} of them of no class that is known" if none else ""
            lines.append(f"{name}: {parts.counts[name].sum():,} reads{beside}")
        return "\n".join(lines)

    def table(self, built: Built, part: str) -> pa.Table:
        assert isinstance(built.model, NetModel)
        collection, mates = self.scored[part], built.model.task.mates
        outcome = built.model.outcome(collection)
        records = collection.record_numbers(np.arange(0, len(collection), mates))
        labels = labels_of(collection, mates)
        return pa.table(
            {
                "part": pa.array(np.full(len(labels), part)),
                "record": pa.array(records),
                "label": pa.array(labels.astype(np.int32)),
                **{name: pa.array(values) for name, values in outcome.items()},
            }
        )


def task_of(settings: ReadSettings, num_classes: int) -> Task:
    return Task(num_classes, "macro F1", macro_f1, settings.balance == "weights", 2 if settings.paired else 1)


def as_built(name: str, settings: ReadSettings, shapes: Mapping[str, Sequence[int]]) -> ReadSettings:
    """Sizes that were left open, and followed from the memory or from the training reads, as they came out."""
    if name == COUNTING:
        return replace(settings, bits=max(s[0] for s in shapes.values() if len(s) == 2).bit_length() - 1)
    if name == "transformer" and "place" in shapes:  # longer reads are cut
        return replace(settings, max_length=shapes["place"][0])
    return settings


def recipe_of(settings: ReadSettings, num_classes: int, bases: int | None = None) -> ReadRecipe:
    own = {field.name for field in fields(ReadRecipe)} - {"num_classes", "memory", "bases"}
    given = {name: getattr(settings, name) for name in own}
    return ReadRecipe(num_classes=num_classes, memory=parse_bytes(settings.memory) // 2, bases=bases, **given)


def macro_f1(labels: Labels, outcome: Outcome) -> float:
    """The mean F1 over the classes that there are, each against all others; reads of no known class are left out."""
    known = labels >= 0
    labels, found = labels[known], outcome["class"].astype(np.int64)[known]
    size = int(max(labels.max(initial=0), found.max(initial=0))) + 1
    right = np.bincount(labels[labels == found], minlength=size)
    there, said = np.bincount(labels, minlength=size), np.bincount(found, minlength=size)
    seen = there > 0
    return float(np.mean(2 * right[seen] / (there[seen] + said[seen]))) if seen.any() else 0.0
