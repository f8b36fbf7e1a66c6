"""The tokens of a read, and which of its letters each of them stands for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millstream.dataset.hf import HfTokenizer
from millstream.dataset.kmers import Kmers
from millstream.dataset.tokenizers import Tokenizer, tokenizer
from millstream.errors import BadSetting

WHOLE = 50_000  # letters; in longer records, what depends on all letters before is begun at the window


@dataclass(frozen=True)
class Spans:
    """Tokens that begin in, or reach into, a window: their ids, and their letters [start, end) in the record."""

    ids: list[int]
    starts: list[int]
    ends: list[int]
    texts: list[str]
    before: list[str]  # special tokens around all others
    after: list[str]
    cut: bool = False  # the record was too long: tokens are those of a read that begins with the window


def given_tokenizer(spec: str) -> Tokenizer:
    """The one that the command line names, which may be a path."""
    if Path(spec).exists():
        spec = f"hf({spec})"
    return _named(spec)


def typed_tokenizer(spec: str) -> Tokenizer:
    """The one that a page names. It may not name files: a page is no reason to open any."""
    if not spec.strip().startswith(("base", "kmer(")):
        raise BadSetting(
            f"tokenizer {spec!r}: here there is base, kmer(6) and kmer(12, stride=2, canonical=True); one that lies in "
            "a file is named when the explorer is started: millstream view READS --tokenizer FOLDER"
        )
    return _named(spec)


def spans_of(
    chosen: Tokenizer, letters: Callable[[int, int], str], *, length: int, start: int, end: int
) -> Spans | None:
    """The tokens of a window of a record of this length; `letters(start, end)` reads it. None: not a known kind."""
    if isinstance(chosen, Kmers):
        return _kmers(chosen, letters, length, start, end)
    if isinstance(chosen, HfTokenizer):
        return _encoded(chosen, letters, length, start, end)
    return None


def _kmers(chosen: Kmers, letters: Callable[[int, int], str], length: int, start: int, end: int) -> Spans:
    """Those that begin in the window; where they begin is arithmetic."""
    k, stride = chosen.k, chosen.stride
    first = -(-start // stride) * stride
    last = min(length, (end - 1) // stride * stride + k) if end > start else first
    text = letters(first, last).upper() if last > first else ""
    flat = np.frombuffer(text.encode("latin-1"), np.uint8)
    found = chosen.tokenize(flat, np.array([0, len(flat)]), dtype=np.int64).input_ids[0].tolist()
    starts = [first + stride * place for place in range(len(found))]
    texts = [text[at - first : at - first + k] for at in starts]
    return Spans(found, starts, [at + k for at in starts], texts, [], [])


def _encoded(chosen: HfTokenizer, letters: Callable[[int, int], str], length: int, start: int, end: int) -> Spans:
    """Those that reach into the window; which they are depends on all letters before."""
    cut = length > WHOLE
    low, high = (start, end) if cut else (0, length)
    encoding: Any = chosen.encoder().encode(letters(low, high).upper())
    rows = list(zip(encoding.ids, encoding.offsets, encoding.tokens, encoding.special_tokens_mask, strict=True))
    plain = [place for place, row in enumerate(rows) if not row[3]]
    first, last = (plain[0], plain[-1]) if plain else (len(rows), len(rows))
    shown = [(one, low + a, low + b, text) for one, (a, b), text, _ in rows[first : last + 1]]
    shown = [row for row in shown if row[2] > start and row[1] < end]
    around = [f"{row[2]} ({row[0]})" for row in rows]
    return Spans(
        [row[0] for row in shown],
        [row[1] for row in shown],
        [row[2] for row in shown],
        [row[3] for row in shown],
        around[:first],
        around[last + 1 :],
        cut,
    )


def _named(spec: str) -> Tokenizer:
    try:
        return tokenizer(spec)
    except BadSetting:
        raise
    except ValueError as error:
        raise BadSetting(str(error)) from None
