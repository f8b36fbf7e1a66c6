"""The read classifiers by name: what each sees of a read, how its net is built, and the task they learn."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millstream.core.collection import Collection
from millstream.core.config import parse_bytes
from millstream.core.console import format_bytes, format_seconds, say
from millstream.errors import BadSetting
from millstream.reads.classifiers.exact import KmerExact
from millstream.reads.classifiers.hf import check_memory, pretrained
from millstream.reads.classifiers.nets import (
    KmerLinear,
    ReadCNN,
    ReadLSTM,
    ReadNet,
    ReadPredictions,
    ReadTransformer,
    TokenNet,
)
from millstream.reads.features import Augment, BothStrands, KmerBag, tokens
from millstream.reads.kind import KMER_EXACT, KMER_LINEAR, MACRO_F1, ReadSettings
from millstream.reads.kmers.matcher import SYNCMERS
from millstream.reads.mapping import CLASS, PROBABILITY, Classes
from millstream.reads.qualities import Masked
from millstream.reads.tokenizers import blank_ids, tokenizer
from millstream.reads.tokenizers.kmers import LARGEST_K
from millstream.reads.windows import WINDOW, Windows, bases_in, tokens_in
from millstream.report import measures
from millstream.training.folder import load_shapes
from millstream.training.loop import LATEST, weights_of
from millstream.training.study import Built, Kit, NetModel, Workplace
from millstream.training.task import FitResources, Labels, Net, Outcome, Task

COUNTED: Sequence[str] = (KMER_LINEAR, KMER_EXACT)  # count k-mers in one pass, and fit few parameters
CLASSIFIERS = {
    KMER_LINEAR: "linear over hashed k-mers",
    KMER_EXACT: "exact k-mers and the classes they were seen in",
    "cnn": "residual convolutions over bases",
    "lstm": "k-mer embedding + BiLSTM + attention pooling",
    "transformer": "small transformer over tokens",
    "hf": "pretrained Hugging Face model",
}
TOKENIZERS = {"cnn": "base", "lstm": "kmer(8)", "transformer": "kmer(6, stride=3)"}  # defaults
KS = {14: 4, 16: 8}  # k, and one in how many k-mers is kept: longer ones are more specific, but take more memory
LEAST_BITS, MOST_BITS = 12, 24
COPIES = 4  # of an example batch, to time a net
LONG_S = 60.0  # the time of a training that is worth announcing


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier named in the settings."""

    name: str
    settings: ReadSettings
    classes: Classes
    num_bases: int | None = None  # in all training reads
    reads: Collection | None = None  # its training reads, if not those of the other classifiers
    num_reads: int = 0  # to train on
    by_gradients = True

    def kit(self) -> Kit:
        try:
            clades = clades_of(self.settings.ranks or "", self.classes)
            return classifier_kit(self.name, self.settings, len(self.classes), num_bases=self.num_bases, clades=clades)
        except BadSetting:
            raise
        except ValueError as error:  # of tokenizers and features
            raise BadSetting(f"model={self.name}: {error}") from None

    def build(self, *, resources: FitResources, place: Workplace, folder: Path | None = None) -> Built:
        task = classification_task(self.settings, self.classes)
        task = replace(task, is_balanced=task.is_balanced or self.reads is not None)
        kit = self._resumed(folder).kit()
        is_first = folder is not None and not (folder / LATEST).exists() and place.fabric.global_rank == 0
        if is_first and self.name not in COUNTED and place.fabric.device.type == "cpu":
            kit = replace(kit, build=partial(self._announced, kit.build))
        model = NetModel(self.name, kit, task=task, resources=resources, place=place, folder=folder)
        return Built(model, CLASSIFIERS[self.name], "trained", train=self.reads)

    def _announced(self, build: Callable[[Mapping[str, Tensor]], Net], example: Mapping[str, Tensor]) -> Net:
        """The net, after saying how long its training will take on the CPU."""
        net, epochs = build(example), self.settings.epochs
        seconds = seconds_per_read(net, example) * self.num_reads * epochs / self.settings.devices
        if seconds > LONG_S:
            say(
                f"{self.name}: about {format_seconds(seconds)} on the CPU, for {epochs} epochs of {self.num_reads:,} "
                f"reads. {KMER_LINEAR} takes minutes; a GPU, fewer epochs or fewer reads also shorten it"
            )
        return net

    def _resumed(self, folder: Path | None) -> "ClassifierSpec":
        """With the sizes in the checkpoint to resume from: the memory budget may have changed."""
        if folder is None or not (folder / LATEST).exists():
            return self
        return replace(self, settings=as_built(self.name, self.settings, weights_of(load_shapes(folder / LATEST))))


def classifier_kit(
    name: str,
    settings: ReadSettings,
    num_classes: int,
    *,
    num_bases: int | None = None,
    clades: Sequence[NDArray[np.int64]] = (),
) -> Kit:
    """Features and net of the classifier of this name; `num_bases` is the size of all training reads, if known.

    `clades` are further levels that nets learn, as the taxon of each class.
    """
    kit = _kit(name, settings, num_classes, num_bases, clades)
    if not (least := settings.min_quality):
        return kit
    scoring = None if kit.scoring is None else [Masked(feature, least) for feature in kit.scoring]
    return replace(kit, features=[Masked(feature, least) for feature in kit.features], scoring=scoring)


def _kit(
    name: str,
    settings: ReadSettings,
    num_classes: int,
    num_bases: int | None,
    clades: Sequence[NDArray[np.int64]],
) -> Kit:
    if name == KMER_LINEAR:
        return _kmer_linear_kit(settings, num_classes, num_bases)
    if name == KMER_EXACT:
        memory = parse_bytes(settings.memory) // 2
        return Kit([SYNCMERS], lambda _: KmerExact(SYNCMERS, num_classes, memory, num_bases))
    spec = tokenizer(_tokenizer(name, settings))
    both = settings.reverse_complement
    if name == "hf":
        check_memory(settings)
    has_qualities = settings.qualities and name == "cnn"
    most = settings.max_length or tokens_in(spec, WINDOW)
    bases = bases_in(spec, most)
    plain = tokens(spec, max_length=most, qualities=has_qualities, dtype=np.int32)
    augment = Augment(max_length=bases, reverse_complement=0.5 if both else 0.0)  # a window, another in every epoch
    seen = replace(plain, augment=augment)

    def build(example: Mapping[str, Tensor]) -> ReadNet:
        net = untrained(example)
        net.blank_ids = blank_ids(seen.tokenizer)
        net.clades = clades
        return net

    def untrained(example: Mapping[str, Tensor]) -> TokenNet:
        width, dropout, num_tokens = settings.width, settings.dropout, seen.tokenizer.vocab_size
        if name == "cnn":
            return ReadCNN(
                width, num_classes=num_classes, layers=settings.layers, dropout=dropout, has_qualities=has_qualities
            )
        if name == "lstm":
            return ReadLSTM(width, num_tokens=num_tokens, num_classes=num_classes, dropout=dropout)
        if name == "hf":
            return pretrained(settings, num_classes)
        return ReadTransformer(
            width,
            num_tokens=num_tokens,
            max_length=most,
            num_classes=num_classes,
            layers=settings.layers,
            dropout=dropout,
        )

    return Kit([seen], build, [Windows(BothStrands(plain) if both else plain, bases)])


def clades_of(ranks: str, classes: Classes) -> list[NDArray[np.int64]]:
    """The taxon of each class at these ranks, separated by commas; a class that has none is one of its own.

    Levels that are the same count once, and one that is the same as the classes does not count.
    """
    found: dict[bytes, NDArray[np.int64]] = {}
    known = classes.taxa_by_rank
    for name in filter(None, map(str.strip, ranks.split(","))):
        if name not in known:
            raise BadSetting(f"ranks={ranks}: no class has a taxon at rank {name}; must be some of {', '.join(known)}")
        own = len(classes) + np.arange(len(classes))
        level = np.where(known[name] < 0, own, known[name])
        if len(np.unique(level)) < len(classes):
            found[level.tobytes()] = level
    return [*found.values()]


def seconds_per_read(net: Net, example: Mapping[str, Tensor]) -> float:
    """The time of a training step on the CPU, per read of this batch. The net is left as it was."""
    batch = {name: torch.cat([values] * COPIES) for name, values in example.items()}
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    was_training, num_reads = net.training, len(batch["numbers"])
    net.train()
    seconds = 0.0
    for _ in range(2):  # the first pass allocates
        started = time.perf_counter()
        net(batch, torch.zeros(num_reads, dtype=torch.long), torch.ones(num_reads))[0].backward()
        seconds = time.perf_counter() - started
    net.zero_grad()
    for name, buffer in net.named_buffers():
        buffer.copy_(kept[name])
    net.train(was_training)
    return seconds / num_reads


def as_built(name: str, settings: ReadSettings, shapes: Mapping[str, Sequence[int]]) -> ReadSettings:
    """With the sizes of these weights, for settings that depend on the memory budget or the training reads."""
    if name == KMER_LINEAR:
        num_buckets = max(shape[0] for shape in shapes.values() if len(shape) == 2)
        return replace(settings, bits=num_buckets.bit_length() - 1)
    if name == "transformer" and "place" in shapes:
        return replace(settings, max_length=shapes["place"][0])
    return settings


def classification_task(settings: ReadSettings, classes: Classes) -> Task:
    mates = 2 if settings.paired else 1
    answer = ReadPredictions(classes.taxa_by_rank, mates)
    is_balanced = settings.balance == "weights"
    return Task(len(classes), MACRO_F1, _macro_f1, answer, is_balanced=is_balanced, group_size=mates)


def fitting_bits(num_weights: int, memory: int, num_kmers: int | None = None) -> int:
    """2^bits buckets of this many weights take at most half of the memory; no more buckets than k-mers."""
    buckets = max(memory // 2 // (4 * num_weights), 1)
    used = MOST_BITS if num_kmers is None else num_kmers.bit_length()
    return int(np.clip(buckets.bit_length() - 1, LEAST_BITS, max(min(used, MOST_BITS), LEAST_BITS)))


def _kmer_linear_kit(settings: ReadSettings, num_classes: int, num_bases: int | None) -> Kit:
    ks, memory = _parse_ks(settings.k), parse_bytes(settings.memory) // 2
    bits = settings.bits or fitting_bits(len(ks) * num_classes, memory, num_bases)
    bag = KmerBag(tuple(ks), tuple(ks.values()), bits)
    size = 4 * len(ks) * num_classes << bits
    if size > memory:
        raise BadSetting(
            f"{KMER_LINEAR}: {num_classes} classes with bits={bits} take {format_bytes(size)}. Set at least "
            f"memory={format_bytes(2 * size).replace(' ', '')}, or remove it from model="
        )
    return Kit([bag], lambda _: KmerLinear(bag, num_classes))


def _parse_ks(text: str) -> dict[int, int]:
    """`12,24/8`: k-mers of 12 bases, and one in eight of those of 24."""
    if text == "auto":
        return KS
    try:
        pairs = [part.partition("/") for part in text.split(",")]
        found = {int(k): int(every or 1) for k, _, every in pairs}
    except ValueError:
        raise BadSetting(f"k={text}: must be k-mer lengths separated by commas, as in 12,24/8") from None
    if not all(1 <= k <= LARGEST_K and every >= 1 for k, every in found.items()):
        raise BadSetting(f"k={text}: k must be from 1 to {LARGEST_K}, subsampling at least 1")
    return found


def _tokenizer(name: str, settings: ReadSettings) -> str:
    if name == "hf" and not settings.hf:
        raise BadSetting("model=hf needs hf=FOLDER, the model to load")
    if name == "cnn" or settings.tokenizer == "auto":
        return TOKENIZERS.get(name, f"hf({settings.hf})")
    return settings.tokenizer


def _macro_f1(labels: Labels, outcome: Outcome) -> float:
    """The mean F1 over the classes that occur; reads of unknown classes are excluded, unclassified ones are missed."""
    found = np.where(np.asarray(outcome[PROBABILITY], np.float32) > 0, outcome[CLASS], -1)
    return float(np.nan_to_num(measures.macro_f1(labels, found)))
