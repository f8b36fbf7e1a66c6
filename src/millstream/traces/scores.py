"""Answers -> normalised texts and scores: exact match, token F1, ROUGE-L, containment, or scores from a file."""

import csv
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.core.record import Bytes
from millstream.core.tables import read_parquet
from millstream.errors import BadSource

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}‘’´`]")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SPACE = ord(" ")

# Byte -> byte as `normalise` treats ASCII: lower case, with spaces for punctuation and white space. To str.split the
# control characters 28 to 31 are white space too. Bytes of other texts are unchanged.
_PLAIN = np.arange(256, dtype=np.uint8)
_PLAIN[65:91] += 32
_PLAIN[list(string.punctuation.encode() + b"\t\n\v\f\r\x1c\x1d\x1e\x1f")] = _SPACE
_IS_ODD = np.ones(256, np.bool_)
_IS_ODD[list(string.printable.encode() + b"\x1c\x1d\x1e\x1f")] = False

# In normalised form: "an AI" has lost its article, "don't" is two words. Many song titles, which are answers, start
# with "I can't", so this opening counts only with a verb that refuses.
_ALONE = (
    "unknown|unsure|not sure|not known|no answer|no idea|idk|dunno|don t know|do not know|not applicable|"
    "no information|not enough information|insufficient information|cannot answer|cannot be determined"
)
_OPENING = (
    "i (don t|do not|really don t|really do not|honestly don t) know|i m not (entirely |really |quite )?(sure|certain)|"
    "i am not (entirely |really |quite )?(sure|certain)|i m unsure|i am unsure|i cannot|i can not|i have no idea|"
    "i can t (answer|provide|determine|confirm|identify|verify|access|assist|recall|help (you )?with)|"
    "i m unable to|i am unable to|i m not able to|i am not able to|i m not aware|i am not aware|"
    "i (don t|do not) have (access|enough|any|information|specific|that|this)|i could not find|i couldn t find|"
    "i (m|am) sorry but|sorry but|i apologize but|i apologise but|as ai|as (large )?language model|"
    "i m (just )?(ai|language model)|i am (just )?(ai|language model)|there is not enough information|"
    "there is no information|it is (unknown|not known|unclear|impossible to (say|know|determine))|"
    "answer (is unknown|is not known|cannot be)|unable to (answer|determine|provide|find)"
)
_FILLER = "(?:(?:well|hmm+|um+|uh+|oh|sorry|unfortunately|honestly|i m sorry|i am sorry|i apologi[sz]e|apologies) )*"
REFUSALS = rf"{_FILLER}(?:(?:{_ALONE})$|(?:{_OPENING})\b)"
_REFUSAL = re.compile(REFUSALS)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

MIN_CHARACTERS = 2  # of an alias to search for inside an answer: single characters occur everywhere
MAX_BITS = 64  # longer answers, in words, are compared with Python integers: slower, equally exact
USUAL = "bleurt_score"  # column of ground_truth_scores.csv


@dataclass(frozen=True)
class Words:
    """The words of many normalised texts; text i has `flat[offsets[i]:offsets[i + 1]]`."""

    flat: pa.Array
    offsets: NDArray[np.int64]


def normalise(text: str) -> str:
    """The text as TriviaQA's `triviaqa_evaluation.py` compares it: lower case, no punctuation, articles, extra spaces.

    >>> normalise("The Jay-Z's")
    'jay z s'
    """
    return " ".join(_ARTICLE.sub(" ", _PUNCTUATION.sub(" ", text.replace("_", " ").lower())).split())


def normalise_all(texts: Sequence[str]) -> list[str]:
    """`normalise` of every text."""
    words = split_words(pa.array(texts, pa.string()))
    flat: list[str] = words.flat.to_pylist()
    return [" ".join(flat[start:end]) for start, end in pairwise(words.offsets.tolist())]


def split_words(texts: pa.Array) -> Words:
    """The words of `normalise(text)` for every text of an Arrow array without nulls."""
    data, offsets = _bytes_of(_with_plain(texts))
    data = _PLAIN[data]
    is_word = data != _SPACE
    begins, ends = is_word.copy(), is_word.copy()
    begins[1:] &= ~is_word[:-1]
    ends[:-1] &= ~is_word[1:]
    borders = offsets[(offsets > 0) & (offsets < data.size)]  # where texts meet without a space
    begins[borders] = is_word[borders]
    ends[borders - 1] = is_word[borders - 1]
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    is_kept = np.ones(first.size, np.bool_)
    for article in (b"a", b"an", b"the"):
        (found,) = np.nonzero(last - first == len(article))
        for at, character in enumerate(article):
            found = found[data[first[found] + at] == character]
        is_kept[found] = False
        for at in range(len(article)):
            is_word[first[found] + at] = False
    num_kept = np.concatenate([[0], np.cumsum(is_kept)])
    ends_of = np.concatenate([[0], np.cumsum((last - first)[is_kept])]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends_of), pa.py_buffer(data[is_word])]
    flat = pa.Array.from_buffers(pa.string(), ends_of.size - 1, buffers)
    return Words(flat, num_kept[np.searchsorted(first, offsets)])


def first_line(text: str | None) -> str:
    """The first line that is not blank, stripped; an answer ends where the model starts a new line."""
    return text.strip().partition("\n")[0].rstrip() if text else ""


def is_refusal(normalised: str) -> bool:
    """Whether a normalised answer declines to answer: "i don t know", "as ai i cannot", "unknown"."""
    return _REFUSAL.match(normalised) is not None


@dataclass(frozen=True)
class Scores:
    """One value per answer, of the alias that matches it best."""

    em: Bools
    f1: NDArray[np.float32]
    rouge_l: NDArray[np.float32]
    contains: Bools
    num_tokens: Ints
    num_aliases: Ints


def score(answers: Sequence[str] | pa.Array, aliases: Sequence[Sequence[str]] | pa.Array) -> Scores:
    """Compare each answer with its aliases, all normalised. Null and empty aliases are ignored.

    >>> score(["Paris, France"], [["Paris", "City of Paris"]]).f1
    array([0.6666667], dtype=float32)
    """
    answer_words = split_words(_array(answers, pa.string()))
    texts, row = _flatten(_array(aliases, pa.list_(pa.string())))
    alias_words = split_words(texts)
    answer_len, alias_len = np.diff(answer_words.offsets), np.diff(alias_words.offsets)
    encoded = pa.concat_arrays([answer_words.flat, alias_words.flat]).dictionary_encode()
    answer_id, alias_id = np.split(whole_numbers(encoded.indices), [len(answer_words.flat)])
    answer_row = np.repeat(np.arange(answer_len.size), answer_len)
    word_alias = np.repeat(np.arange(row.size), alias_len)
    position = np.arange(answer_row.size) - answer_words.offsets[answer_row]
    words = _Occurrences(answer_row, answer_id, position, len(encoded.dictionary))
    shared = _compare(words, word_alias, row[word_alias], alias_id, answer_len > MAX_BITS)

    alias, at = shared.alias, row[shared.alias]
    total = answer_len[at] + alias_len[alias]
    f1, rouge_l = np.zeros(answer_len.size), np.zeros(answer_len.size)
    np.maximum.at(f1, at, 2 * shared.num_same / total)
    np.maximum.at(rouge_l, at, 2 * shared.num_in_order / total)

    is_inside = shared.is_run & (shared.num_hits == alias_len[alias])
    em, contains = np.zeros(answer_len.size, np.bool_), np.zeros(answer_len.size, np.bool_)
    em[at[is_inside & (answer_len[at] == alias_len[alias])]] = True
    em[row[(alias_len == 0) & (answer_len[row] == 0)]] = True  # as in the official script: empty equals empty
    characters = whole_numbers(pc.utf8_length(encoded.dictionary))[alias_id[alias_words.offsets[alias]]]
    contains[at[is_inside & ((characters >= MIN_CHARACTERS) | (alias_len[alias] > 1))]] = True
    return Scores(
        em=em,
        f1=f1.astype(np.float32),
        rouge_l=rouge_l.astype(np.float32),
        contains=contains,
        num_tokens=answer_len,
        num_aliases=np.bincount(row, minlength=answer_len.size),
    )


def whole_numbers(array: pa.Array) -> Ints:
    """Integers or booleans without nulls, as int64."""
    return values_of(array.cast(pa.int64()), np.int64)


def values_of(array: pa.Array, dtype: type[T]) -> NDArray[T]:
    """The numbers of an Arrow array. Its own `to_numpy` imports pandas if installed, which takes a second."""
    data = array.buffers()[1]
    return np.frombuffer(memoryview(data) if data else b"", dtype)[array.offset : array.offset + len(array)]


@dataclass(frozen=True, kw_only=True)
class ScoreFile:
    """The columns `names` of every question; `main` is the score to decide verdicts by, if there is one."""

    path: Path
    names: tuple[str, ...]
    main: str | None
    rows: dict[str, tuple[object, ...]]

    def columns(self, ids: Sequence[str]) -> dict[str, pa.Array]:
        """Each column, one value per id; null if the file has none."""
        nothing = (None,) * len(self.names)
        rows = [self.rows.get(name, nothing) for name in ids]
        return {name: pa.array([row[at] for row in rows]) for at, name in enumerate(self.names)}

    def numbers(self, ids: Sequence[str]) -> NDArray[np.float64]:
        """The main column, one number per id; NaN if the file has none."""
        if self.main is None:
            raise BadSource(f"{self.path}: has several columns: {', '.join(self.names)}. Choose one: column=...")
        at = self.names.index(self.main)
        values = [self.rows[name][at] if name in self.rows else None for name in ids]
        return np.array([np.nan if value is None else self._number(value) for value in values], np.float64)

    def _number(self, value: object) -> float:
        if isinstance(value, bool | int | float):
            return float(value)
        raise BadSource(f"{self.path}: {self.main} {value!r} is not a number. Choose another column: column=...")


def read_scores(path: Path, *, keys: Sequence[str], column: str | None = None) -> ScoreFile:
    """The columns of a file by the first of `keys` that it has, or only `column`; empty and NaN values are None."""
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path, keys)
    key = next((name for name in keys if name in columns), keys[-1])
    others = [name for name in columns if name not in (*keys, "")]  # pandas writes row numbers without a name
    if key not in columns or (column or "") not in ("", *others) or not others:
        wanted = f"the columns {key!r} and {column or 'a score'!r}"
        raise BadSource(f"{path}: expected {wanted}, found {', '.join(columns) or 'nothing'}")
    names = (column,) if column else tuple(others)
    main = USUAL if USUAL in names else names[0] if len(names) == 1 else None
    rows: dict[str, tuple[object, ...]] = {}
    for name, *values in zip(columns[key], *(columns[name] for name in names), strict=True):
        row = tuple(None if value != value else value for value in values)  # NaN is not equal to itself
        if rows.setdefault(str(name), row) != row:
            raise BadSource(f"{path}: {key} {name!r} has conflicting rows, {rows[str(name)]} and {row}")
    return ScoreFile(path=path, names=names, main=main, rows=rows)


def _with_plain(texts: pa.Array) -> pa.Array:
    """The texts, with those that are not all printable ASCII normalised: their case and word boundaries do not depend
    on single bytes. Normalising them again byte by byte changes nothing.
    """
    data, offsets = _bytes_of(texts)
    (odd,) = np.nonzero(_IS_ODD[data])
    if not odd.size:
        return texts
    numbers = np.unique(np.searchsorted(offsets, odd, side="right") - 1)
    plain = pa.array([normalise(text) for text in texts.take(numbers).to_pylist()], pa.string())
    source = np.arange(len(texts))
    source[numbers] = len(texts) + np.arange(numbers.size)
    return pa.concat_arrays([texts, plain]).take(source)


def _bytes_of(texts: pa.Array) -> tuple[Bytes, NDArray[np.int64]]:
    """The bytes of all texts, and where each starts."""
    _, offsets, data = texts.buffers()
    if not len(texts) or offsets is None or data is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    starts = np.frombuffer(memoryview(offsets), np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return np.frombuffer(memoryview(data), np.uint8)[starts[0] : starts[-1]], starts - starts[0]


@dataclass(frozen=True)
class _Occurrences:
    """Every word of every answer: its answer, its id and its position; and the number of distinct ids."""

    row: Ints
    id: Ints
    position: Ints
    num_ids: int


@dataclass(frozen=True)
class _Shared:
    """Aliases that share a word with their answer: how many words of the alias occur in the answer, how many match in
    any order (with multiplicity), how many match in the same order, and whether they are consecutive.
    """

    alias: Ints
    num_hits: Ints
    num_same: Ints
    num_in_order: Ints
    is_run: Bools


def _compare(words: _Occurrences, alias: Ints, row: Ints, word: Ints, is_long: Bools) -> _Shared:
    """Compare the words of aliases with those of the answer in the same row."""
    parts: list[_Shared] = []
    for long in (False, True):
        ours, theirs = is_long[words.row] == long, is_long[row] == long
        if ours.any() and theirs.any():
            some = _Occurrences(words.row[ours], words.id[ours], words.position[ours], words.num_ids)
            parts.append(
                _compare_bits(some, alias[theirs], row[theirs], word[theirs], dtype=object if long else np.uint64)
            )
    none = np.empty(0, np.int64)
    parts.append(_Shared(none, none, none, none, np.empty(0, np.bool_)))
    return _Shared(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))


def _compare_bits(words: _Occurrences, alias: Ints, row: Ints, word: Ints, *, dtype: Any) -> _Shared:
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
        used[at] |= free & -free  # the first match in the answer that is not used yet
        # The longest common subsequence in bits (Hyyrö 2004): its length is the number of zeros in `rest`.
        left, met = rest[at], rest[at] & now
        rest[at] = ((left + met) | (left - met)) & full
        if nth:
            run[at] = (run[at] << 1) & now
    num_same, num_in_order = np.bitwise_count(used), np.bitwise_count(rest ^ full)
    return _Shared(alias[first], count, num_same.astype(np.int64), num_in_order.astype(np.int64), run != 0)


def _flatten(aliases: pa.Array) -> tuple[pa.Array, Ints]:
    """All aliases, concatenated, and the answer that each belongs to."""
    lists = cast(pa.ListArray, aliases)
    offsets, values = whole_numbers(lists.offsets), lists.values
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(lengths.size), lengths)
    is_some = whole_numbers(pc.binary_length(values).fill_null(0))[offsets[0] : offsets[-1]] > 0
    kept = np.flatnonzero(is_some & (whole_numbers(lists.is_valid()) > 0)[row])
    return values.take(kept + offsets[0]), row[kept]


def _array(values: Sequence[object] | pa.Array, kind: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return array.fill_null("") if kind == pa.string() else array


def _read_parquet(path: Path) -> dict[str, list[object]]:
    try:
        table = read_parquet(path.read_bytes())
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is not a valid Parquet file ({error})") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _read_csv(path: Path, keys: Sequence[str]) -> dict[str, list[object]]:
    """Columns of numbers if all values are numbers, else of texts. Ids are always texts: `007` is not 7."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *lines = list(csv.reader(file, strict=True)) or [[]]
    except FileNotFoundError:
        raise BadSource(f"{path}: no such file") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadSource(f"{path}: is not a valid CSV file ({error})") from None
    for number, line in enumerate(lines, 2):
        if len(line) not in (0, len(header)):
            raise BadSource(f"{path}: row {number} has {len(line)} values, the header has {len(header)}")
    kept = [line for line in lines if line]
    columns = {name: [line[at] for line in kept] for at, name in enumerate(header)}
    return {name: list(values) if name in keys else _numbers(values) for name, values in columns.items()}


def _numbers(values: Sequence[str]) -> list[object]:
    try:
        return [float(value) if value.strip() else None for value in values]
    except ValueError:
        return [value or None for value in values]
