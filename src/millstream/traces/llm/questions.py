"""Question sets -> questions: JSONL, CSV, Parquet, JSON in the known layouts, a Hugging Face name, `facts`, `world`."""

import ast
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.source.llm.answers import normalise
from millstream.source.llm.question import Question

Row = Mapping[str, Any]
# How TriviaQA, NQ-open, WebQuestions, PopQA, TruthfulQA, SimpleQA and others call things; the first found counts.
_COLUMNS = {
    "id": ("id", "question_id", "QuestionId", "qid", "example_id"),
    "question": ("question", "Question", "problem", "qText", "query", "prompt"),
    "answer": ("answer", "best_answer", "Answer", "obj", "Best Answer", "target"),
    "aliases": ("aliases", "answers", "possible_answers", "correct_answers", "Correct Answers", "golden_answers"),
    "kind": ("kind", "prop", "category", "Category"),
    "exposure": ("exposure",),
}
_SEMICOLONS = "Correct Answers"  # of TruthfulQA's own file: answers with semicolons between them
_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class QuestionSet:
    """Questions, each once, and how many were left out because they came before."""

    questions: list[Question]
    same_id: int
    same_text: int


def read_questions(
    source: str | Path | Sequence[Question],
    *,
    columns: str | None = None,
    num_samples: int | None = None,
    shuffle_seed: int | None = None,
) -> QuestionSet:
    """The questions of a file, a data set or a list: each id and each normalised text once.

    `columns` says what a file calls things: `id=qid,question=text,answer=gold`. `shuffle_seed` draws another order,
    `num_samples` takes the first so many.
    """
    if num_samples is not None and num_samples < 1:
        raise BadSetting(f"num_samples={num_samples}: at least 1")
    found = find_questions(source, _parse_columns(columns))
    questions: list[Question] = []
    ids: set[str] = set()
    texts: set[str] = set()
    same_id = same_text = 0
    for question in found:
        text = normalise(question.question) or question.question.strip()
        if question.id in ids:
            same_id += 1
        elif text in texts:
            same_text += 1
        else:
            ids.add(question.id)
            texts.add(text)
            questions.append(question)
    if not questions:
        raise BadSource(f"{source}: no questions in it")
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(questions))
        questions = [questions[place] for place in order]
    return QuestionSet(questions[:num_samples], same_id, same_text)


def find_questions(source: str | Path | Sequence[Question], columns: Mapping[str, str]) -> Iterable[Question]:
    if not isinstance(source, str | Path):
        return source
    name = str(source)
    if name == "facts":
        from millstream.source.llm.facts import facts_questions

        return facts_questions()
    if name == "world":
        from millstream.source.llm.world import world_questions

        return world_questions()
    path = Path(source)
    if path.suffix in _SUFFIXES or path.exists():
        if not path.is_file():
            raise BadSource(f"{path}: no such file. Questions are {', '.join(_SUFFIXES)}, facts, world or a hub name")
        return _from_rows(_read_file(path), path.name.split(".")[0], columns, path)
    return _from_rows(_from_hub(name), name, columns, name)


def _parse_columns(text: str | None) -> dict[str, str]:
    named: dict[str, str] = {}
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not equals or ours not in _COLUMNS or not theirs:
            raise BadSetting(f"columns={text}: write id=..,question=..,answer=..,aliases=.. with the file's own names")
        named[ours] = theirs
    return named


def _read_file(path: Path) -> Iterator[Row]:
    reader: Callable[[Path], Iterator[Row]] = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".csv": _csv,
        ".tsv": _csv,
        ".parquet": _parquet,
    }.get(path.suffix, _json_lines)
    try:
        yield from reader(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadSource(f"{path}: is no text that can be read ({error})") from None


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise BadSource(f"{path}: line {number} is no JSON ({error})") from None
                if not isinstance(row, dict):
                    raise BadSource(f"{path}: line {number} is no JSON object")
                yield cast("Row", row)


def _json(path: Path) -> Iterator[Row]:
    """A list of rows, or the official TriviaQA file, whose rows are under `Data`."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise BadSource(f"{path}: is no JSON ({error})") from None
    rows: Any = cast("Row", found).get("Data") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast("list[object]", rows)):
        raise BadSource(f"{path}: expected a list of questions, or TriviaQA's file with `Data`")
    yield from cast("list[Row]", rows)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is no Parquet file that can be read ({error})") from None


def _from_hub(name: str) -> Iterator[Row]:
    """`trivia_qa:rc.nocontext:validation`, through the `datasets` library."""
    place, _, rest = name.partition(":")
    subset, _, split = rest.partition(":")
    try:
        import datasets  # pyright: ignore
    except ImportError:
        raise MissingExtra(
            f"{name}: no such file; a data set of the Hugging Face hub needs: pip install datasets"
        ) from None
    try:
        rows: Any = datasets.load_dataset(place, subset or None, split=split or "train")  # pyright: ignore
    except Exception as error:  # whatever the library and the network come up with
        reason = " ".join(str(error).split())[:300]
        raise BadSource(
            f"{name}: neither a file nor a data set that could be loaded ({reason}). Write NAME:CONFIG:SPLIT, as in "
            "trivia_qa:rc.nocontext:validation, or give a file"
        ) from None
    yield from cast("Iterable[Row]", rows)


def _from_rows(rows: Iterable[Row], stem: str, columns: Mapping[str, str], source: object) -> Iterator[Question]:
    names: dict[str, str | None] = {}
    keys: list[str] = []
    for number, row in enumerate(rows):
        if not keys:
            _check_columns(row, columns, source)
        if list(row) != keys:  # lines of JSON may differ in what they have
            keys = list(row)
            names = {ours: _column(ours, row, columns) for ours in _COLUMNS}
        question = row.get(names["question"] or "")
        if not isinstance(question, str) or not question.strip():
            raise BadSource(f"{source}: row {number + 1} has no question")
        cell = {ours: row.get(theirs) if theirs else None for ours, theirs in names.items()}
        if names["aliases"] == _SEMICOLONS and isinstance(cell["aliases"], str):
            cell["aliases"] = cell["aliases"].split(";")
        accepted = list(dict.fromkeys([*_answers(cell["answer"]), *_answers(cell["aliases"])]))
        yield Question(
            id=str(cell["id"]) if cell["id"] not in (None, "") else f"{stem}-{number}",
            question=question.strip(),
            answer=accepted[0] if accepted else None,
            aliases=tuple(accepted),
            kind=str(cell["kind"]) if cell["kind"] else None,
            exposure=str(cell["exposure"]) if cell["exposure"] else None,
        )


def _check_columns(first: Row, columns: Mapping[str, str], source: object) -> None:
    have = ", ".join(map(str, first))
    for theirs in columns.values():
        if theirs not in first:
            raise BadSource(f"{source}: has no column {theirs!r}, it has {have}")
    if _column("question", first, columns) is None:
        raise BadSource(f"{source}: no column for the question among {have}. Say which: columns=question=NAME")


def _column(ours: str, row: Row, columns: Mapping[str, str]) -> str | None:
    names = (columns[ours],) if ours in columns else _COLUMNS[ours]
    return next((name for name in names if name in row), None)


def _answers(value: object) -> list[str]:
    """The accepted answers in a cell: a text, a list (also one written as text), or TriviaQA's dict of them."""
    if value is None or value == "":
        return []
    if isinstance(value, dict):
        row = {str(key).lower(): item for key, item in cast("dict[str, object]", value).items()}
        names = ("value", "aliases", "humananswers", "normalizedaliases", "normalized_aliases")
        return [answer for name in names for answer in _answers(row.get(name))]
    if isinstance(value, list | tuple | np.ndarray):
        return [answer for item in cast("Iterable[object]", value) for answer in _answers(item)]
    text = str(value).strip()
    if text.startswith("[") and text.endswith("]"):
        for read in (json.loads, ast.literal_eval):
            try:
                return _answers(read(text))
            except (ValueError, SyntaxError):
                continue
    return [text] if text else []
