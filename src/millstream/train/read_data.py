"""Files of labelled reads as the parts of a run, with every read counted."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.collection import Collection
from millstream.console import say
from millstream.dataset.chosen import Marked
from millstream.dataset.concat import Concat
from millstream.dataset.mix import Drawn, Mixture
from millstream.dataset.permutation import Permutation
from millstream.dataset.subset import Subset, subset
from millstream.errors import BadSetting, BadSource
from millstream.source.classes import Classes, load_classes
from millstream.source.mapping import load_mapping
from millstream.store.index import IndexSettings
from millstream.store.open_reads import open_reads
from millstream.store.read_paths import expand, watch_index
from millstream.store.reads import Reads
from millstream.train.read_files import as_pairs
from millstream.train.read_settings import ReadSettings
from millstream.train.task import count_labels, label_slices, labels_of

VAL, TRAIN = "val", "train"
HELD_OUT = 50  # one pair of neighbours in so many is for validation, where there is no file for it
HELD_OUT_SHARE = np.uint64((1 << 24) // HELD_OUT)
BLOCK = 1 << 18
SORTING = 40  # bytes for each read, while reads are sorted by class
UNKNOWN = -1  # the label of a read whose class is not in the mapping
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ReadParts:
    """The reads to learn from, and by name those to be judged by."""

    classes: Classes
    train: Collection
    scored: Mapping[str, Collection]
    files: Mapping[str, Reads]
    counts: Mapping[str, Counts]  # reads of each class in each part, and last those of no known class


def open_parts(settings: ReadSettings, memory: int) -> ReadParts:
    """Open all files. Reads of `train` have to be of known classes; others may be of none, and are counted."""
    classes = load_classes(load_mapping(settings.mapping), Path(settings.taxonomy) if settings.taxonomy else None)
    files = {TRAIN: _open(settings, settings.data.train, memory, strict=True)}
    if settings.data.val:
        files[VAL] = _open(settings, settings.data.val, memory)
    for place in (settings.data.test or "").split(","):
        if place.strip():
            name = _part_name(place.strip())
            if name in (*files, VAL):
                raise BadSetting(f"data.test={settings.data.test}: two parts of the name {name}; rename a file")
            files[name] = _open(settings, place.strip(), memory)
    counts = {name: count_labels(reads, len(classes)) for name, reads in files.items()}
    train: Collection = files[TRAIN]
    if counts[TRAIN][UNKNOWN]:
        train = Subset(train, Marked(_blocks(labels != UNKNOWN for labels in label_slices(train))))
    if not len(train):
        raise BadSource(f"{settings.data.train}: none of its {len(files[TRAIN])} reads has a class")
    scored: dict[str, Collection] = {VAL: train, **{name: files[name] for name in files if name != TRAIN}}
    if not settings.data.val:
        whole = train
        scored[VAL] = Subset(whole, Marked(_held_out(len(whole))))
        train = Subset(whole, Marked(~held_out for held_out in _held_out(len(whole))))
        if not len(train) or not len(scored[VAL]):
            raise BadSource(f"{settings.data.train}: too few reads to hold some of them out. Give data.val=FILE")
        counts[VAL] = count_labels(scored[VAL], len(classes))
        counts[TRAIN] = count_labels(train, len(classes))
        say(
            "data.val is not given: one read in fifty of data.train is held out. That measures memory of the same "
            "genomes; hold out genomes to know how strains that were never seen are classified"
        )
    if not counts[VAL][:-1].any():
        raise BadSource(f"{settings.data.val}: none of its reads is of a class in {settings.mapping}")
    if settings.paired:
        scored = {name: as_pairs(files.get(name, files[TRAIN]), part) for name, part in scored.items()}
    return ReadParts(classes, train, scored, files, counts)


def chosen_by(val: Collection, most: int, mates: int) -> Collection:
    """The validation part, or so many of its reads, drawn at random, the same ones every time."""
    pairs = len(val) // mates
    if pairs * mates <= most:
        return val
    places = np.sort(Permutation(pairs, 0)(np.arange(max(most // mates, 1))))
    return subset(val, (places[:, None] * mates + np.arange(mates)).reshape(-1))


def evenly_drawn(train: Collection, num_classes: int, *, seed: int, memory: int) -> Collection:
    """As many records an epoch, and of each class that has any as many as of the others."""
    if SORTING * len(train) > memory:
        raise BadSetting(
            f"balance=sampling takes {SORTING} bytes for each of {len(train)} reads, more than memory= leaves for it; "
            "balance=weights needs none"
        )
    labels = labels_of(train)
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=num_classes)
    parts = [subset(train, some) for some in np.split(order, np.cumsum(counts)[:-1]) if len(some)]
    share, more = divmod(len(train), len(parts))
    drawn = tuple(share + (number < more) for number in range(len(parts)))
    return Mixture(Concat(parts), Drawn(tuple(map(len, parts)), drawn, seed))


def _open(settings: ReadSettings, place: str, memory: int, *, strict: bool = False) -> Reads:
    files = [file for path in place.split(",") if path.strip() for file in expand(path.strip())]
    wanted = IndexSettings(header_regex=settings.data.header_regex, on_mismatch="error" if strict else "null")
    return open_reads(
        files,
        settings=wanted,
        mapping=settings.mapping,
        unknown="error" if strict else "null",
        memory=memory,
        index_dir=settings.data.index_dir,
        watch=watch_index,
        notify=say,
    )


def _held_out(size: int) -> Iterator[NDArray[np.bool_]]:
    """Of all reads, whether they are held out: pairs of neighbours, by chance, the same ones every time."""
    for first in range(0, size, BLOCK):
        pairs = np.arange(first, min(first + BLOCK, size)) // 2
        stirred = (pairs.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        yield (stirred ^ (stirred >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(40) < HELD_OUT_SHARE


def _blocks(masks: Iterable[NDArray[np.bool_]]) -> Iterator[NDArray[np.bool_]]:
    """The same, in the sizes that `Marked` takes."""
    rest = np.empty(0, bool)
    for mask in masks:
        rest = np.concatenate([rest, mask])
        while len(rest) > BLOCK:
            yield rest[:BLOCK]
            rest = rest[BLOCK:]
    yield rest


def _part_name(place: str) -> str:
    return Path(place).name.split(".")[0]
