"""The study of read classifiers: all are trained on the same labelled reads, and compared on the same splits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.collection import Collection, Marked, Subset, subset
from millstream.core.config import config_hash, first_few, parse_bytes, read_settings
from millstream.core.console import plural, say
from millstream.core.mixture import Concat, Drawn, Mixture
from millstream.core.order import Permutation, mix_words
from millstream.core.remote import to_path
from millstream.core.split import split
from millstream.errors import BadSetting, BadSource
from millstream.reads.calibration import write_calibrations
from millstream.reads.classifiers import CLASSIFIERS, COUNTED, KMER_EXACT, SYNCMERS, ClassifierSpec
from millstream.reads.classifiers.exact import FRAGMENT
from millstream.reads.classifiers.hf import LIBRARIES
from millstream.reads.files import NAME, QUALITY, SEQUENCE
from millstream.reads.files.columns import OnMismatch
from millstream.reads.files.index import IndexSettings
from millstream.reads.fragments import Fragments, are_genomes
from millstream.reads.kind import HEADERS, ReadSettings
from millstream.reads.labels import are_by_file
from millstream.reads.leaks import shared_sequences
from millstream.reads.mapping import GENOME_LENGTH, Classes, load_classes, load_mapping
from millstream.reads.open import expand, open_reads, watch_index
from millstream.reads.pairs import as_pairs, interleaved
from millstream.reads.qualities import check_qualities
from millstream.reads.reads import FILE, Reads
from millstream.training.study import Built, Fold, ModelSpec, NetModel
from millstream.training.task import count_labels, label_slices, labels_of

VAL, TRAIN = "val", "train"
HELD_OUT_BELOW = np.uint64((1 << 24) // 50)  # of 24 random bits: one in 50 pairs of neighbours
GROUPS_HELD_OUT, ATTEMPTS = 0.1, 20
MANY_SHARED = 0.005  # of the reads of a split
BLOCK = 1 << 18
SHORT = 150  # bases of the fragments of genomes, for other models than kmer-exact
HELD_OUT_BASES, MANY = 20_000, 500  # neighbouring fragments are held out together, if there are so many blocks
SORTING = 40  # bytes per read while reads are sorted by class
UNKNOWN = -1  # the label of a read whose class is not in the mapping
Counts = NDArray[np.int64]


def make_study(settings: Mapping[str, object]) -> "Classification":
    return Classification(read_settings(ReadSettings, settings))


class Classification:
    """All classifiers are trained on the same reads and scored on the same splits."""

    keys: Sequence[str] = ("fingerprint",)  # other reads or another mapping need another run

    def __init__(self, settings: ReadSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data.train
        names = [name.strip() for name in settings.model.split(",") if name.strip()]
        for name in names:
            if name not in CLASSIFIERS:
                raise BadSetting(f"model={name}: unknown read classifier; must be one of {', '.join(CLASSIFIERS)}")
        if not names:
            raise BadSetting(f"model={settings.model}: must be one or more of {', '.join(CLASSIFIERS)}")
        self.libraries: Sequence[str] = LIBRARIES if "hf" in names else ()
        memory = parse_bytes(settings.memory) // 4
        self.splits = splits = open_splits(settings, memory)
        num_bases = splits.files[TRAIN].num_bases
        specs = [
            ClassifierSpec(name, settings, splits.classes, num_bases, num_reads=len(splits.train))
            for name in dict.fromkeys(names)
        ]
        self.train = splits.train
        if settings.balance == "sampling":
            self.train = sample_evenly(splits.train, len(splits.classes), seed=settings.seed, memory=memory)
            once = dict.fromkeys(COUNTED, splits.train)  # k-mer counting must see every read once
            specs = [replace(spec, reads=once.get(spec.name)) for spec in specs]
        if splits.whole is not None:
            specs = [replace(spec, reads=splits.whole if spec.name == KMER_EXACT else spec.reads) for spec in specs]
        for spec in specs:
            spec.kit()  # raises BadSetting before anything is written
        self.specs: Sequence[ModelSpec] = specs
        self.mates = 2 if settings.paired else 1
        val = sample_reads(splits.scored[VAL], settings.val_reads, self.mates)
        self.scored: Mapping[str, Collection] = {**splits.scored, VAL: val}
        self.folds = [Fold(self.train, self.scored)]
        self.card = self._card()

    def _card(self) -> Mapping[str, object]:
        classes, splits = self.splits.classes, self.splits
        card = classes.card()
        for label, row in enumerate(card["classes"]):
            row["reads"] = {name: int(counts[label]) for name, counts in splits.counts.items()}
        if classes.genome_lengths is None and (lengths := _genome_lengths(splits.files[TRAIN], self.settings)):
            for row in card["classes"]:
                row[GENOME_LENGTH] = lengths.get(row["class_id"])
        return {
            "kind": "reads",
            "fingerprint": config_hash(
                {"header_regex": self.settings.data.header_regex, "paired": self.settings.paired}
                | {"class_ids": classes.mapping.ids.tolist()}
                | {name: reads.fingerprint for name, reads in splits.files.items()}
            ),
            "mapping": str(to_path(self.settings.mapping).resolve()),
            "files": {name: [str(path) for path in reads.paths] for name, reads in splits.files.items()},
            "formats": {name: reads.formats for name, reads in splits.files.items()},
            "bases": {name: reads.num_bases for name, reads in splits.files.items()},
            "bytes": {name: reads.num_bytes for name, reads in splits.files.items()},
            "reads": {name: int(counts.sum()) for name, counts in splits.counts.items()},
            "no_class": {name: int(counts[UNKNOWN]) for name, counts in splits.counts.items()},
            "mates": self.mates,
            "chosen_by": len(self.scored[VAL]),
            "held_out": "files" if VAL in splits.files else self.settings.by or "reads",
            **card,
        }

    def keep(self, run: Path) -> None:
        """Nothing to write: everything is on the data card."""

    def finish(self, run: Path) -> None:
        write_calibrations(run, self.splits.classes, held_out=str(self.card["held_out"]))

    def summary(self) -> str:
        splits, num_classes = self.splits, len(self.splits.classes)
        lines = [f"{self.source}: {len(splits.train):,} training reads of {num_classes} classes"]
        lines += self.settings.unused([spec.name for spec in self.specs])
        counts = splits.counts[TRAIN][:-1]
        empty = [splits.classes.taxa[label].name for label in map(int, np.flatnonzero(counts == 0))]
        if empty:
            lines.append(f"no training reads of {len(empty)} classes: {first_few(empty)}")
        if counts.any() and counts.max() > 2 * counts[counts > 0].min():
            how = {
                "weights": "classes are balanced by weights",
                "sampling": "classes are balanced by sampling",
                "none": "classes are not balanced",
            }[self.settings.balance]
            lines.append(f"classes have {counts[counts > 0].min():,} to {counts.max():,} reads: {how}")
        for name in self.scored:
            num_unknown = int(splits.counts[name][UNKNOWN])
            unknown = f" ({num_unknown:,} of no known class)" if num_unknown else ""
            lines.append(f"{name}: {splits.counts[name].sum():,} reads{unknown}")
        for name, part in self.scored.items():
            shared = shared_sequences(part, splits.train)
            if shared.estimate >= MANY_SHARED:
                of = "a training read" if shared.share == 1 else f"one of {shared.share:.2%} of the training reads"
                lines.append(
                    f"{name} leaks: {shared.found:,} of {shared.sampled:,} sampled reads have the exact sequence of "
                    f"{of}. Scores are optimistic; hold out whole genomes (by=)"
                )
        return "\n".join(lines)

    def table(self, built: Built, split: str, records: Collection) -> pa.Table:
        assert isinstance(built.model, NetModel)
        outcome = built.model.outcome(records)
        numbers = records.record_numbers(np.arange(0, len(records), self.mates))
        labels = labels_of(records, self.mates)
        return pa.table(
            {
                "part": pa.array(np.full(len(labels), split)),
                "record": pa.array(numbers),
                "label": pa.array(labels.astype(np.int32)),
                **{name: pa.array(values) for name, values in outcome.items()},
            }
        )


@dataclass(frozen=True)
class ReadSplits:
    """The reads to train on, and the splits to score, by name."""

    classes: Classes
    train: Collection
    scored: Mapping[str, Collection]
    files: Mapping[str, Reads]
    counts: Mapping[str, Counts]  # reads per class in each split, and last those of no known class
    whole: Collection | None = None  # training genomes in long fragments, for kmer-exact


def open_splits(settings: ReadSettings, memory: int) -> ReadSplits:
    """Open all files. Classes in `train` must be in the mapping; in other splits unknown ones are counted.

    Genomes are cut into fragments.
    """
    classes = load_classes(load_mapping(settings.mapping), to_path(settings.taxonomy) if settings.taxonomy else None)
    files = {TRAIN: _open(settings, settings.data.train, memory, strict=True)}
    if settings.data.val:
        files[VAL] = _open(settings, settings.data.val, memory)
    for place in (settings.data.test or "").split(","):
        if place.strip():
            name = Path(place.strip()).name.split(".")[0]
            if name in (*files, VAL):
                raise BadSetting(f"data.test={settings.data.test}: two splits named {name}; rename a file")
            files[name] = _open(settings, place.strip(), memory)
    check_qualities([part for reads in files.values() for part in reads.parts], settings.needs_qualities)
    genomes = {
        name
        for name, reads in files.items()
        if are_genomes(reads, by_file=are_by_file(reads.paths, classes.mapping, settings.data.header_regex))
    }
    has_genomes = TRAIN in genomes
    if settings.paired and genomes:
        raise BadSetting("paired=true: genomes have no mates. Give reads, or leave it out")
    records: dict[str, Collection] = {
        name: interleaved(reads) if settings.paired else Fragments(reads, length=SHORT) if name in genomes else reads
        for name, reads in files.items()
    }
    counts = {name: count_labels(some, len(classes)) for name, some in records.items()}
    train = records[TRAIN]
    fragments = Fragments(files[TRAIN], length=FRAGMENT, overlap=SYNCMERS.k - 1) if has_genomes else None
    whole = None if fragments is None else _labelled(fragments)
    if no_class := counts[TRAIN][UNKNOWN]:
        train = _labelled(train)
        say(f"{settings.data.train}: {no_class:,} of {len(records[TRAIN]):,} reads have no class and are left out")
    if not len(train):
        raise BadSource(f"{settings.data.train}: none of its {len(files[TRAIN])} reads has a class id")
    scored: dict[str, Collection] = {VAL: train, **{name: records[name] for name in records if name != TRAIN}}
    if not settings.data.val:
        train, scored[VAL] = _hold_out(settings, records[TRAIN], train, has_genomes=has_genomes)
        if fragments is not None and whole is not None and settings.by is not None:
            whole, _ = _hold_out_groups(settings, fragments, whole)
        counts[VAL] = count_labels(scored[VAL], len(classes))
        counts[TRAIN] = count_labels(train, len(classes))
    if not counts[VAL][:-1].any():
        place = settings.data.val or settings.data.train
        raise BadSource(f"{place}: none of its validation reads has a class in {settings.mapping}")
    if settings.paired:
        scored = {name: as_pairs(files.get(name, files[TRAIN]), part) for name, part in scored.items()}
    return ReadSplits(classes, train, scored, files, counts, whole)


def _hold_out(
    settings: ReadSettings, reads: Collection, known: Collection, *, has_genomes: bool
) -> tuple[Collection, Collection]:
    """The reads of known classes to train on, and those to validate on: of other groups, or a sample."""
    place, by = settings.data.train, settings.by
    if by is None:
        # of genomes whole blocks, smaller ones if there are few
        together = min(max(len(known) // MANY, 2), HELD_OUT_BASES // SHORT) if has_genomes else 2
        train = Subset(known, Marked(~held_out for held_out in _held_out(len(known), together)))
        val = Subset(known, Marked(_held_out(len(known), together)))
        if not len(train) or not len(val):
            raise BadSource(f"{place}: too few reads to hold some out for validation. Set data.val=FILE")
        say(
            "data.val is not set: 2 % of the genomes in data.train, in blocks, are held out for validation, but not "
            f"from {KMER_EXACT}, whose table has all. Hold out genomes (by=) to validate on unseen strains"
            if has_genomes
            else "data.val is not set: 2 % of the reads in data.train are held out for validation. They are from the "
            "training genomes; hold out genomes (by=) to validate on unseen strains"
        )
        return train, val
    train, val = _hold_out_groups(settings, reads, known)
    say(f"{len(val):,} of {len(known):,} reads are held out for validation: those of a tenth of the values of {by}")
    return train, val


def _hold_out_groups(settings: ReadSettings, reads: Collection, known: Collection) -> tuple[Collection, Collection]:
    """The reads of known classes, without those of some values of the column `by`, and these."""
    by, place = settings.by, settings.data.train
    assert by is not None
    if by not in reads.field_names:
        others = [name for name in reads.field_names if name not in (SEQUENCE, QUALITY, NAME, FILE)]
        has = ", ".join([FILE, *others])
        raise BadSetting(f"by={by}: the reads have no such column; must be one of {has}, or name")
    for attempt in range(ATTEMPTS):  # of a few groups, none may be held out at first
        parts = split(reads, {TRAIN: 1 - GROUPS_HELD_OUT, VAL: GROUPS_HELD_OUT}, by=by, salt=f"{attempt or ''}")
        train, val = (part if known is reads else _labelled(part) for part in parts)
        if len(train) and len(val):
            return train, val
    raise BadSource(f"{place}: has too few values of {by} to hold some of them out. Set data.val=FILE")


def sample_reads(val: Collection, most: int, mates: int) -> Collection:
    """The validation split, or a random sample of at most this many of its reads, the same every time."""
    pairs = len(val) // mates
    if pairs * mates <= most:
        return val
    places = np.sort(Permutation(pairs, 0)(np.arange(max(most // mates, 1))))
    return subset(val, (places[:, None] * mates + np.arange(mates)).reshape(-1))


def sample_evenly(train: Collection, num_classes: int, *, seed: int, memory: int) -> Collection:
    """Epochs of the same size, with equally many reads of each class that has any."""
    if SORTING * len(train) > memory:
        raise BadSetting(
            f"balance=sampling takes {SORTING} bytes per read for {len(train)} reads, more than the memory budget "
            "allows. Use balance=weights, which takes none"
        )
    labels = labels_of(train)
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=num_classes)
    parts = [subset(train, some) for some in np.split(order, np.cumsum(counts)[:-1]) if len(some)]
    each, more = divmod(len(train), len(parts))
    drawn = tuple(each + (number < more) for number in range(len(parts)))
    return Mixture(Concat(parts), Drawn(tuple(map(len, parts)), (drawn,), seed))


def _genome_lengths(reads: Reads, settings: ReadSettings) -> dict[int, float] | None:
    """The mean length of each class's genomes, if they are the training files."""
    mapping = load_mapping(settings.mapping)
    is_by_file = are_by_file(reads.paths, mapping, settings.data.header_regex)
    if not (is_by_file and are_genomes(reads, by_file=True)):
        return None
    starts = np.cumsum([0, *(part.records for part in reads.parts[:-1])])
    owners = reads.fetch(starts, [mapping.key]).columns[mapping.key]
    lengths: dict[int, list[int]] = {}
    for part, class_id in zip(reads.parts, owners, strict=True):
        lengths.setdefault(int(cast(int, class_id)), []).append(part.bases)
    return {class_id: float(np.mean(some)) for class_id, some in lengths.items()}


def _open(settings: ReadSettings, place: str, memory: int, *, strict: bool = False) -> Reads:
    files = [file for path in place.split(",") if path.strip() for file in expand(path.strip())]
    on_mismatch = cast("OnMismatch", settings.data.on_mismatch if strict else "null")
    wanted = IndexSettings(header_regex=settings.data.header_regex, on_mismatch=on_mismatch)
    labels, is_default = settings.data.labels, wanted.header_regex == HEADERS
    is_by_file = is_default and not labels and are_by_file(files, load_mapping(settings.mapping), HEADERS)
    if is_by_file:
        say(f"{place}: each file has reads of one class ({plural(len(files), 'file')})")
    return open_reads(
        files,
        settings=None if is_by_file or (labels and is_default) else wanted,
        labels=labels,
        mapping=settings.mapping,
        unknown="error" if strict else "null",
        memory=memory,
        index_dir=settings.data.index_dir,
        watch=watch_index,
    )


def _labelled(records: Collection) -> Collection:
    """Those of a known class."""
    return Subset(records, Marked(labels != UNKNOWN for labels in label_slices(records)))


def _held_out(size: int, together: int) -> Iterator[NDArray[np.bool_]]:
    """Whether each read is held out: random groups of so many neighbours, the same every time."""
    for first in range(0, size, BLOCK):
        groups = np.arange(first, min(first + BLOCK, size)) // together
        yield mix_words(groups) >> np.uint64(40) < HELD_OUT_BELOW
