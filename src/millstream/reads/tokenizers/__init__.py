"""Tokenizers by name: `base`, `kmer(6)`, or that of a Hugging Face model, with our own BPE or the Rust encoder."""

import ast
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from millstream.core.config import parse_json
from millstream.core.console import say
from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.reads.tokenizers.bpe import MOST_TOKENS, Bpe, Encoded, NotPlain, plain_rules
from millstream.reads.tokenizers.kmers import (
    Bases,
    IdType,
    Kmers,
    Numbers,
    Pad,
    Tokenizer,
    Tokens,
    base,
    frozen,
    kmer,
    pad_rows,
    width_of,
)
from millstream.reads.tokenizers.vocabulary import VOCABULARY, tokenizer_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Rust


FILE = "tokenizer.json"
MOST_UNKNOWN = 0.1  # a larger share of unknown tokens in DNA is reported
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")


def hf(path: str | Path, *, cache_dir: Path | None = None) -> "HfTokenizer":
    """The tokenizer in a tokenizer.json, in a folder that contains one, or of a model in the local Hugging Face cache.

    Nucleotide Transformers have a vocab.txt instead.

    tokens = hf("METAGENE-1/tokenizer.json").tokenize(flat, offsets, max_length=512)
    """
    file = _find(path, cache_dir)
    try:
        text = tokenizer_json(file) if file.name == VOCABULARY else file.read_text(encoding="utf-8")
        parse_json(text)["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        raise BadSource(
            f"{file}: not a {FILE}, the JSON file with a model and vocabulary that Hugging Face `tokenizers` saves; "
            "give that file or its folder"
        ) from None
    found = HfTokenizer(text, name=f"hf({path})")
    share = found.unknown_share()
    if share > MOST_UNKNOWN:
        say(
            f"{file}: warning: {share:.0%} of the tokens of random DNA are unknown ([UNK]), so reads look alike to a "
            "model. If the vocabulary is of k-mers, use the tokenizer kmer(K); otherwise another tokenizer"
        )
    return found


class HfTokenizer:
    """The tokenizer made by `hf`. Pads on the right and truncates at the end, whatever the file says."""

    def __init__(self, text: str, *, name: str, most_tokens: int = MOST_TOKENS) -> None:
        self.name = name
        self.why = ""
        """Why the Rust encoder is used, a sentence; empty if our own is, which is about ten times as fast."""
        self._text, self._most_tokens = text, most_tokens
        self._rust: dict[int | None, Rust] = {}
        self._bpe: Bpe | None = None
        vocab = self.encoder().get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.num_special = self.encoder().num_special_tokens_to_add(False)
        file = cast(dict[str, Any], parse_json(text))
        self.pad_id = _pad_id(file, vocab)
        self._special = {int(token["id"]) for token in file.get("added_tokens") or () if token.get("special")}
        unknown = vocab.get(file["model"].get("unk_token"), file["model"].get("unk_id"))
        self._unknown_id = -1 if unknown is None else int(unknown)
        only_n = {own for text, own in vocab.items() if "N" in text.upper() and not set(text.upper()) & set("ACGTU")}
        self.blank_ids = sorted(self._special | {self._unknown_id} | only_n)
        """The ids of special tokens, and of tokens without a base other than N."""
        try:
            self._bpe = Bpe(plain_rules(file), most_tokens=most_tokens)
        except NotPlain as reason:
            self.why = f"{name} uses the Rust encoder: {reason}"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(HfTokenizer, name=self.name, most_tokens=self._most_tokens), (self._text,)

    def tokenize(
        self,
        flat: Bases,
        offsets: Numbers,
        *,
        max_length: int | None = None,
        pad: Pad = "longest",
        dtype: IdType = np.int32,
    ) -> Tokens:
        if max_length is not None and max_length < self.num_special:
            raise ValueError(
                f"max_length={max_length}: {self.name} adds {self.num_special} special tokens to every read"
            )
        flat, offsets = frozen(flat, offsets)
        encoded = self._bpe.encode(flat, offsets, max_length=max_length) if self._bpe else None
        if encoded is None:
            encoded = self._encode(flat, offsets, max_length)
        width = width_of(encoded.counts, max_length=max_length, pad=pad)
        tokens = pad_rows(*encoded, width=width, pad_id=self.pad_id)
        return Tokens(tokens.input_ids.astype(dtype, copy=False), tokens.attention_mask.astype(dtype, copy=False))

    def encoder(self, max_length: int | None = None) -> "Rust":
        """The Rust encoder. One per length: changing the truncation of a shared one is not thread-safe."""
        if max_length not in self._rust:
            try:
                from tokenizers import Tokenizer as Rust
            except ImportError:
                message = "hf tokenizers need the package 'tokenizers': pip install 'millstream[reads]'"
                raise MissingExtra(message) from None
            try:
                encoder = Rust.from_str(self._text)
            except Exception as error:  # the Rust side raises nothing narrower
                raise BadSource(f"{self.name}: the package 'tokenizers' cannot read this file ({error})") from None
            encoder.no_padding()
            encoder.no_truncation()
            if max_length is not None:
                encoder.enable_truncation(max_length)  # pyright: ignore[reportUnknownMemberType]
            self._rust[max_length] = encoder
        return self._rust[max_length]

    def unknown_share(self) -> float:
        """The share of tokens of random DNA that the vocabulary lacks; 1 if there are no tokens."""
        bases = np.frombuffer(b"ACGT", np.uint8)[np.random.default_rng(0).integers(0, 4, 2000)]
        ids = self._encode(*frozen(bases, np.arange(0, 2001, 100)), None).tokens
        tokens = ids[~np.isin(ids, sorted(self._special - {self._unknown_id}))]
        return float((tokens == self._unknown_id).mean()) if tokens.size else 1.0

    def _encode(self, flat: Bases, offsets: Numbers, max_length: int | None) -> Encoded:
        """The Rust encoder takes strings and returns lists, so this loops over reads in Python."""
        try:
            text = flat.tobytes().decode("ascii")
        except UnicodeDecodeError as error:
            raise BadSource(f"{self.name}: reads must be ASCII text, found byte {flat[error.start]:#x}") from None
        bounds = cast(list[int], offsets.tolist())
        reads = [text[start:stop] for start, stop in pairwise(bounds)]
        rows = [encoding.ids for encoding in self.encoder(max_length).encode_batch_fast(reads)]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter(chain.from_iterable(rows), np.int32, int(counts.sum()))
        return Encoded(tokens, np.cumsum(counts) - counts, counts)


def tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of this name; `tokenizer(spec).name` is its normal form.

    tokenizer("kmer(12, stride=2, canonical=True)").tokenize(flat, offsets)
    """
    if spec.strip() == "base":
        return base()
    if match := re.fullmatch(r"\s*hf\((.+)\)\s*", spec):
        return hf(match[1].strip().strip("'\""))
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "kmer":
            positional = [ast.literal_eval(value) for value in call.args]
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return kmer(*positional, **named)
    except (SyntaxError, TypeError, ValueError) as error:
        is_ours = "ast." not in str(error)  # literal_eval shows the objects of its parser
        reason = f" ({error})" if is_ours else " (its arguments must be numbers, True or False)"
    else:
        reason = ""
    raise BadSetting(
        f"unknown tokenizer {spec!r}{reason}; must be base, kmer(6), kmer(12, stride=2, canonical=True), "
        "or hf(path of a tokenizer.json or its folder)"
    )


def blank_ids(chosen: Tokenizer) -> Sequence[int]:
    """The ids of tokens that say nothing about a read: N and other unknown bases, and special tokens."""
    if isinstance(chosen, HfTokenizer):
        return chosen.blank_ids
    return (chosen.vocab_size - 1,) if isinstance(chosen, Kmers) else ()


def _pad_id(file: Mapping[str, Any], vocab: Mapping[str, int]) -> int:
    """The file's padding id, or that of a token named like padding, or 0: it is masked anyway."""
    if file.get("padding"):
        return int(file["padding"]["pad_id"])
    return next((vocab[name] for name in PAD_NAMES if name in vocab), 0)


def _find(path: str | Path, cache_dir: Path | None) -> Path:
    for file in (Path(path), Path(path) / FILE, Path(path) / VOCABULARY):
        if file.is_file():
            return file
    if Path(path).exists():
        raise BadSource(f"{path}: no {FILE} in this folder; give the folder or file that `save_pretrained` wrote")
    cached = None
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        try:
            from huggingface_hub import try_to_load_from_cache

            found = (try_to_load_from_cache(str(path), name, cache_dir=cache_dir) for name in (FILE, VOCABULARY))
            cached = next((file for file in found if isinstance(file, str)), None)
        except ImportError:
            pass
    if cached is None:
        raise BadSource(
            f"{path}: no such file, folder or model in the local Hugging Face cache; nothing is downloaded. "
            f"Give the folder with the model's {FILE}"
        )
    return Path(cached)
