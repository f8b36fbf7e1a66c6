"""MetaGeneTokenizer: the old scripts' tokenizer interface on millstream's tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict, overload

import numpy as np
import torch

from millstream.reads.tokenizers import base, hf
from millstream.reads.tokenizers.kmers import Numbers, Tokenizer, Tokens

Padding = bool | Literal["longest", "max_length", "do_not_pad"]


class Encoding(TypedDict):
    """Tokens of one text."""

    input_ids: list[int]
    attention_mask: list[int]


class Encodings(TypedDict):
    """Tokens of several texts."""

    input_ids: list[list[int]]
    attention_mask: list[list[int]]


class Tensors(TypedDict):
    """Tokens of one or several texts, one row per text."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class MetaGeneTokenizer:
    """The tokenizer of a folder with a tokenizer.json, of such a file, or of a model in the local Hugging Face cache.

    Nothing is downloaded. Call it like a Hugging Face tokenizer; every millstream function that takes a tokenizer
    accepts it. `use_hf_tokenizer=False` gives one token per base, the old scripts' fallback, with millstream's `base`:
    A C G T N are 1 to 5, 0 is padding, there are no special tokens, and `tokenizer_path` is ignored.

    >>> tokenizer = MetaGeneTokenizer("METAGENE-1")
    >>> tokenizer(["ACGT", "GATTACA"], max_length=128, padding="max_length", truncation=True, return_tensors="pt")
    """

    def __init__(self, tokenizer_path: str | Path | None = None, use_hf_tokenizer: bool = True) -> None:
        if not use_hf_tokenizer:
            found: Tokenizer = base()
        elif tokenizer_path is not None:
            found = hf(tokenizer_path)
        else:
            raise ValueError(
                "tokenizer_path is missing: give the folder with the model's tokenizer.json, "
                "or use_hf_tokenizer=False for one token per base"
            )
        self.name = found.name
        self.vocab_size = found.vocab_size
        """The largest id plus one: the number of rows of an embedding."""
        self.pad_id = self.pad_token_id = found.pad_id
        self.tokenize = found.tokenize  # many reads at a time, as `ms.features.tokens` calls it

    def encode(self, text: str, *, max_length: int | None = None, truncation: bool = False) -> list[int]:
        """The ids of one sequence, including special tokens."""
        return self(text, max_length=max_length, truncation=truncation)["input_ids"]

    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]: a text is a sequence of texts
        self,
        text: str,
        *,
        max_length: int | None = None,
        padding: Padding = False,
        truncation: bool = False,
        return_tensors: None = None,
    ) -> Encoding: ...
    @overload
    def __call__(
        self,
        text: Sequence[str],
        *,
        max_length: int | None = None,
        padding: Padding = False,
        truncation: bool = False,
        return_tensors: None = None,
    ) -> Encodings: ...
    @overload
    def __call__(
        self,
        text: str | Sequence[str],
        *,
        max_length: int | None = None,
        padding: Padding = False,
        truncation: bool = False,
        return_tensors: Literal["pt"],
    ) -> Tensors: ...
    def __call__(
        self,
        text: str | Sequence[str],
        *,
        max_length: int | None = None,
        padding: Padding = False,
        truncation: bool = False,
        return_tensors: Literal["pt"] | None = None,
    ) -> Encoding | Encodings | Tensors:
        """Ids and mask: lists, or with `return_tensors="pt"` int64 tensors with one row per text.

        `padding` is True or "longest", "max_length" or False; `truncation` truncates to `max_length`.
        """
        if padding not in (True, False, "longest", "max_length", "do_not_pad"):
            raise ValueError(f'padding={padding!r}: must be one of True, "longest", "max_length", False')
        if return_tensors not in (None, "pt"):
            raise ValueError(f'return_tensors={return_tensors!r}: must be "pt", or None for lists')
        if (truncation or padding == "max_length") and max_length is None:
            option = "truncation=True" if truncation else 'padding="max_length"'
            raise ValueError(f"{option} needs a max_length")
        tokens = self._tokenize([text] if isinstance(text, str) else text, max_length if truncation else None)
        counts = tokens.attention_mask.sum(axis=1)
        if padding == "max_length" and max_length is not None:
            tokens = self._padded(tokens, counts, max_length)
        is_ragged = padding in (False, "do_not_pad")
        if return_tensors == "pt":
            if is_ragged and len(set(counts.tolist())) > 1:
                raise ValueError(
                    f"texts of {counts.min()} to {counts.max()} tokens do not form a tensor: pass padding=True, "
                    'or padding="max_length", truncation=True and a max_length'
                )
            return Tensors(input_ids=torch.tensor(tokens.input_ids), attention_mask=torch.tensor(tokens.attention_mask))
        ids, mask = tokens.input_ids.tolist(), tokens.attention_mask.tolist()
        if is_ragged:
            ids, mask = ([row[:count] for row, count in zip(rows, counts, strict=True)] for rows in (ids, mask))
        if isinstance(text, str):
            return Encoding(input_ids=ids[0], attention_mask=mask[0])
        return Encodings(input_ids=ids, attention_mask=mask)

    def __repr__(self) -> str:
        return f"MetaGeneTokenizer({self.name}: {self.vocab_size} tokens)"

    def _tokenize(self, texts: Sequence[str], max_length: int | None) -> Tokens:
        sequences = [text.encode() for text in texts]
        flat, offsets = (
            np.frombuffer(b"".join(sequences), np.uint8),
            np.cumsum([0, *map(len, sequences)], dtype=np.int64),
        )
        return self.tokenize(flat, offsets, max_length=max_length, dtype=np.int64)

    def _padded(self, tokens: Tokens, counts: Numbers, width: int) -> Tokens:
        if len(counts) and counts.max() > width:
            raise ValueError(
                f"text {counts.argmax()} has {counts.max()} tokens, more than max_length={width}: pass truncation=True"
            )
        ids, mask = tokens
        missing = ((0, 0), (0, width - ids.shape[1]))
        return Tokens(np.pad(ids, missing, constant_values=self.pad_id), np.pad(mask, missing))
