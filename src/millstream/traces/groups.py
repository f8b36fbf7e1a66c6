"""Several answers to a question -> its row in `groups.parquet`: how far they agree, in words, meaning and states.

Sample 0 is the greedy answer, the others are drawn. Answers are in one cluster if they mean the same: by their words,
or by a model that tells whether one entails the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.console import Progress
from millstream.core.record import Tensor
from millstream.core.tables import publish_table, read_table
from millstream.errors import BadSource
from millstream.traces.kind import POSITIONS
from millstream.traces.rules import MAX_WORDS
from millstream.traces.scores import MIN_CHARACTERS, first_line, normalise_all, score
from millstream.traces.store.format import QUESTION_ID
from millstream.traces.store.manifest import GROUPS
from millstream.traces.store.traces import Traces

SAMPLE = "sample"
STATISTICS = ("agreement", "num_clusters", "semantic_entropy", "self_check", "eigenscore")
_SCHEMA = pa.schema(
    [
        (QUESTION_ID, pa.string()),
        ("samples", pa.int32()),  # drawn answers that have a text
        ("sample_tokens", pa.int64()),  # that they cost
        ("agreement", pa.float64()),  # share of them in the cluster of the greedy answer
        ("num_clusters", pa.int32()),
        ("semantic_entropy", pa.float64()),  # of the sizes of their clusters, in nats
        ("self_check", pa.float64()),  # mean F1 of the words of the greedy answer and each of them
        ("eigenscore", pa.float64()),
    ]
)
_WINDOW = 512  # questions at a time
_JITTER = 1e-3  # EigenScore: added to the diagonal of the covariance, as in INSIDE
_VERSION = 1

Pair = tuple[str, str, str]  # a question and two answers to it
Same = Callable[[Sequence[Pair]], Sequence[bool]]


def same_words(pairs: Sequence[Pair]) -> list[bool]:
    """Whether one normalised answer contains the other as whole words; one of more than 12 words may deny it."""

    def contains(long: str, short: str) -> bool:
        is_name = len(short) >= MIN_CHARACTERS or " " in short
        return is_name and len(long.split()) <= MAX_WORDS and f" {short} " in f" {long} "

    return [contains(one, other) or contains(other, one) for _, one, other in pairs]


def clusters_of(questions: Sequence[str], answers: Sequence[Sequence[str]], same: Same) -> list[list[int]]:
    """The cluster of each answer to each question: the first whose first answer means the same, else a new one."""
    found = [dict.fromkeys(texts, -1) for texts in answers]  # of each distinct answer
    rest = [list(one) for one in found]
    turn = 0
    while any(rest):
        pairs: list[tuple[int, str]] = []
        for place, texts in enumerate(rest):
            if texts:
                found[place][texts[0]] = turn
                pairs += [(place, other) for other in texts[1:]]
        firsts = [texts[0] if texts else "" for texts in rest]
        verdicts: Sequence[bool] = (
            same([(questions[place], firsts[place], other) for place, other in pairs]) if pairs else []
        )
        rest = [list[str]() for _ in rest]
        for (place, other), is_same in zip(pairs, verdicts, strict=True):
            if is_same:
                found[place][other] = turn
            else:
                rest[place].append(other)
        turn += 1
    return [[found[place][text] for text in texts] for place, texts in enumerate(answers)]


@dataclass(frozen=True)
class _Question:
    """The records that answer a question: the greedy one, and those drawn."""

    id: str
    text: str
    greedy: int | None
    drawn: Sequence[int]


def write_groups(traces: Traces, answer: str, is_usable: NDArray[np.bool_], nli: str | None, progress: Progress) -> str:
    """Write the `groups.parquet` of a store with samples, unless it is up to date. Returns what was done."""
    if SAMPLE not in traces.fields or QUESTION_ID not in traces.fields:
        return ""
    questions = _questions(traces, is_usable)
    if not any(question.drawn for question in questions):
        return ""
    if nli is None:
        same, method = same_words, "words"
    else:
        from millstream.traces.nli import Entailment

        model = Entailment(nli)
        same, method = model.same, f"nli:{model.name}"
    about = {"clusters": f"{method}-{_VERSION}", "store_fingerprint": traces.fingerprint}
    about = {f"millstream.{key}": value for key, value in about.items()}
    file = traces.path / GROUPS
    if not _is_current(file, about):
        rows: list[dict[str, object]] = []
        column = traces.column(answer)
        has_lengths = "answer_len" in traces.fields
        lengths = traces.column("answer_len").to_pylist() if has_lengths else [None] * len(traces)
        for start in range(0, len(questions), _WINDOW):
            window = questions[start : start + _WINDOW]
            numbers = [n for one in window for n in (*([] if one.greedy is None else [one.greedy]), *one.drawn)]
            texts = dict(zip(numbers, column.take(pa.array(numbers, pa.int64())).to_pylist(), strict=True))
            rows += _rows(window, texts, same, by_words=nli is None)
            for row, question in zip(rows[-len(window) :], window, strict=True):
                known = [lengths[number] for number in question.drawn]
                row["sample_tokens"] = None if None in known else sum(cast("list[int]", known))
                row["eigenscore"] = eigenscore(_states(traces, question.drawn))
            progress(len(rows), "questions grouped")
        columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in _SCHEMA]
        publish_table(file, pa.Table.from_arrays(columns, schema=_SCHEMA.with_metadata(about)))
    drawn = [len(question.drawn) for question in questions if question.drawn]
    return f"{file}: {len(drawn):,} questions with {np.mean(drawn):.3g} samples each, clustered by {method}"


def read_groups(labels: Path | None) -> pa.Table | None:
    """The groups beside a file of labels; None if there are none."""
    file = None if labels is None else labels.with_name(GROUPS)
    if file is None or not file.exists():
        return None
    try:
        return read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{file}: damaged ({error}). Write it again: millstream label {file.parent}") from None


def statistics_in(table: pa.Table | None) -> list[str]:
    """The statistics that at least one question has."""
    if table is None:
        return []
    return [name for name in STATISTICS if table.column(name).null_count < table.num_rows]


def semantic_entropy(clusters: Iterable[int]) -> float:
    """The entropy, in nats, of the shares of the clusters."""
    _, counts = np.unique(np.fromiter(clusters, np.int64), return_counts=True)
    shares = counts / counts.sum()
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def eigenscore(states_KD: NDArray[np.float64] | None) -> float | None:
    """INSIDE: the mean log eigenvalue of the covariance between answers, each centred over its dimensions."""
    if states_KD is None or len(states_KD) < 2:
        return None
    covariance = np.atleast_2d(np.cov(states_KD)) + _JITTER * np.eye(len(states_KD))
    return float(np.log(np.linalg.eigvalsh(covariance)).mean())


def _is_current(file: Path, about: Mapping[str, str]) -> bool:
    try:
        known = read_table(file).schema.metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return all(known.get(key.encode()) == value.encode() for key, value in about.items())


def _questions(traces: Traces, is_usable: NDArray[np.bool_]) -> list[_Question]:
    ids, samples = (traces.column(name).to_pylist() for name in (QUESTION_ID, SAMPLE))
    texts = traces.column("question").to_pylist() if "question" in traces.fields else [""] * len(ids)
    groups: dict[str, list[int]] = {str(name): [] for name in ids}
    for number in np.flatnonzero(is_usable).tolist():
        groups[str(ids[number])].append(number)
    found: list[_Question] = []
    for name, numbers in groups.items():
        numbers.sort(key=lambda number: samples[number] or 0)
        greedy = next((number for number in numbers if not samples[number]), None)
        drawn = [number for number in numbers if samples[number]]
        text = next((str(texts[number]) for number in numbers if texts[number]), "")
        found.append(_Question(name, text, greedy, drawn))
    return found


def _rows(
    window: Sequence[_Question], texts: Mapping[int, str | None], same: Same, *, by_words: bool
) -> list[dict[str, object]]:
    """The statistics of the texts of some questions."""
    whole = {number: first_line(text) if by_words else (text or "").strip() for number, text in texts.items()}
    normal = dict(zip(whole, normalise_all(list(whole.values())), strict=True))
    shown = normal if by_words else whole
    members = [[*([] if one.greedy is None else [one.greedy]), *one.drawn] for one in window]
    members = [[number for number in numbers if texts[number]] for numbers in members]
    clusters = clusters_of([one.text for one in window], [[shown[n] for n in numbers] for numbers in members], same)
    rows: list[dict[str, object]] = []
    pairs: list[tuple[int, str, str]] = []  # a row, its greedy answer and a drawn one
    for question, numbers, found in zip(window, members, clusters, strict=True):
        of = dict(zip(numbers, found, strict=True))
        drawn = [number for number in question.drawn if number in of]
        row: dict[str, object] = {QUESTION_ID: question.id, "samples": len(drawn)}
        if drawn:
            row["num_clusters"] = len({of[number] for number in drawn})
            row["semantic_entropy"] = semantic_entropy(of[number] for number in drawn)
        if drawn and question.greedy in of:
            row["agreement"] = sum(of[number] == of[question.greedy] for number in drawn) / len(drawn)
            pairs += [(len(rows), whole[question.greedy], whole[number]) for number in drawn]
        rows.append(row)
    f1 = score([greedy for _, greedy, _ in pairs], [[other] for _, _, other in pairs]).f1 if pairs else np.zeros(0)
    places = np.array([place for place, _, _ in pairs], np.int64)
    sums, counts = np.bincount(places, f1, len(rows)), np.bincount(places, minlength=len(rows))
    for row, total, count in zip(rows, sums.tolist(), counts.tolist(), strict=True):
        row["self_check"] = total / count if count else None
    return rows


def _states(traces: Traces, numbers: Sequence[int]) -> NDArray[np.float64] | None:
    """[K, D]: the states of the last tokens of answers in the middle layer, of those that have them."""
    name = next((name for name in ("states", "hidden") if isinstance(traces.fields.get(name), Tensor)), None)
    places = [] if name is None else [place for n in numbers if (place := traces.row(n).tensors[name]) is not None]
    if name is None or not places:
        return None
    num_layers, *_, dim = places[0].shape
    fetched = traces.fetch(numbers, [f"{name}[{num_layers // 2}]"])[name]
    lasts = [POSITIONS.index("last_answer")] * len(numbers)
    if name == "hidden":  # of every token
        lengths = traces.fetch(numbers, ["prompt_len", "answer_len"])
        pairs = zip(lengths["prompt_len"], lengths["answer_len"], strict=True)
        lasts = [int(cast(int, prompt)) + max(int(cast(int, answer)), 1) - 1 for prompt, answer in pairs]
    pairs = zip(fetched, lasts, strict=True)
    found = [np.asarray(one, np.float64).reshape(-1, dim)[last] for one, last in pairs if one is not None]
    return np.stack(found) if found else None
