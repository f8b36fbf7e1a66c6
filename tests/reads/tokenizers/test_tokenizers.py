"""Bases, k-mers and the names of tokenizers, against a slow Python loop."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BadSetting, BadSource
from millstream.reads.tokenizers import Tokens, base, kmer, tokenizer
from support.batches import pack, random_reads

IUPAC = "ACGTUNRYSWKMBDHV"
reads_of = st.lists(st.text(alphabet="ACGT" * 8 + IUPAC + IUPAC.lower(), max_size=30), max_size=6)


def rows(tokens: Tokens) -> list[list[int]]:
    """The tokens without padding, which is checked."""
    ids, mask = tokens
    assert ids.dtype == mask.dtype and ids.shape == mask.shape
    assert (np.diff(mask, axis=1) <= 0).all() and set(np.unique(mask)) <= {0, 1}
    assert (ids[mask == 0] == 0).all()
    return [row[keep == 1].tolist() for row, keep in zip(ids, mask, strict=True)]


def slow_kmers(read: str, k: int, stride: int, canonical: bool) -> list[int]:
    read = read.upper().replace("U", "T")
    ids: list[int] = []
    for start in range(0, len(read) - k + 1, stride):
        word = read[start : start + k]
        if set(word) <= set("ACGT"):
            reverse = word[::-1].translate(str.maketrans("ACGT", "TGCA"))
            numbers = [int(text.translate(str.maketrans("ACGT", "0123")), 4) for text in (word, reverse)]
            ids.append(1 + (min(numbers) if canonical else numbers[0]))
        else:
            ids.append(4**k + 1)
    return ids


# -- bases


def test_a_base_is_a_token_and_neither_case_nor_u_matters():
    tokens = base().tokenize(*pack(["ACGTN", "acgun", "RYk", ""]))
    assert rows(tokens) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 5, 5], []]
    assert base().vocab_size == 6 and base().pad_id == 0


@pytest.mark.parametrize("maker", [base(), kmer(3), kmer(3, stride=2), kmer(2, canonical=True)])
def test_protein_is_refused_with_its_foreign_bytes(maker: Any):
    with pytest.raises(BadSource, match=r"read 1 .*'E' 'l'"):
        maker.tokenize(*pack(["ACGT", "MEKlNA"]))
    with pytest.raises(BadSource, match=r"'\\xff'"):
        maker.tokenize(*pack(["ACG\xffACGT"]))


# -- k-mers


@given(reads_of, st.integers(1, 9), st.integers(1, 4), st.booleans(), st.sampled_from([np.int32, np.int64]))
def test_k_mers_match_a_slow_loop(reads: list[str], k: int, stride: int, canonical: bool, dtype: Any):
    tokens = kmer(k, stride=stride, canonical=canonical).tokenize(*pack(reads), dtype=dtype)
    assert tokens.input_ids.dtype == dtype
    assert rows(tokens) == [slow_kmers(read, k, stride, canonical) for read in reads]


@given(reads_of, st.integers(1, 12), st.sampled_from(["longest", "max_length"]))
def test_long_rows_are_truncated_and_short_ones_padded(reads: list[str], max_length: int, pad: Any):
    tokens = kmer(4).tokenize(*pack(reads), max_length=max_length, pad=pad)
    expected = [slow_kmers(read, 4, 1, False)[:max_length] for read in reads]
    assert rows(tokens) == expected
    assert tokens.input_ids.shape[1] == (max_length if pad == "max_length" else max(map(len, expected), default=0))


@pytest.mark.parametrize("canonical", [False, True])
def test_the_largest_k_fits_each_dtype(canonical: bool):
    reads = ["T" * 33, "ACGT" * 9, "N" * 32]
    for k, dtype in ((15, np.int32), (31, np.int64)):
        tokens = kmer(k, canonical=canonical).tokenize(*pack(reads), dtype=dtype)
        assert rows(tokens) == [slow_kmers(read, k, 1, canonical) for read in reads]
        assert tokens.input_ids.max() < kmer(k).vocab_size <= np.iinfo(dtype).max
    with pytest.raises(ValueError, match=r"kmer\(16\): .*15.*np\.int64"):
        kmer(16).tokenize(*pack(reads))
    with pytest.raises(ValueError, match="k=32"):
        kmer(32)


def test_a_kmer_and_its_reverse_complement_are_one_canonical_token():
    forward, backward = rows(kmer(5, canonical=True).tokenize(*pack(["ACGGTCATTG", "CAATGACCGT"])))
    assert forward == backward[::-1]


def test_reads_shorter_than_k_and_empty_batches_give_no_tokens():
    assert kmer(6).tokenize(*pack(["ACGTA", "", "A"])).input_ids.shape == (3, 0)
    assert kmer(6).tokenize(*pack([])).input_ids.shape == (0, 0)
    assert kmer(6).tokenize(*pack([]), max_length=4, pad="max_length").input_ids.shape == (0, 4)


def test_offsets_may_start_in_the_middle_of_a_larger_batch():
    flat, offsets = pack(random_reads(5, length=20, seed=0))
    whole = kmer(4).tokenize(flat, offsets).input_ids
    assert (kmer(4).tokenize(flat, offsets[2:5]).input_ids == whole[2:4]).all()


def test_threads_can_share_a_tokenizer():
    batches = [pack(random_reads(50, length=60, seed=seed)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(lambda batch: kmer(6).tokenize(*batch), batches))
    for batch, tokens in zip(batches, shared, strict=True):
        assert (kmer(6).tokenize(*batch).input_ids == tokens.input_ids).all()


# -- names


@pytest.mark.parametrize("name", ["base", "kmer(6)", "kmer(12, stride=2, canonical=True)", "kmer(1, stride=3)"])
def test_a_tokenizer_can_be_made_from_its_name(name: str):
    assert tokenizer(name).name == name
    assert pickle.loads(pickle.dumps(tokenizer(name))) == tokenizer(name)


def test_names_may_have_spaces_and_keywords():
    assert tokenizer(" kmer( k=6 ,stride = 2) ") == kmer(6, stride=2)
    assert tokenizer(" base ") == base()


@pytest.mark.parametrize(
    "spec",
    ["", "bases", "kmer", "kmer()", "kmer(0)", "kmer('6')", "kmer(True)", "kmer(6, step=2)", "kmer(6, 2)", "kmer(6"],
)
def test_an_unknown_name_is_refused(spec: str):
    with pytest.raises(BadSetting, match=re.escape(repr(spec))):
        tokenizer(spec)


@pytest.mark.parametrize(
    "spec",
    ["kmer(6,canonical)", "kmer(---1)"],
)
def test_an_argument_that_is_not_a_number_is_refused_without_showing_the_parser(spec: str):
    with pytest.raises(BadSetting, match=re.escape(repr(spec))) as caught:
        tokenizer(spec)
    assert "object at" not in str(caught.value)


@pytest.mark.parametrize("spec", ["kmer(*[6])", "kmer(**{'k': 6})", "kmer(k=__import__('os').getpid())", "os.kmer(6)"])
def test_a_name_is_never_evaluated_as_code(spec: str):
    with pytest.raises(ValueError, match=re.escape(repr(spec))):
        tokenizer(spec)


def test_invalid_lengths_are_refused():
    with pytest.raises(ValueError, match="max_length=0"):
        base().tokenize(*pack(["A"]), max_length=0)
    with pytest.raises(ValueError, match="max_length"):
        base().tokenize(*pack(["A"]), pad="max_length")
