"""The read classifiers by name: the features of each, and how it is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from millstream.core.console import format_bytes
from millstream.core.features import Feature
from millstream.errors import BadSetting
from millstream.reads.classifiers.nets import ReadNet
from millstream.reads.features import LARGEST_K, BothStrands, KmerBag, TokenFeature, tokens

CLASSIFIERS = {
    "kmer-linear": "linear over hashed k-mers",
    "cnn": "residual convolutions over bases",
    "lstm": "k-mer embedding + BiLSTM + attention pooling",
    "transformer": "small transformer over tokens",
    "hf": "pretrained Hugging Face model",
}
TOKENIZERS = {"lstm": "kmer(8)", "transformer": "kmer(6, stride=3)"}  # defaults
KS = {14: 4, 16: 8}  # k, and one in how many k-mers is kept: longer ones are more specific, but take more memory
LEAST_BITS, MOST_BITS = 12, 24


@dataclass(frozen=True)
class ReadRecipe:
    """Sizes and features of classifiers."""

    num_classes: int
    memory: int  # budget of the model
    bases: int | None = None  # in all training reads
    k: str = "auto"
    bits: int | None = None
    width: int = 64
    layers: int = 4
    dropout: float = 0.1
    tokenizer: str = "auto"
    max_length: int | None = None
    reverse_complement: bool = True
    hf: str | None = None
    lora: int = 0


@dataclass(frozen=True)
class ReadKit:
    """Features for training and for scoring, and how to build the net from an example batch."""

    features: Sequence[Feature]
    scoring: Sequence[Feature]
    build: Callable[[Mapping[str, Tensor]], ReadNet]


def read_kit(name: str, recipe: ReadRecipe) -> ReadKit:
    """Features and net of the classifier of this name."""
    if name == "kmer-linear":
        ks = _ks(recipe.k)
        bits = recipe.bits or fitting_bits(len(ks) * recipe.num_classes, recipe.memory, recipe.bases)
        bag = KmerBag(tuple(ks), tuple(ks.values()), bits)
        size = 4 * len(ks) * recipe.num_classes << bits
        if size > recipe.memory:
            raise BadSetting(
                f"kmer-linear: {recipe.num_classes} classes with bits={bits} take {format_bytes(size)}. Set at least "
                f"memory={format_bytes(2 * size).replace(' ', '')}, or remove it from model="
            )
        return ReadKit([bag], [bag], partial(_kmer_linear, recipe=recipe, bag=bag))
    spec = _tokenizer(name, recipe)
    both = recipe.reverse_complement
    seen = tokens(spec, max_length=recipe.max_length, reverse_complement=0.5 if both else 0.0, dtype=np.int32)
    plain = tokens(spec, max_length=recipe.max_length, dtype=np.int32)
    build = partial(_build, name=name, recipe=recipe, seen=seen)
    return ReadKit([seen], [BothStrands(plain) if both else plain], build)


def fitting_bits(num_weights: int, memory: int, num_kmers: int | None = None) -> int:
    """2^bits buckets of this many weights take at most half of the memory; no more buckets than k-mers."""
    buckets = max(memory // 2 // (4 * num_weights), 1)
    used = MOST_BITS if num_kmers is None else num_kmers.bit_length()
    return int(np.clip(buckets.bit_length() - 1, LEAST_BITS, max(min(used, MOST_BITS), LEAST_BITS)))


def _ks(text: str) -> dict[int, int]:
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


def _tokenizer(name: str, recipe: ReadRecipe) -> str:
    if name == "cnn":
        return "base"
    if name == "hf":
        if not recipe.hf:
            raise BadSetting("model=hf needs hf=FOLDER, the model to load")
        return f"hf({recipe.hf})" if recipe.tokenizer == "auto" else recipe.tokenizer
    return TOKENIZERS[name] if recipe.tokenizer == "auto" else recipe.tokenizer


def _kmer_linear(example: Mapping[str, Tensor], *, recipe: ReadRecipe, bag: KmerBag) -> ReadNet:
    from millstream.reads.classifiers.kmer_linear import KmerLinear

    return KmerLinear(bag.ks, 1 << bag.bits, recipe.num_classes)


def _build(example: Mapping[str, Tensor], *, name: str, recipe: ReadRecipe, seen: TokenFeature) -> ReadNet:
    num_classes, dropout = recipe.num_classes, recipe.dropout
    num_tokens = seen.tokenizer.vocab_size
    if name == "cnn":
        from millstream.reads.classifiers.nets import ReadCNN

        return ReadCNN(recipe.width, num_classes=num_classes, layers=recipe.layers, dropout=dropout)
    if name == "lstm":
        from millstream.reads.classifiers.nets import ReadLSTM

        return ReadLSTM(recipe.width, num_tokens=num_tokens, num_classes=num_classes, dropout=dropout)
    if name == "hf":
        from millstream.reads.classifiers.nets import Pretrained

        assert recipe.hf is not None
        return Pretrained(recipe.hf, num_classes=num_classes, lora=recipe.lora, dropout=dropout)
    from millstream.reads.classifiers.nets import ReadTransformer

    max_length = recipe.max_length or 2 * example["input_ids"].shape[1]
    return ReadTransformer(
        recipe.width,
        num_tokens=num_tokens,
        max_length=max_length,
        num_classes=num_classes,
        layers=recipe.layers,
        dropout=dropout,
    )
