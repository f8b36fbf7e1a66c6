"""Scores of many answers at once are those that a plain program gives one by one."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.traces.scores import MAX_BITS, Scores, normalise, score
from support.effort import num_examples

DATA = Path(os.environ.get("MILLSTREAM_DATA", "")) / "triviaqa"


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, from its definition."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else max(table[i - 1][j], table[i][j - 1])
    return table[-1][-1]


def f_measure(same: int, said: Sequence[str], true: Sequence[str]) -> float:
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(true)
    return 2 * precision * recall / (precision + recall)


def plain_score(answer: str, aliases: Sequence[str | None]) -> dict[str, object]:
    """One answer, as the official script and the definitions have it."""
    said = normalise(answer).split()
    truths = [(place, normalise(alias)) for place, alias in enumerate(aliases) if alias]
    f1 = [f_measure(sum((Counter(said) & Counter(true.split())).values()), said, true.split()) for _, true in truths]
    best = max(f1, default=0.0)
    return {
        "em": any(normalise(answer) == true for _, true in truths),
        "f1": best,
        "rouge_l": max((f_measure(common(said, t.split()), said, t.split()) for _, t in truths), default=0.0),
        "contains": any(len(true) >= 2 and f" {true} " in f" {' '.join(said)} " for _, true in truths),
        "num_tokens": len(said),
        "num_aliases": len(truths),
        # Equal fractions may differ in their last digit, depending on how they were come by.
        "best": truths[next(i for i, value in enumerate(f1) if abs(value - best) < 1e-12)][0] if best else -1,
    }


def assert_plain(found: Scores, answers: Sequence[str], aliases: Sequence[Sequence[str | None]]) -> None:
    expected = [plain_score(answer, some) for answer, some in zip(answers, aliases, strict=True)]
    for name in ("em", "contains", "num_tokens", "num_aliases", "best"):
        assert getattr(found, name).tolist() == [row[name] for row in expected], name
    for name in ("f1", "rouge_l"):
        values = getattr(found, name)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, [row[name] for row in expected], atol=1e-6, err_msg=name)


WORDS = st.lists(st.sampled_from(["x", "y", "xy", "é", "拳", "The", "a", "z-z", "", "1"]), max_size=7).map(" ".join)
ROWS = st.lists(st.tuples(WORDS, st.lists(WORDS | st.none(), max_size=5)), max_size=8)


@settings(max_examples=num_examples(200))
@given(ROWS)
def test_scores_are_those_of_a_plain_program(rows: list[tuple[str, list[str | None]]]):
    answers, aliases = [answer for answer, _ in rows], [some for _, some in rows]
    assert_plain(score(answers, pa.array(aliases, pa.list_(pa.string()))), answers, aliases)


@given(st.integers(0, 2**32))
def test_answers_longer_than_a_machine_word_are_scored_alike(seed: int):
    rng = np.random.default_rng(seed)
    lengths = [3, MAX_BITS - 1, MAX_BITS, MAX_BITS + 1, 200]
    answers = [" ".join(rng.choice(list("wxyz"), length)) for length in lengths]
    aliases = [[" ".join(rng.choice(list("vwxyz"), size)) for size in (1, 2, 4, 70)] + [answer] for answer in answers]
    aliases[-1].pop()
    assert_plain(score(answers, aliases), answers, aliases)


CASES = {
    "the answer as it is": ("Paris", ["London", "paris!"], True, 1.0, 1.0, True, 1),
    "an alias at the ends of words": ("It is New York City", ["York City"], False, 2 * 2 / 7, 2 * 2 / 7, True, 0),
    "not inside of a word": ("Parisian", ["Paris"], False, 0.0, 0.0, False, -1),
    "a single letter is not looked for": ("vitamin C", ["C"], False, 2 / 3, 2 / 3, False, 0),
    "but may be the whole answer": ("C", ["C"], True, 1.0, 1.0, False, 0),
    "another order": ("Smith John", ["John Smith"], False, 1.0, 0.5, False, 0),
    "a word counts as often as both have it": ("x1 x1 x1", ["x1 y1"], False, 0.4, 0.4, False, 0),
    "nothing equals nothing": ("The", ["A"], True, 0.0, 0.0, False, -1),
    "nothing is in nothing": ("Paris", ["The"], False, 0.0, 0.0, False, -1),
    "no aliases": ("Paris", [], False, 0.0, 0.0, False, -1),
    "the first of equals is the best": ("red dwarf", ["blue", "red", "dwarf"], False, 2 / 3, 2 / 3, True, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_score_is(case: str):
    answer, aliases, em, f1, rouge_l, contains, best = CASES[case]
    found = score([answer], [aliases])
    assert (bool(found.em[0]), bool(found.contains[0]), int(found.best[0])) == (em, contains, best)
    assert (float(found.f1[0]), float(found.rouge_l[0])) == pytest.approx((f1, rouge_l))


def test_slices_and_nulls_of_arrow_arrays_are_read_as_they_look():
    answers = pa.array(["no", "paris", None, "rome", "x"]).slice(1, 3)
    aliases = pa.array([["no"], ["q", "Paris", None, ""], ["a"], None, ["x"]]).slice(1, 3)
    found = score(answers, aliases)
    assert found.em.tolist() == [True, True, False]  # a text that is missing is as empty as "a": a label is for others
    assert found.best.tolist() == [1, -1, -1]
    assert found.num_aliases.tolist() == [2, 1, 0]


def test_no_answers_have_no_scores():
    assert score([], []).f1.shape == (0,)


@pytest.mark.skipif(not DATA.is_dir(), reason="MILLSTREAM_DATA names no folder with triviaqa in it")
def test_real_questions_are_scored_as_by_the_plain_program():
    rows = [json.loads(line) for line in (DATA / "dev.jsonl").read_text().splitlines()[:1500]]
    aliases = [row["aliases"] for row in rows]
    said = [some[i % len(some)] if i % 3 else f"{aliases[i - 1][0]}, {some[-1]}" for i, some in enumerate(aliases)]
    found = score(said, aliases)
    assert_plain(found, said, aliases)
    assert 0.6 < found.em.mean() < 0.7
