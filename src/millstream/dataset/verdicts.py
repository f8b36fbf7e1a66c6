"""Scores -> verdicts under a named rule. What is not known is given none."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millstream.config import config_hash
from millstream.errors import BadSetting
from millstream.source.llm.answers import REFUSALS

RIGHT, WRONG, AMBIGUOUS, REFUSED = "right", "wrong", "ambiguous", "refused"
VERDICTS = (RIGHT, WRONG, AMBIGUOUS, REFUSED)
NONE = -1

MAX_WORDS = 12  # an alias somewhere in a longer answer may be there to be denied
MIN_F1 = 0.5
MIN_SCORE = 0.5  # of the `scores` rule, when no threshold is given
_VERSION = 1  # of what the rules do: count it up when any of them decides otherwise

Verdicts = NDArray[np.int8]
"""Places in VERDICTS, -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`default`, `em`, `f1`, `rougeL` or `scores`; the last three say right from a threshold on."""

    name: str
    threshold: float | None = None

    def __str__(self) -> str:
        return self.name if self.threshold is None else f"{self.name}@{self.threshold}"

    @property
    def version(self) -> str:
        """`default-1-5c0f3a12`: changes whenever the same answer may get another verdict."""
        definition = {"version": _VERSION, "rule": str(self), "words": MAX_WORDS, "f1": MIN_F1, "refusals": REFUSALS}
        return f"{self}-{_VERSION}-{config_hash(definition)[:8]}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of each answer. Without an answer or a truth (an alias) the rest means nothing; NaN is no score."""

    has_answer: NDArray[np.bool_]
    has_truth: NDArray[np.bool_]
    em: NDArray[np.bool_]
    f1: NDArray[np.float32]
    rouge_l: NDArray[np.float32]
    contains: NDArray[np.bool_]
    refused: NDArray[np.bool_]
    num_tokens: NDArray[np.float64]
    score: NDArray[np.float64]


def parse_rule(text: str, *, threshold: float | None = None) -> Rule:
    """The rule that `default`, `em`, `f1@0.5`, `rougeL@0.3` or `scores` names; `threshold` belongs to `scores`."""
    name, at, number = text.partition("@")
    if threshold is not None and text != "scores":
        raise BadSetting(f"threshold={threshold:g} is for rule=scores; with rule={text} it would change nothing")
    if text in ("default", "em"):
        return Rule(name=text)
    if text == "scores":
        limit = MIN_SCORE if threshold is None else threshold
        if not math.isfinite(limit):
            raise BadSetting(f"threshold={limit}: it is a number that scores are compared with")
        return Rule(name=text, threshold=limit)
    if name in ("f1", "rougeL") and at:
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not 0 < limit <= 1:
            raise BadSetting(f"rule={text}: the threshold is above 0 and at most 1, as in {name}@0.5")
        return Rule(name=name, threshold=limit)
    raise BadSetting(f"rule={text}: there is default, em, f1@0.5 and rougeL@0.3 (or any other number), and scores")


def decide(rule: Rule, known: Evidence) -> Verdicts:
    """The verdict on every answer; none where the answer, the truth or the score it needs is missing."""
    right, wrong, ambiguous, refused = range(len(VERDICTS))
    if rule.name == "scores":
        verdicts = np.where(known.score < np.float64(rule.threshold or 0), wrong, right)
        return np.where(known.has_answer & ~np.isnan(known.score), verdicts, NONE).astype(np.int8)
    if rule.name == "default":
        is_short = known.num_tokens <= MAX_WORDS
        # "Unknown" may be the answer that was asked for, so a match comes before a refusal; all else comes after it.
        cases = [known.em, known.refused, known.contains & is_short, known.contains | (known.f1 >= MIN_F1)]
        verdicts = np.select(cases, [right, refused, right, ambiguous], wrong)
    elif rule.name == "em":
        verdicts = np.where(known.em, right, wrong)
    else:
        # In single precision on both sides: 7/10 is not below the 0.7 that someone wrote.
        reached = (known.f1 if rule.name == "f1" else known.rouge_l) >= np.float32(rule.threshold or 0)
        verdicts = np.where(reached, right, wrong)
    return np.where(known.has_answer & known.has_truth, verdicts, NONE).astype(np.int8)
