"""Answers and their lists of aliases -> scores: exact match, token F1, ROUGE-L, containment; the best alias counts.

An alias is compared with its answer through one number for each of its words: the positions at which the answer has
that word, as bits. Only aliases that share a word with their answer are looked at, all of them at once, word by word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.source.llm.answers import split_words

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

MIN_CHARACTERS = 2  # of an alias that is looked for inside an answer: single letters and digits are everywhere
MAX_BITS = 64  # answers of more words are compared with Python's integers: slower, and never wrong


@dataclass(frozen=True)
class Scores:
    """One value an answer. `best` is the place of the alias with the highest F1 in its list, -1 where all have 0."""

    em: Bools
    f1: NDArray[np.float32]
    rouge_l: NDArray[np.float32]
    contains: Bools
    num_tokens: Ints
    num_aliases: Ints
    best: Ints


def score(answers: Sequence[str] | pa.Array, aliases: Sequence[Sequence[str]] | pa.Array) -> Scores:
    """Each answer against its aliases, all normalised. Aliases that are null or "" do not count.

    >>> score(["Paris, France"], [["Paris", "City of Paris"]]).f1
    array([0.6666667], dtype=float32)
    """
    said = split_words(_array(answers, pa.string()))
    texts, row, place = _flatten(_array(aliases, pa.list_(pa.string())))
    true = split_words(texts)
    num_said, num_true = np.diff(said.offsets), np.diff(true.offsets)
    encoded = pa.concat_arrays([said.flat, true.flat]).dictionary_encode()
    said_id, true_id = np.split(whole_numbers(encoded.indices), [len(said.flat)])
    said_row, true_alias = np.repeat(np.arange(num_said.size), num_said), np.repeat(np.arange(row.size), num_true)
    words = _Words(said_row, said_id, np.arange(said_row.size) - said.offsets[said_row], len(encoded.dictionary))
    shared = _compare(words, true_alias, row[true_alias], true_id, num_said > MAX_BITS)

    alias, at = shared.alias, row[shared.alias]
    total = num_said[at] + num_true[alias]
    f1, rouge_l = np.zeros(num_said.size), np.zeros(num_said.size)
    np.maximum.at(f1, at, 2 * shared.num_same / total)
    np.maximum.at(rouge_l, at, 2 * shared.num_in_order / total)

    is_inside = shared.is_run & (shared.num_hits == num_true[alias])
    em, contains = np.zeros(num_said.size, np.bool_), np.zeros(num_said.size, np.bool_)
    em[at[is_inside & (num_said[at] == num_true[alias])]] = True
    em[row[(num_true == 0) & (num_said[row] == 0)]] = True  # as the official script has it: nothing equals nothing
    characters = whole_numbers(pc.utf8_length(encoded.dictionary))[true_id[true.offsets[alias]]]
    contains[at[is_inside & ((characters >= MIN_CHARACTERS) | (num_true[alias] > 1))]] = True

    best = np.full(num_said.size, -1)
    is_best = 2 * shared.num_same / total == f1[at]
    best[at[is_best][::-1]] = place[alias[is_best]][::-1]  # the last one written is the first of equals
    return Scores(
        em=em,
        f1=f1.astype(np.float32),
        rouge_l=rouge_l.astype(np.float32),
        contains=contains,
        num_tokens=num_said,
        num_aliases=np.bincount(row, minlength=num_said.size),
        best=best,
    )


@dataclass(frozen=True)
class _Words:
    """Words of answers: the answer, the word's number, its position there; and how many different words there are."""

    row: Ints
    id: Ints
    position: Ints
    num_ids: int


@dataclass(frozen=True)
class _Shared:
    """Of aliases that share a word with their answer: how many words of the alias the answer has at all, how many in
    any order counted as often as both have them, how many in the same order, and whether they stand there in a row.
    """

    alias: Ints
    num_hits: Ints
    num_same: Ints
    num_in_order: Ints
    is_run: Bools


def _compare(words: _Words, alias: Ints, row: Ints, word: Ints, is_long: Bools) -> _Shared:
    """What the words of aliases have in common with those of the answer in the same row."""
    parts: list[_Shared] = []
    for long in (False, True):
        said, true = is_long[words.row] == long, is_long[row] == long
        if said.any() and true.any():
            some = _Words(words.row[said], words.id[said], words.position[said], words.num_ids)
            parts.append(_compare_bits(some, alias[true], row[true], word[true], dtype=object if long else np.uint64))
    none = np.empty(0, np.int64)
    parts.append(_Shared(none, none, none, none, np.empty(0, np.bool_)))
    return _Shared(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))


def _compare_bits(words: _Words, alias: Ints, row: Ints, word: Ints, *, dtype: Any) -> _Shared:
    key = words.row * words.num_ids + words.id
    order = np.argsort(key, kind="stable")
    key = key[order]
    (starts,) = np.nonzero(np.diff(key, prepend=-1))
    bits = np.ones(key.size, dtype) << words.position[order].astype(dtype)
    masks = np.bitwise_or.reduceat(bits, starts)
    wanted, key = row * words.num_ids + word, key[starts]
    at = np.minimum(np.searchsorted(key, wanted), key.size - 1)
    (hits,) = np.nonzero(key[at] == wanted)
    mask, alias = masks[at[hits]], alias[hits]

    (first,) = np.nonzero(np.diff(alias, prepend=-1))
    count = np.diff(first, append=alias.size)
    full = (1 << (MAX_BITS if dtype is np.uint64 else int(words.position.max()) + 1)) - 1
    used, rest, run = np.zeros(first.size, dtype), np.full(first.size, full, dtype), mask[first]
    for nth in range(count.max(initial=0)):
        (at,) = np.nonzero(count > nth)
        now = mask[first[at] + nth]
        free = now & ~used[at]
        used[at] |= free & -free  # the first such word of the answer that no word of the alias has used yet
        # The longest common subsequence in bits (Hyyrö 2004): its length is the number of zeros in `rest`.
        left, met = rest[at], rest[at] & now
        rest[at] = ((left + met) | (left - met)) & full
        if nth:
            run[at] = (run[at] << 1) & now
    num_same, num_in_order = np.bitwise_count(used), np.bitwise_count(rest ^ full)
    return _Shared(alias[first], count, num_same.astype(np.int64), num_in_order.astype(np.int64), run != 0)


def _flatten(aliases: pa.Array) -> tuple[pa.Array, Ints, Ints]:
    """All aliases one after the other; of each its answer, and its place in the answer's list."""
    lists = cast(pa.ListArray, aliases)
    offsets, values = whole_numbers(lists.offsets), lists.values
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(lengths.size), lengths)
    place = np.arange(row.size) - (offsets[:-1] - offsets[0])[row]
    is_some = whole_numbers(pc.binary_length(values).fill_null(0))[offsets[0] : offsets[-1]] > 0
    kept = np.flatnonzero(is_some & (whole_numbers(lists.is_valid()) > 0)[row])
    return values.take(kept + offsets[0]), row[kept], place[kept]


def _array(values: Sequence[object] | pa.Array, kind: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return array.fill_null("") if kind == pa.string() else array


def whole_numbers(array: pa.Array) -> Ints:
    """Whole numbers or truth values, none of them null."""
    return values_of(array.cast(pa.int64()), np.int64)


def values_of(array: pa.Array, dtype: type[T]) -> NDArray[T]:
    """The numbers of an Arrow array. Its own `to_numpy` imports pandas, where there is one, for a second."""
    data = array.buffers()[1]
    return np.frombuffer(memoryview(data) if data else b"", dtype)[array.offset : array.offset + len(array)]
