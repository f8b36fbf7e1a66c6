"""The rules that judge answers: what each makes of the scores of an answer, by name and version."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import check_settings, config_hash
from millstream.errors import BadSetting
from millstream.traces.kind import LabelSettings, check_positive
from millstream.traces.scores import REFUSALS, Bools
from millstream.traces.spans import SPANS

RIGHT, WRONG, AMBIGUOUS, REFUSED = "right", "wrong", "ambiguous", "refused"
JUDGE, GIVEN = "judge", "given"
VERDICTS = (RIGHT, WRONG, AMBIGUOUS, REFUSED)
NONE = -1

MAX_WORDS = 12  # a longer answer may contain an alias only to deny it
MIN_SCORE = 0.5  # of the `scores` rule, when no threshold is given
_VERSION = 2  # of the rules: increase it when one of them decides differently

Verdicts = NDArray[np.int8]  # positions in VERDICTS, or NONE


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`default`, `em`, `spans`, `given`, `judge`, `f1`, `rougeL` or `scores`; the last three have a threshold.

    With `positive="wrong"`, scores are wrong at or above it. `judge` is the name of the model that judges, and
    `prompt` what it is asked.
    """

    name: str
    threshold: float | None = None
    positive: str = RIGHT
    judge: str | None = None
    prompt: str | None = None

    def __str__(self) -> str:
        if self.name == JUDGE:
            return f"{self.name}:{self.judge}"
        text = self.name if self.threshold is None else f"{self.name}@{self.threshold}"
        return text if self.positive == RIGHT else f"{text}:{self.positive}"

    @property
    def meaning(self) -> str:
        """What makes an answer right, in one line."""
        if self.name == "default":
            right = f"equals a correct answer, or contains one in at most {MAX_WORDS} words"
            return f"right: {right}; ambiguous: contains one in more words; refused: declines; wrong: all others"
        if self.name == SPANS:
            return "wrong: has hallucinated spans; right: was annotated and has none"
        if self.name == GIVEN:
            return "the verdicts that came with the answers"
        if self.name == JUDGE:
            return "right: the model says CORRECT; wrong: INCORRECT; ambiguous: UNSURE; refused: declines"
        what = {"em": "equals a correct answer", "f1": "F1 of the words", "rougeL": "ROUGE-L"}.get(self.name, "score")
        limit = "" if self.threshold is None else f" of at least {self.threshold:g}"
        return f"{self.positive}: {what}{limit}; {WRONG if self.positive == RIGHT else RIGHT}: all others"

    @property
    def version(self) -> str:
        """`default-2-5c0f3a12`: changes whenever the same answer may get a different verdict."""
        definition = {"version": _VERSION, "rule": str(self), "words": MAX_WORDS, "refusals": REFUSALS}
        definition |= {"prompt": self.prompt} if self.prompt else {}
        return f"{self}-{_VERSION}-{config_hash(definition)[:8]}"


def rule_of(settings: LabelSettings) -> Rule:
    """The rule that the settings describe; BadSetting if they contradict each other."""
    check_settings(settings)
    rule = parse_rule(settings.rule, threshold=settings.threshold)
    check_positive(settings.positive)
    if settings.positive is not None and rule.name != "scores":
        raise BadSetting(f"positive={settings.positive}: only rule=scores takes it, not rule={settings.rule}")
    if rule.name == "scores" and settings.scores is None:
        raise BadSetting("rule=scores needs a scores file, as in scores=ground_truth_scores.csv")
    if settings.scores is not None and rule.name != "scores":
        raise BadSetting(f"scores={settings.scores}: only rule=scores uses a scores file, not rule={settings.rule}")
    if settings.column is not None and settings.scores is None:
        raise BadSetting(f"column={settings.column} is a column of a scores file: give rule=scores scores=FILE")
    if settings.spans is not None and rule.name != SPANS:
        raise BadSetting(f"spans={settings.spans}: only rule=spans uses a file of spans, not rule={settings.rule}")
    for name in ("endpoint", "model", "key_env"):
        if (value := getattr(settings, name)) is not None and rule.name != JUDGE:
            raise BadSetting(f"{name}={value}: only rule=judge uses a model, not rule={settings.rule}")
    if rule.name == JUDGE and settings.endpoint is None and settings.model is None:
        raise BadSetting("rule=judge needs a model: endpoint=http://127.0.0.1:8000/v1, or model=FOLDER")
    if settings.key_env is not None and settings.endpoint is None:
        raise BadSetting(f"key_env={settings.key_env}: belongs to an endpoint: also give endpoint=URL")
    if settings.references is not None and rule.name in ("scores", SPANS, GIVEN):
        raise BadSetting(f"references={settings.references}: rule={rule.name} compares no answers")
    if settings.columns is not None and settings.references is None:
        raise BadSetting(f"columns={settings.columns}: names columns of a references file: also give references=FILE")
    return replace(rule, positive=settings.positive or RIGHT)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What verdicts are based on. Without an answer or a reference the rest is undefined; NaN is no score."""

    has_answer: Bools
    has_reference: Bools
    em: Bools
    f1: NDArray[np.float32]
    rouge_l: NDArray[np.float32]
    contains: Bools
    refused: Bools
    num_tokens: NDArray[np.float64]
    score: NDArray[np.float64]  # of the rule spans: the number of spans
    judged: Verdicts | None = None  # by a model, or given with the answers


def parse_rule(text: str, *, threshold: float | None = None) -> Rule:
    """The rule of this name: `default`, `em`, `f1@0.5`, `scores` and so on; `threshold` belongs to `scores`."""
    name, at, number = text.partition("@")
    if threshold is not None and text != "scores":
        raise BadSetting(f"threshold={threshold:g}: only rule=scores takes a threshold, not rule={text}")
    if text in ("default", "em", SPANS, GIVEN, JUDGE):
        return Rule(name=text)
    if text == "scores":
        limit = MIN_SCORE if threshold is None else threshold
        return Rule(name=text, threshold=limit)
    if name in ("f1", "rougeL") and at:
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not 0 < limit <= 1:
            raise BadSetting(f"rule={text}: the threshold must be above 0 and at most 1, as in {name}@0.5")
        return Rule(name=name, threshold=limit)
    raise BadSetting(
        f"rule={text}: must be one of default, em, f1@0.5, rougeL@0.3 (or other numbers), spans, given, scores, judge"
    )


def decide(rule: Rule, known: Evidence) -> Verdicts:
    """The verdict on every answer; none where the answer, the reference or the score it needs is missing."""
    right, wrong, ambiguous, refused = range(len(VERDICTS))
    if rule.name == "scores":
        above, below = (right, wrong) if rule.positive == RIGHT else (wrong, right)
        verdicts = np.where(known.score < np.float64(rule.threshold or 0), below, above)
        return np.where(known.has_answer & ~np.isnan(known.score), verdicts, NONE).astype(np.int8)
    if rule.name == SPANS:
        verdicts = np.where(known.score > 0, wrong, right)
        return np.where(known.has_answer & ~np.isnan(known.score), verdicts, NONE).astype(np.int8)
    if rule.name == GIVEN:
        assert known.judged is not None
        return np.where(known.has_answer, known.judged, NONE).astype(np.int8)
    if rule.name == JUDGE:
        assert known.judged is not None
        verdicts = np.where(known.refused & ~known.em, refused, known.judged)
    elif rule.name == "default":
        is_short = known.num_tokens <= MAX_WORDS
        # "Unknown" may be the correct answer, so an exact match comes before a refusal; all else comes after it.
        # F1 decides nothing: of 16 answers with F1 >= 0.5 and no alias, 12 were wrong, 1 right (SmolLM2, docs/results).
        cases = [known.em, known.refused, known.contains & is_short, known.contains]
        verdicts = np.select(cases, [right, refused, right, ambiguous], wrong)
    elif rule.name == "em":
        verdicts = np.where(known.em, right, wrong)
    else:
        # In single precision on both sides: 7/10 is not below a threshold of 0.7.
        reached = (known.f1 if rule.name == "f1" else known.rouge_l) >= np.float32(rule.threshold or 0)
        verdicts = np.where(reached, right, wrong)
    return np.where(known.has_answer & known.has_reference, verdicts, NONE).astype(np.int8)
