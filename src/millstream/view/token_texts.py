"""Ids of tokens -> the texts they stand for, by the tokenizer that lies beside the traces."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from millstream.errors import BadSource
from millstream.store.layout import TOKENIZER


class TokenTexts:
    """Texts of single tokens; the id itself where there is no tokenizer, and `trouble` says why."""

    def __init__(self, file: Path | None) -> None:
        self._tokenizer, self.trouble = _load(file)

    def of(self, ids: Sequence[int]) -> list[str]:
        return [str(token) if self._tokenizer is None else self._one(int(token)) for token in ids]

    @lru_cache(maxsize=65_536)  # noqa: B019  one of these lives as long as the server
    def _one(self, token: int) -> str:
        piece = self._tokenizer.id_to_token(token) if token >= 0 else None  # -100 stands for what is left out
        if piece is None:
            return f"<{token}>"
        if "\u2581" in piece:  # SentencePiece's blank, which decoding alone would drop
            return piece.replace("\u2581", " ")
        return self._tokenizer.decode([token], skip_special_tokens=False) or piece


def find_tokenizer(store: Path, given: str | None) -> Path | None:
    """The file of the tokenizer that was named, or of the one the store has."""
    if given is not None:
        path = Path(given)
        file = path / TOKENIZER if path.is_dir() else path
        if not file.is_file():
            raise BadSource(f"--tokenizer {given}: there is no {TOKENIZER}")
        return file
    return store / TOKENIZER if (store / TOKENIZER).is_file() else None


def _load(file: Path | None) -> tuple[Any, str | None]:
    """A tokenizer, or why there is none."""
    if file is None:
        return None, f"the store has no {TOKENIZER}; give --tokenizer"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "their texts need tokenizers: pip install 'millstream[view]'"
    try:
        return Tokenizer.from_file(str(file)), None
    except Exception as error:  # the library raises bare Exceptions
        return None, f"{file}: is no tokenizer that can be read ({error})"
