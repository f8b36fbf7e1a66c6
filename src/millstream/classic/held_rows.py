"""Rows in memory: all of a file, tokenised once."""

import numpy as np
import torch

from millstream.classic.token_rows import Compact, CompactType, Rows, RowSource, mask_of, smallest
from millstream.console import progress
from millstream.dataset.tokens import Numbers, Tokenizer

CHUNK_READS = 8192  # tokenised together


class HeldRows:
    """All rows of a source in memory: the tokens one after another without padding, in the smallest type for them.

    They are torch tensors, which spawned workers of a DataLoader share instead of copying.
    """

    def __init__(self, rows: RowSource, *, tokenizer: Tokenizer, max_length: int) -> None:
        self.names = rows.names
        self._width = max_length
        self._pad_id = tokenizer.pad_id
        kind = smallest(tokenizer.vocab_size - 1)
        tokens: list[Compact] = []
        counts, columns = np.empty(len(rows), np.int64), np.empty((len(rows), len(rows.names)), np.int64)
        with progress("tokenize", len(rows)) as update:
            for start in range(0, len(rows), CHUNK_READS):
                some = slice(start, min(start + CHUNK_READS, len(rows)))
                found = rows.fetch(np.arange(some.start, some.stop))
                counts[some], columns[some] = found.counts, found.columns
                tokens.append(found.ids[mask_of(found)].astype(kind))
                update(some.stop)
        self._tokens = _tensor(_joined(tokens, kind))
        self._ends = _tensor(np.cumsum(counts))
        self._columns = _tensor(columns)

    @property
    def held_bytes(self) -> int:
        return self._tokens.nbytes + self._ends.nbytes + self._columns.nbytes

    def __len__(self) -> int:
        return len(self._ends)

    def fetch(self, numbers: Numbers) -> Rows:
        tokens, ends = self._tokens.numpy(), self._ends.numpy()
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        counts = ends[numbers] - starts
        rows = Rows(
            np.full((len(numbers), self._width), self._pad_id, np.int64), counts, self._columns.numpy()[numbers]
        )
        total = np.cumsum(counts)
        rows.ids[mask_of(rows)] = tokens[np.arange(counts.sum()) + np.repeat(starts - total + counts, counts)]
        return rows


def _joined(parts: list[Compact], kind: CompactType) -> Compact:
    """All parts in one array. Each is let go of once it is copied: together they never take twice their memory."""
    out = np.empty(sum(map(len, parts)), kind)
    at = len(out)
    while parts:
        part = parts.pop()
        at -= len(part)
        out[at : at + len(part)] = part
    return out


def _tensor(array: Compact) -> torch.Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
