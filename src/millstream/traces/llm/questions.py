"""Question sets -> questions: files in the known layouts, a Hugging Face name, or a built-in set."""

import json
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from millstream.core.hf_datasets import is_datasets_folder
from millstream.core.registry import extensions
from millstream.core.remote import to_path
from millstream.core.rows import SUFFIXES, Row, read_rows
from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.traces.llm import cells
from millstream.traces.llm.layouts import COLUMNS, SEMICOLONS, expanded
from millstream.traces.scores import normalise

T = TypeVar("T")
_TEXTS = ("question", "prompt", "messages", "prompt_token_ids")  # one of them is needed


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of an answer from `start` to before `end`, and what is wrong with them."""

    start: int
    end: int
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """An answer to replay: its text or token ids, and what is known of the run that generated it."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None  # of `ids`
    finish: str | None = None  # why it ended


@dataclass(frozen=True, slots=True)
class Question:
    """`aliases` are all accepted answers, the main one (`answer`) first; both may be missing."""

    id: str
    question: str  # empty if the prompt is given as token ids only
    answer: str | None = None
    aliases: tuple[str, ...] = ()
    kind: str | None = None  # a relation or category
    exposure: str | None = None  # how well known the fact is: often .. never, popular, obscure
    index: int | None = field(default=None, compare=False)  # its row in the question set, repeated rows included
    context: str | None = None  # what the answer is to be based on
    prompt: str | None = None  # all of the prompt, used as it is
    messages: tuple[Mapping[str, str], ...] | None = None  # of a chat, for the chat template of the model
    given: Given | None = None  # an answer to replay
    sample: int = 0  # of several answers
    spans: tuple[Span, ...] | None = None  # of the given answer; none of them: nothing is wrong with it
    verdict: str | None = None  # right, wrong, ambiguous or refused: what the file says of the given answer
    about: str | None = None  # what else the file says of it, as JSON text: the model, the split

    @property
    def record_id(self) -> str:
        """The id of the trace of this answer: `q1` for the first, `q1#3` for sample 3."""
        return self.id if self.sample == 0 else f"{self.id}#{self.sample}"


@dataclass(frozen=True)
class QuestionSet:
    """Distinct questions, those of one id together, and how many were left out as their id or text is a repeat."""

    questions: list[Question]
    same_id: int
    same_text: int


def read_questions(
    source: str | Path | Sequence[Question | Row],
    *,
    columns: str | None = None,
    num_samples: int | None = None,
    shuffle_seed: int | None = None,
) -> QuestionSet:
    """The questions of a file, a dataset or a list: each id and each normalised text once.

    A question with given answers appears once per `sample`. `columns` maps our names to those of the file:
    `id=qid,question=text,answer=gold`. `shuffle_seed` shuffles the questions; `num_samples` keeps the first N with all
    their samples.
    """
    if num_samples is not None and num_samples < 1:
        raise BadSetting(f"num_samples={num_samples}: must be at least 1")
    found = _find_questions(source, _parse_columns(columns))
    by_id: dict[str, dict[int, Question]] = {}
    texts: dict[object, str] = {}  # what the model sees -> the first id that has it
    same_id = same_text = 0
    for index, question in enumerate(found):
        text = _text_key(question)
        samples = by_id.get(question.id, {})
        first = next(iter(samples.values()), question)
        if question.sample in samples:
            same_id += 1
        elif _text_key(first) != text:
            raise BadSource(
                f"{source}: two questions have the id {question.id!r}: {first.question[:80]!r} and "
                f"{question.question[:80]!r}. Choose a column that tells them apart: columns=id=NAME"
            )
        elif question.given is None and texts.get(text, question.id) != question.id:
            same_text += 1
        else:
            texts.setdefault(text, question.id)
            by_id.setdefault(question.id, {})[question.sample] = replace(question, index=index)
    if not by_id:
        raise BadSource(f"{source}: contains no questions")
    names = list(by_id)
    if shuffle_seed is not None:
        order: list[int] = np.random.default_rng(shuffle_seed).permutation(len(names)).tolist()
        names = [names[index] for index in order]
    chosen = [question for name in names[:num_samples] for question in by_id[name].values()]
    return QuestionSet(chosen, same_id, same_text)


def _text_key(question: Question) -> object:
    """What the model sees of a question: equal for repeats."""
    text = normalise(question.question) or question.question.strip()
    messages = json.dumps([dict(message) for message in question.messages or ()])
    ids = question.given.prompt_ids if question.given is not None and not text else None
    return text, question.context, question.prompt, messages, ids


def read_references(source: str | Path, *, columns: str | None = None) -> dict[str, list[str]]:
    """The accepted answers by question id, from a file like those of `read_questions`; it needs no question column."""
    found: dict[str, list[str]] = {}
    for question in _find_questions(source, _parse_columns(columns), needs_text=False):
        if question.aliases:
            found[question.id] = list(dict.fromkeys([*found.get(question.id, ()), *question.aliases]))
    if not found:
        raise BadSource(f"{source}: contains no answers. Choose their column: columns=answer=NAME")
    return found


def built_in_questions() -> Mapping[str, Callable[[], Sequence[Question]] | Path]:
    """The built-in question sets by name: a function that returns the questions, or a file."""
    return ChainMap(*(module.QUESTIONS for module in extensions("built_ins")))


def _find_questions(
    source: str | Path | Sequence[Question | Row], columns: Mapping[str, str], *, needs_text: bool = True
) -> Iterable[Question]:
    if not isinstance(source, str | Path):
        if all(isinstance(one, Question) for one in source):
            return cast("Sequence[Question]", source)
        rows = cast("Sequence[Row]", source)
        return _from_rows(rows, "record", columns, "records", needs_text=needs_text)
    name = str(source)
    if name == "-":
        stdin = Path("/dev/stdin")
        return _from_rows(read_rows(stdin), stdin.name, columns, stdin, needs_text=needs_text)
    built_in = built_in_questions()
    path = built_in.get(name, to_path(source))
    if not isinstance(path, Path):
        return path()
    if path.suffix in SUFFIXES or path.exists():
        if not path.is_file() and not is_datasets_folder(path):
            known = ", ".join((*SUFFIXES, *built_in))
            raise BadSource(
                f"{path}: no such file. Questions must be one of {known}, a folder that datasets saved, or a "
                "dataset on the Hugging Face hub"
            )
        return _from_rows(read_rows(path), path.name.split(".")[0], columns, path, needs_text=needs_text)
    return _from_rows(_from_hub(name), name, columns, name, needs_text=needs_text)


def _parse_columns(text: str | None) -> dict[str, str]:
    named: dict[str, str] = {}
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not equals or ours not in COLUMNS or not theirs:
            raise BadSetting(
                f"columns={text}: must be like id=..,question=..,answer=..,aliases=.. with the column names of the file"
            )
        named[ours] = theirs
    return named


def _from_hub(name: str) -> Iterator[Row]:
    """`trivia_qa:rc.nocontext:validation`, through the `datasets` library."""
    path, _, rest = name.partition(":")
    subset, _, split = rest.partition(":")
    try:
        import datasets  # pyright: ignore
    except ImportError:
        raise MissingExtra(
            f"{name}: no such file; datasets on the Hugging Face hub need: pip install datasets"
        ) from None
    try:
        rows: Any = datasets.load_dataset(path, subset or None, split=split or "train")  # pyright: ignore
    except Exception as error:  # any error of the library or the network
        reason = " ".join(str(error).split())[:300]
        raise BadSource(
            f"{name}: not a file, and cannot be loaded as a dataset ({reason}). Give NAME:CONFIG:SPLIT, as in "
            "trivia_qa:rc.nocontext:validation, or a file"
        ) from None
    yield from cast("Iterable[Row]", rows)


def _from_rows(
    rows: Iterable[Row], stem: str, columns: Mapping[str, str], source: object, *, needs_text: bool
) -> Iterator[Question]:
    names: dict[str, str | None] = {}
    keys: list[str] = []
    contexts: dict[str, str] = {}  # each in memory once
    first_ids: dict[object, str] = {}  # of questions with given answers and no ids
    numbered: Counter[str] = Counter()  # given answers by question
    for number, row in expanded(rows, source):
        if not keys:
            _check_columns(row, columns, source, needs_text=needs_text)
        if list(row) != keys:  # JSON lines may have different keys
            keys = list(row)
            names = {ours: _column(ours, row, columns) for ours in COLUMNS}
        cell = {ours: row.get(theirs) if theirs else None for ours, theirs in names.items()}
        if names["aliases"] == SEMICOLONS and isinstance(cell["aliases"], str):
            cell["aliases"] = cell["aliases"].split(";")
        parse = _Cells(cell, names)
        try:
            question = _question(parse, f"{stem}-{number}", needs_text=needs_text)
            sample = parse("sample", cells.number)
        except ValueError as error:
            raise BadSource(f"{source}: row {int(number.split('-')[0]) + 1} {error}") from None
        if question.context is not None:
            question = replace(question, context=contexts.setdefault(question.context, question.context))
        if question.given is not None:
            if cell["id"] in (None, ""):
                question = replace(question, id=first_ids.setdefault(_text_key(question), question.id))
            question = replace(question, sample=numbered[question.id] if sample is None else sample)
            numbered[question.id] += 1
        yield question


class _Cells:
    """The cells of a row by our names of their columns; errors name the column of the file."""

    def __init__(self, cell: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
        self.cell = cell
        self._names = names

    def __call__(self, ours: str, parse: Callable[..., T], *others: object) -> T:
        try:
            return parse(self.cell[ours], *others)
        except ValueError as error:
            raise ValueError(f"column {self._names[ours]!r} {error}") from None


def _question(parse: _Cells, name: str, *, needs_text: bool) -> Question:
    """The question in a row; ValueError tells what is wrong with it."""
    cell = parse.cell
    is_chat = isinstance(cell["prompt"], list | np.ndarray)  # as TRL writes it
    messages, last = parse("prompt" if is_chat else "messages", cells.messages)
    prompt = None if is_chat else parse("prompt", cells.text)
    users = [message["content"] for message in messages or () if message["role"] == "user"]
    text = next((text for text in (cell["question"], prompt, *users[-1:]) if text is not None), None)
    accepted = list(dict.fromkeys([*cells.answers(cell["answer"]), *cells.answers(cell["aliases"])]))
    answer = parse("generated_answer", cells.text)
    ids = parse("token_ids", cells.token_ids)
    given = Given(
        text=last if answer is None else answer,
        ids=ids,
        prompt_ids=parse("prompt_token_ids", cells.token_ids),
        logprobs=parse("logprobs", cells.logprobs, ids),
    )
    has_ids = given.prompt_ids is not None and (given.text is not None or ids is not None)
    if needs_text and not has_ids and (not isinstance(text, str) or not text.strip()):
        raise ValueError("has no question")
    found = parse("spans", cells.spans, given.text)
    return Question(
        id=str(cell["id"]) if cell["id"] not in (None, "") else name,
        question=text.strip() if isinstance(text, str) else "",
        answer=accepted[0] if accepted else None,
        aliases=tuple(accepted),
        kind=str(cell["kind"]) if cell["kind"] else None,
        exposure=str(cell["exposure"]) if cell["exposure"] else None,
        context=parse("context", cells.context),
        prompt=prompt,
        messages=messages,
        given=None if given.text is None and ids is None else given,
        spans=None if found is None else tuple(Span(*span) for span in found),
        verdict=parse("verdict", cells.verdict, found),
        about=parse("about", cells.about),
    )


def _check_columns(first: Row, columns: Mapping[str, str], source: object, *, needs_text: bool) -> None:
    have = ", ".join(map(str, first))
    for theirs in columns.values():
        if theirs not in first:
            raise BadSource(f"{source}: has no column {theirs!r}, only {have}")
    if needs_text and not any(_column(ours, first, columns) for ours in _TEXTS):
        raise BadSource(f"{source}: no question column among {have}. Choose one: columns=question=NAME")


def _column(ours: str, row: Row, columns: Mapping[str, str]) -> str | None:
    names = (columns[ours],) if ours in columns else COLUMNS[ours]
    others = [theirs for other, theirs in columns.items() if other != ours]
    return next((name for name in names if name in row and name not in others), None)
