"""Verdicts of people on the answers of a store, in its `verdicts.jsonl`, or given; and how well two judges agree.

A line is a verdict on one answer, which later lines replace; a line without one takes it back. Lines name the answer by
the id of its record and a hash of its text: a verdict is never taken for one on another answer.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millstream.core.console import plural, say
from millstream.core.lines import append_lines, read_lines
from millstream.core.remote import is_url
from millstream.errors import BadSetting, BadSource, RemoteError
from millstream.traces.rules import AMBIGUOUS, NONE, RIGHT, VERDICTS, WRONG, Verdicts
from millstream.traces.store.manifest import HUMAN_VERDICTS
from millstream.traces.store.traces import Traces

UNSURE = "unsure"
_GIVEN = "given_verdict"  # a field of records
CHOICES = (RIGHT, WRONG, UNSURE)
_CODES = {RIGHT: VERDICTS.index(RIGHT), WRONG: VERDICTS.index(WRONG), UNSURE: VERDICTS.index(AMBIGUOUS)}

Known = Mapping[tuple[str, str], str]  # id and hash of the answer -> verdict


def add_verdict(store: Path, record_id: str, answer: str | None, verdict: str | None) -> None:
    """Append the verdict of a person on an answer; None takes it back. It survives a power cut."""
    if verdict not in (None, *CHOICES):
        raise BadSetting(f"verdict={verdict}: must be one of {', '.join(CHOICES)}")
    if is_url(store):
        raise RemoteError(f"{store}: verdicts are appended to a file, and objects cannot grow. Copy the store first")
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    row = {"id": record_id, "verdict": verdict, "answer": answer_hash(answer), "time": when}
    append_lines(store / HUMAN_VERDICTS, [row])


def read_verdicts(store: Path) -> Known:
    """The last verdict on every answer that has one."""
    rows, num_damaged = read_lines(store / HUMAN_VERDICTS)
    if num_damaged:
        say(f"{store / HUMAN_VERDICTS}: {plural(num_damaged, 'damaged line')} ignored")
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        key = str(row.get("id")), str(row.get("answer"))
        if row.get("verdict") in CHOICES:
            found[key] = row["verdict"]
        else:
            found.pop(key, None)
    return found


def answer_hash(answer: str | None) -> str:
    return hashlib.sha256((answer or "").encode("utf-8", "surrogatepass")).hexdigest()[:16]


def codes_of(known: Known, ids: Sequence[str], answers: Iterator[str | None]) -> Verdicts:
    """The verdict of a person on each record, NONE without one; unsure is ambiguous."""
    if not known:
        return np.full(len(ids), NONE, np.int8)
    pairs = zip(ids, answers, strict=True)
    return np.array([_CODES.get(known.get((name, answer_hash(text)), ""), NONE) for name, text in pairs], np.int8)


def given_texts(traces: Traces) -> list[str | None]:
    """The verdicts that came with the answers, in the file that was extracted."""
    return traces.column(_GIVEN).to_pylist() if _GIVEN in traces.fields else []


def given_verdicts(traces: Traces) -> Verdicts:
    """Those verdicts as codes; BadSource if there are none."""
    if not any(given := given_texts(traces)):
        raise BadSource(f"{traces.path}: no answer came with a verdict. Extract answers that have a column verdict")
    return np.array([NONE if text is None else VERDICTS.index(text) for text in given], np.int8)


@dataclass(frozen=True)
class Agreement:
    """Of two judges, on the answers that both called right or wrong. `kappa` is Cohen's: 0 is chance, 1 perfect."""

    first: str
    second: str
    records: int
    agreement: float | None = None  # None without records
    kappa: float | None = None  # None if both gave all answers the same verdict

    def __str__(self) -> str:
        both = f"{self.first} and {self.second}"
        if self.agreement is None:
            return f"{both}: no answer that both call right or wrong"
        kappa = "" if self.kappa is None else f", Cohen's kappa {self.kappa:.2f}"
        return f"{both} agree on {self.agreement:.1%} of {plural(self.records, 'answer')}{kappa}"


def agreement_of(first: str, ours: Verdicts, second: str, theirs: Verdicts) -> Agreement:
    decided = [VERDICTS.index(RIGHT), VERDICTS.index(WRONG)]
    both = np.isin(ours, decided) & np.isin(theirs, decided)
    mine, yours = ours[both] == decided[0], theirs[both] == decided[0]
    if not mine.size:
        return Agreement(first, second, 0)
    same = float((mine == yours).mean())
    p, q = float(mine.mean()), float(yours.mean())
    by_chance = p * q + (1 - p) * (1 - q)
    kappa = None if by_chance == 1 else (same - by_chance) / (1 - by_chance)
    return Agreement(first, second, int(mine.size), same, kappa)
