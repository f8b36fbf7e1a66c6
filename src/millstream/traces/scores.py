"""Texts -> comparable texts: TriviaQA's official normalisation, one text or many at once, and refusals."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.records import Bytes

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}‘’´`]")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_SPACE = ord(" ")

# Byte -> byte as `normalise` sees ASCII: lower case, punctuation and white space are blanks. To str.split the control
# characters 28 to 31 are white space too. Bytes of other texts stay as they are.
_PLAIN = np.arange(256, dtype=np.uint8)
_PLAIN[65:91] += 32
_PLAIN[list(string.punctuation.encode() + b"\t\n\v\f\r\x1c\x1d\x1e\x1f")] = _SPACE
_IS_ODD = np.ones(256, np.bool_)
_IS_ODD[list(string.printable.encode() + b"\x1c\x1d\x1e\x1f")] = False

# As they look once normalised: "an AI" has lost its article, "don't" is two words. Titles of songs are answers, and
# many of them begin with "I can't": those need the verb of a refusal.
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


@dataclass(frozen=True)
class Words:
    """The words of many normalised texts: those of text i are `flat[offsets[i]:offsets[i + 1]]`."""

    flat: pa.Array
    offsets: NDArray[np.int64]


def normalise(text: str) -> str:
    """The text as TriviaQA's `triviaqa_evaluation.py` compares it: no case, punctuation, articles or extra blanks.

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
    """The words of `normalise(text)` for an Arrow array of texts without nulls, all texts at once."""
    data, offsets = _bytes_of(_with_plain(texts))
    data = _PLAIN[data]
    is_word = data != _SPACE
    begins, ends = is_word.copy(), is_word.copy()
    begins[1:] &= ~is_word[:-1]
    ends[:-1] &= ~is_word[1:]
    borders = offsets[(offsets > 0) & (offsets < data.size)]  # where one text follows the other without a blank
    begins[borders] = is_word[borders]
    ends[borders - 1] = is_word[borders - 1]
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    is_kept = np.ones(first.size, np.bool_)
    for article in (b"a", b"an", b"the"):
        (found,) = np.nonzero(last - first == len(article))
        for at, letter in enumerate(article):
            found = found[data[first[found] + at] == letter]
        is_kept[found] = False
        for at in range(len(article)):
            is_word[first[found] + at] = False
    num_kept = np.concatenate([[0], np.cumsum(is_kept)])
    ends_of = np.concatenate([[0], np.cumsum((last - first)[is_kept])]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends_of), pa.py_buffer(data[is_word])]
    flat = pa.Array.from_buffers(pa.string(), ends_of.size - 1, buffers)
    return Words(flat, num_kept[np.searchsorted(first, offsets)])


def first_line(text: str | None) -> str:
    """The first line that is not blank, without blanks around it; an answer ends where the model starts a new one."""
    return text.strip().partition("\n")[0].rstrip() if text else ""


def is_refusal(normalised: str) -> bool:
    """Whether an answer, normalised, declines to answer: "i don t know", "as ai i cannot", "unknown"."""
    return _REFUSAL.match(normalised) is not None


def _with_plain(texts: pa.Array) -> pa.Array:
    """The texts, with those that are not all printable ASCII replaced by what `normalise` makes of them: lower case and
    the ends of words are no matter of single bytes there. Done again byte by byte, that changes nothing any more.
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
    """The bytes of all texts, and where each begins."""
    _, offsets, data = texts.buffers()
    if not len(texts) or offsets is None or data is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    starts = np.frombuffer(memoryview(offsets), np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return np.frombuffer(memoryview(data), np.uint8)[starts[0] : starts[-1]], starts - starts[0]
