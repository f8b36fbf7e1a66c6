"""Dictionaries of header columns against plain dicts."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.source.dictionary import IntegerDictionary, TextDictionary
from millstream.source.headers import Texts

INT64 = st.integers(-(2**63), 2**63 - 1)


def integers(items: list[int | None]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([item or 0 for item in items], np.int64), np.array([item is not None for item in items], np.bool_)


def texts(items: list[bytes | None]) -> Texts:
    ends = np.cumsum([len(item or b"") + 1 for item in items], dtype=np.int64)
    flat = bytearray(b"".join(b"|" + (item or b"") for item in items))
    starts = ends - np.array([len(item or b"") for item in items], np.int64)
    valid = np.array([item is not None for item in items], np.bool_)
    return Texts(np.frombuffer(flat, np.uint8), starts, ends, valid)


def plain(items: list[Any], known: dict[Any, int]) -> list[int]:
    return [0 if item is None else known.setdefault(item, len(known)) for item in items]


@given(st.lists(st.lists(st.none() | st.integers(-3, 3) | INT64, max_size=30), max_size=5))
@settings(deadline=None)
def test_integers_get_the_codes_of_a_plain_dict(batches: list[list[int | None]]):
    dictionary, known = IntegerDictionary(), dict[int, int]()
    for batch in batches:
        codes = dictionary.encode(*integers(batch))
        assert codes is not None and codes.tolist() == plain(batch, known)
    assert dictionary.values.tolist() == list(known)
    assert not dictionary.overflowed


@given(
    st.lists(st.lists(st.none() | st.sampled_from([b"", b"a", b"ab"]) | st.binary(max_size=9), max_size=30), max_size=5)
)
@settings(deadline=None)
def test_texts_get_the_codes_of_a_plain_dict(batches: list[list[bytes | None]]):
    dictionary, known = TextDictionary(), dict[bytes, int]()
    for batch in batches:
        codes = dictionary.encode(texts(batch))
        assert codes is not None and codes.tolist() == plain(batch, known)
    assert dictionary.values == list(known)


@given(st.lists(st.none() | st.integers(0, 12), max_size=40), st.integers(0, 12))
@settings(deadline=None)
def test_more_values_than_the_limit_overflow_for_ever(items: list[int | None], limit: int):
    is_small = len({item for item in items if item is not None}) <= limit
    words = [None if item is None else b"%d" % item for item in items]
    of_integers, of_texts = IntegerDictionary(limit), TextDictionary(limit)
    assert (of_integers.encode(*integers(items)) is not None) == is_small
    assert (of_texts.encode(texts(words)) is not None) == is_small
    assert of_integers.overflowed == of_texts.overflowed == (not is_small)
    if not is_small:
        assert of_integers.encode(*integers([None])) is None
        assert of_texts.encode(texts([None])) is None
        assert (of_integers.values.tolist(), of_texts.values) == ([], [])


def test_texts_longer_altogether_than_the_limit_overflow():
    dictionary = TextDictionary(limit_bytes=10)
    assert dictionary.encode(texts([b"12345", b"67890", b"12345", b""])) is not None
    assert dictionary.encode(texts([b"x"])) is None
    assert dictionary.overflowed


def test_a_full_dictionary_still_knows_every_value():
    numbers = np.random.default_rng(0).permutation(3000) * 65536
    dictionary = IntegerDictionary(limit=3000)
    valid = np.ones(3000, np.bool_)
    for _ in range(2):
        codes = dictionary.encode(numbers, valid)
        assert codes is not None and np.array_equal(codes, np.arange(3000))
    words = [b"NC_%06d.1" % number for number in range(3000)]
    of_texts = TextDictionary(limit=3000)
    for _ in range(2):
        codes = of_texts.encode(texts(words))
        assert codes is not None and np.array_equal(codes, np.arange(3000))
    assert of_texts.values == words
