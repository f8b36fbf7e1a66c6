"""Question sets -> questions -> prompts: files in the known layouts, a Hugging Face name, or a built-in set."""

import ast
import csv
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from millstream.core.config import parse_json
from millstream.core.registry import extensions
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.traces.llm.model import Tokenizer
from millstream.traces.scores import normalise

Row = Mapping[str, Any]
# Column names of TriviaQA, NQ-open, WebQuestions, PopQA, TruthfulQA, SimpleQA and others; the first match counts.
_COLUMNS = {
    "id": ("id", "question_id", "QuestionId", "qid", "example_id"),
    "question": ("question", "Question", "problem", "qText", "query", "prompt"),
    "answer": ("answer", "best_answer", "Answer", "obj", "Best Answer", "target"),
    "aliases": ("aliases", "answers", "possible_answers", "correct_answers", "Correct Answers", "golden_answers"),
    "kind": ("kind", "prop", "category", "Category"),
    "exposure": ("exposure",),
}
_SEMICOLONS = "Correct Answers"  # of the TruthfulQA file: answers separated by semicolons
_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PLAIN = "Answer the question concisely. Q: {question} A:"
FEW_SHOT = """Answer the question concisely.

Q: Which planet is known as the Red Planet?
A: Mars

Q: Who painted the Mona Lisa?
A: Leonardo da Vinci

Q: How many legs does a spider have?
A: Eight

Q: {question}
A:"""
CHAT = "Answer the question concisely, with the answer only.\n\n{question}"
QUESTION = "{question}"
# {name}, { name }, {name.part}, {name[0]}, {name!r} or {name:>9}, as Python fills in; {2} and {} may be LaTeX
_FIELD = r"\{\s*[^\W\d]\w*(?:\.\w+|\[\w*\])*\s*(?:![ars])?(?::[^{}\"'\s]*)?\}"
_PLACEHOLDER = re.compile(rf"\{{{_FIELD}\}}|{_FIELD}")
_MARK = "\u2063question\u2063"  # placeholder for the question in a chat template


@dataclass(frozen=True, slots=True)
class Question:
    """`aliases` are all accepted answers, the main one (`answer`) first; both may be missing."""

    id: str
    question: str
    answer: str | None = None
    aliases: tuple[str, ...] = ()
    kind: str | None = None  # a relation or category
    exposure: str | None = None  # how well known the fact is: often .. never, popular, obscure
    index: int | None = field(default=None, compare=False)  # its row in the question set, repeated rows included


@dataclass(frozen=True)
class QuestionSet:
    """Distinct questions, and how many were left out because their id or text is a repeat."""

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
    """The questions of a file, a dataset or a list: each id and each normalised text once.

    `columns` maps our names to those of the file: `id=qid,question=text,answer=gold`. `shuffle_seed` shuffles the
    questions; `num_samples` keeps the first N.
    """
    if num_samples is not None and num_samples < 1:
        raise BadSetting(f"num_samples={num_samples}: must be at least 1")
    found = _find_questions(source, _parse_columns(columns))
    questions: list[Question] = []
    ids: set[str] = set()
    texts: set[str] = set()
    same_id = same_text = 0
    for index, question in enumerate(found):
        text = normalise(question.question) or question.question.strip()
        if question.id in ids:
            same_id += 1
        elif text in texts:
            same_text += 1
        else:
            ids.add(question.id)
            texts.add(text)
            questions.append(replace(question, index=index))
    if not questions:
        raise BadSource(f"{source}: contains no questions")
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(questions))
        questions = [questions[index] for index in order]
    return QuestionSet(questions[:num_samples], same_id, same_text)


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


def built_in_prompts() -> Mapping[str, str]:
    """Prompts by name, each with a `{question}`; the default prompt of the model of the same name."""
    return ChainMap(*(module.PROMPTS for module in extensions("built_ins")))


def _find_questions(
    source: str | Path | Sequence[Question], columns: Mapping[str, str], *, needs_text: bool = True
) -> Iterable[Question]:
    if not isinstance(source, str | Path):
        return source
    name = str(source)
    if name == "-":
        stdin = Path("/dev/stdin")
        return _from_rows(_read_file(stdin), stdin.name, columns, stdin, needs_text=needs_text)
    built_in = built_in_questions()
    path = built_in.get(name, to_path(source))
    if not isinstance(path, Path):
        return path()
    if path.suffix in _SUFFIXES or path.exists():
        if not path.is_file():
            known = ", ".join((*_SUFFIXES, *built_in))
            raise BadSource(
                f"{path}: no such file. Questions must be one of {known}, or a dataset on the Hugging Face hub"
            )
        return _from_rows(_read_file(path), path.name.split(".")[0], columns, path, needs_text=needs_text)
    return _from_rows(_from_hub(name), name, columns, name, needs_text=needs_text)


@dataclass(frozen=True)
class Prompt:
    """The text around the question, and the strings that end an answer."""

    name: str
    text: str  # contains {question} once
    stop: tuple[str, ...]
    special: bool  # whether the tokenizer adds special tokens; a chat template already has them

    def fill(self, question: str) -> str:
        before, after = self.text.split(QUESTION)
        return before + question + after

    def ids(self, tokenizer: Tokenizer, questions: list[str]) -> list[list[int]]:
        texts = [self.fill(question) for question in questions]
        return tokenizer(texts, add_special_tokens=self.special)["input_ids"] if texts else []


def make_prompt(spec: str, tokenizer: Tokenizer, *, stop: str | None) -> Prompt:
    """`auto` is the chat template of the model if it has one, else plain. `stop`: strings separated by `|`."""
    has_chat = bool(tokenizer.chat_template)
    name = ("chat" if has_chat else "plain") if spec == "auto" else spec
    if name == "chat":
        if not has_chat:
            raise BadSetting("prompt=chat: this model has no chat template; use prompt=plain or prompt=few-shot")
        messages = [{"role": "user", "content": CHAT.replace(QUESTION, _MARK)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Prompt("chat", text.replace(_MARK, QUESTION), _stops(stop, ()), special=False)
    texts = {"plain": PLAIN, "few-shot": FEW_SHOT, **built_in_prompts()}
    text = texts.get(name) or (
        Path(name).read_text(encoding="utf-8").removesuffix("\n")
        if name.endswith(".txt") and Path(name).exists()
        else name
    )
    if text.count(QUESTION) != 1:
        raise BadSetting(
            f"prompt={name}: must be one of auto, plain, few-shot, chat, a text that contains {{question}} once, "
            "or a .txt file of such a text"
        )
    return Prompt(name if name in texts else "own", _unescape(text, name), _stops(stop, ("\n",)), special=True)


def _unescape(text: str, name: str) -> str:
    """A prompt with `{{word}}` as `{word}`; any placeholder but `{question}` would reach the model as it is written."""
    unknown = [found for found in _PLACEHOLDER.findall(text.replace(QUESTION, "")) if not found.startswith("{{")]
    if unknown or f"{{{QUESTION}}}" in text:
        found = unknown[0] if unknown else f"{{{QUESTION}}}"
        raise BadSetting(
            f"prompt={name}: contains {found}, but only {QUESTION} is filled in. Write braces that the model is to see "
            "twice: {{word}}"
        )
    return _PLACEHOLDER.sub(lambda found: found[0][1:-1] if found[0].startswith("{{") else found[0], text)


def _parse_columns(text: str | None) -> dict[str, str]:
    named: dict[str, str] = {}
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not equals or ours not in _COLUMNS or not theirs:
            raise BadSetting(
                f"columns={text}: must be like id=..,question=..,answer=..,aliases=.. with the column names of the file"
            )
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
        raise BadSource(f"{path}: is not valid text ({error})") from None


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise BadSource(f"{path}: line {number} is not valid JSON ({error})") from None
                if not isinstance(row, dict):
                    raise BadSource(f"{path}: line {number} is not a JSON object")
                yield cast("Row", row)


def _json(path: Path) -> Iterator[Row]:
    """A list of rows, or the official TriviaQA file, whose rows are under `Data`."""
    try:
        found: Any = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise BadSource(f"{path}: is not valid JSON ({error})") from None
    rows: Any = cast("Row", found).get("Data") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast("list[object]", rows)):
        raise BadSource(f"{path}: must be a list of questions, or the TriviaQA file with `Data`")
    yield from cast("list[Row]", rows)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    from millstream.core.tables import read_parquet

    try:
        yield from read_parquet(path.read_bytes()).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise BadSource(f"{path}: is not a valid Parquet file ({error})") from None


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
    for number, row in enumerate(rows):
        if not keys:
            _check_columns(row, columns, source, needs_text=needs_text)
        if list(row) != keys:  # JSON lines may have different keys
            keys = list(row)
            names = {ours: _column(ours, row, columns) for ours in _COLUMNS}
        question = row.get(names["question"] or "") if needs_text else ""
        if not isinstance(question, str) or (needs_text and not question.strip()):
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


def _check_columns(first: Row, columns: Mapping[str, str], source: object, *, needs_text: bool) -> None:
    have = ", ".join(map(str, first))
    for theirs in columns.values():
        if theirs not in first:
            raise BadSource(f"{source}: has no column {theirs!r}, only {have}")
    if needs_text and _column("question", first, columns) is None:
        raise BadSource(f"{source}: no question column among {have}. Choose one: columns=question=NAME")


def _column(ours: str, row: Row, columns: Mapping[str, str]) -> str | None:
    names = (columns[ours],) if ours in columns else _COLUMNS[ours]
    return next((name for name in names if name in row), None)


def _answers(value: object) -> list[str]:
    """The accepted answers in a cell: a text, a list (possibly written as text), or the dict of TriviaQA."""
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
        for read in (parse_json, ast.literal_eval):
            try:
                return _answers(read(text))
            except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply
                continue
    return [text] if text else []


def _stops(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    escaped = given.encode("latin-1", "backslashreplace")  # so that unicode_escape keeps non-Latin characters
    parts = escaped.decode("unicode_escape") if "\\" in given else given
    return tuple(part for part in parts.split("|") if part)
