"""The layouts of published question sets -> rows with columns that `questions` knows. Knows nothing of prompts.

A layout is recognised by its columns. The columns of all others are taken by the names in `COLUMNS`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import cast

from millstream.core.rows import Row, read_rows
from millstream.errors import BadSource

# Names of TriviaQA, NQ-open, WebQuestions, PopQA, TruthfulQA, SimpleQA, vLLM and others: the first that a row has.
COLUMNS: Mapping[str, Sequence[str]] = {
    "id": ("id", "question_id", "QuestionId", "qid", "example_id", "_id", "ID"),
    "question": ("question", "Question", "problem", "qText", "query"),
    "answer": ("answer", "best_answer", "Answer", "obj", "Best Answer", "target"),
    "aliases": ("aliases", "answers", "possible_answers", "correct_answers", "Correct Answers", "golden_answers"),
    "kind": ("kind", "prop", "category", "Category"),
    "exposure": ("exposure",),
    "context": ("context", "contexts"),
    "prompt": ("prompt",),
    "messages": ("messages",),
    "sample": ("sample",),
    "generated_answer": ("generated_answer", "response", "output", "completion", "generated_text"),
    "token_ids": ("token_ids",),
    "prompt_token_ids": ("prompt_token_ids",),
    "logprobs": ("logprobs",),
    "spans": ("spans",),
    "verdict": ("verdict",),
    "about": ("about",),
}
SEMICOLONS = "Correct Answers"  # of the TruthfulQA file: answers separated by semicolons
UNANSWERABLE = "unanswerable"  # the correct answer, and the kind, of a question that its context does not answer


@dataclass
class _Folder:
    """The files beside a file of questions, each read when it is first needed."""

    path: Path | None
    found: dict[str, Row] = field(default_factory=dict[str, Row])

    def source(self, name: str) -> Row:
        """The text that an answer of RAGTruth is based on."""
        if self.path is None:
            raise BadSource(f"source {name!r} is in source_info.jsonl: download it and response.jsonl into one folder")
        file = self.path.with_name("source_info.jsonl")
        if not self.found and file.is_file():
            self.found = {str(row.get("source_id")): row for row in read_rows(file)}
        if name not in self.found:
            raise BadSource(
                f"{self.path}: answers are based on texts of {file}, "
                f"which {f'has no source {name!r}' if self.found else 'is missing: download it, too'}"
            )
        return self.found[name]


@dataclass(frozen=True)
class Layout:
    """How rows with certain columns are read; `rows` returns None if the values are of another layout, after all."""

    dataset: str
    columns: Sequence[str]
    about: str
    rows: Callable[[Row, _Folder], Iterable[Row] | None]


def expanded(rows: Iterable[Row], source: object) -> Iterator[tuple[str, Row]]:
    """The questions in the rows of a file, each with a name: the number of its row, and its place if there are more."""
    folder = _Folder(source if isinstance(source, Path) else None)
    for number, row in enumerate(chain.from_iterable(map(_items, rows))):
        try:
            for place, one in enumerate(_expanded(row, folder)):
                yield f"{number}-{place}" if place else str(number), one
        except ValueError as error:
            raise BadSource(f"{source}: row {number + 1} {error}") from None


def _expanded(row: Row, folder: _Folder) -> Sequence[Row]:
    for layout in LAYOUTS:
        if all(name in row for name in layout.columns):
            try:
                found = layout.rows(row, folder)
                if found is not None:
                    return list(found)
            except (LookupError, TypeError, AttributeError, ValueError):
                raise ValueError(f"has the columns of {layout.dataset}, but other values in them") from None
    return [row]


def _items(row: Row) -> Sequence[Row]:
    """The rows of a file that is one object: the official files of TriviaQA (`Data`), SQuAD and CoQA (`data`)."""
    for name in ("Data", "data"):
        items = row.get(name)
        if isinstance(items, list) and all(isinstance(item, dict) for item in cast("list[object]", items)):
            return cast("list[Row]", items)
    return [row]


def _ragtruth(row: Row, folder: _Folder) -> Iterable[Row]:
    """The prompt is a message: a model with a chat template was given it in that template."""
    source = row if "source_info" in row else folder.source(str(row["source_id"]))
    info, prompt = source.get("source_info"), str(source.get("prompt"))
    if isinstance(info, dict) and {"question", "passages"} <= info.keys():
        asked = cast("Row", info)
        question, context = asked["question"], asked["passages"]
    else:  # a text to summarise, or data to describe
        context = str(cast("object", info))
        question = prompt.partition(context)[0].strip() or prompt
    about = {name: row[name] for name in ("model", "split", "quality") if name in row}
    yield {
        "id": row["source_id"],
        "question": question,
        "context": context,
        "messages": [{"role": "user", "content": prompt}],
        "generated_answer": row["response"],
        "spans": row["labels"],
        "kind": source.get("task_type"),
        "about": about,
    }


def _squad_article(row: Row, folder: _Folder) -> Iterable[Row]:
    for paragraph in cast("list[Row]", row["paragraphs"]):
        for asked in cast("list[Row]", paragraph.get("qas", [])):
            is_impossible = bool(asked.get("is_impossible"))
            yield _squad(asked, paragraph.get("context"), [] if is_impossible else _texts(asked.get("answers"), "text"))


def _squad_row(row: Row, folder: _Folder) -> Iterable[Row] | None:
    if isinstance(row["answers"], dict) and "text" in row["answers"]:
        return [_squad(row, row["context"], _texts(cast("object", row["answers"]), "text"))]
    return None


def _squad(row: Row, context: object, answers: Sequence[object]) -> Row:
    kind = None if answers else UNANSWERABLE
    return {"id": row.get("id"), "question": row.get("question"), "context": context} | {
        "answers": list(answers) or [UNANSWERABLE],
        "kind": kind,
    }


def _hotpotqa(row: Row, folder: _Folder) -> Iterable[Row] | None:
    context = row["context"]
    if isinstance(context, dict) and {"title", "sentences"} <= context.keys():
        columns = cast("Mapping[str, Sequence[object]]", context)
        pairs: list[Sequence[object]] = list(zip(columns["title"], columns["sentences"], strict=True))
    elif isinstance(context, list) and all(map(_is_titled, cast("list[object]", context))) and context:
        pairs = cast("list[Sequence[object]]", context)
    else:
        return None
    passages = [
        f"{title}\n" + " ".join(str(one).strip() for one in cast("Sequence[object]", some)) for title, some in pairs
    ]
    return [{**row, "context": passages, "kind": row.get("type")}]


def _is_titled(passage: object) -> bool:
    """Whether this is a title and a list of sentences."""
    pair: Sequence[object] = cast("Sequence[object]", passage) if isinstance(passage, list | tuple) else ()
    return len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list | tuple)


def _coqa(row: Row, folder: _Folder) -> Iterable[Row]:
    """The context of a question is the story and the conversation so far, with the correct answers."""
    questions, answers = (_texts(row[name], "input_text") for name in ("questions", "answers"))
    others = row.get("additional_answers")
    more = [_texts(given, "input_text") for given in cast("Row", others).values()] if isinstance(others, dict) else []
    so_far = str(row["story"])
    for turn, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        name = None if row.get("id") is None else f"{row['id']}-{turn}"
        accepted = [answer, *(given[turn] for given in more if turn < len(given))]
        yield {"id": name, "question": question, "context": so_far, "answers": accepted, "kind": row.get("source")}
        so_far += f"{'' if turn else chr(10)}\nQ: {question}\nA: {answer}"


def _halueval_pair(row: Row, folder: _Folder) -> Iterable[Row]:
    shared = {"id": row.get("id"), "question": row["question"], "context": row["knowledge"]}
    for verdict, name in (("right", "right_answer"), ("wrong", "hallucinated_answer")):
        yield {**shared, "answer": row["right_answer"], "generated_answer": row[name], "verdict": verdict}


def _halueval_sample(row: Row, folder: _Folder) -> Iterable[Row]:
    shared = {"id": row.get("id"), "question": row["question"], "context": row["knowledge"]}
    yield {**shared, "generated_answer": row["answer"], "verdict": _halueval_verdict(row["hallucination"])}


def _halueval_general(row: Row, folder: _Folder) -> Iterable[Row]:
    verdict = _halueval_verdict(row.get("hallucination_label", row.get("hallucination")))
    given = {"generated_answer": row["chatgpt_response"], "verdict": verdict}
    yield {"id": row.get("ID"), "question": row["user_query"], **given}


def _halueval_verdict(label: object) -> str | None:
    return {"yes": "wrong", "no": "right"}.get(str(label).strip().lower())


def _gsm8k(row: Row, folder: _Folder) -> Iterable[Row] | None:
    found = re.search(r"^#### *(.+?)\s*\Z", row["answer"], re.MULTILINE) if isinstance(row["answer"], str) else None
    if found is None:
        return None
    return [{**row, "answer": found[1], "aliases": [found[1].replace(",", "")]}]


def _texts(value: object, name: str) -> list[object]:
    """The texts in a list of texts, in a list of dicts with a text, or in a dict of lists, as the hub has it."""
    if isinstance(value, dict):
        value = cast("Row", value).get(name)
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("Row", item).get(name) if isinstance(item, dict) else item for item in items]


LAYOUTS = (
    Layout(
        "RAGTruth",
        ("source_id", "response", "labels"),
        "`response.jsonl`, with `source_info.jsonl` in the same folder: given answers with spans, prompts as messages",
        _ragtruth,
    ),
    Layout("SQuAD 1.1, 2.0", ("paragraphs",), "the official file: contexts, answers", _squad_article),
    Layout("SQuAD 1.1, 2.0", ("context", "question", "answers"), "the rows of the hub", _squad_row),
    Layout(
        "HotpotQA, 2WikiMultihopQA",
        ("context", "question"),
        "titles with sentences become the context, in both the official form and that of the hub",
        _hotpotqa,
    ),
    Layout(
        "CoQA",
        ("story", "questions", "answers"),
        "a question per turn; its context is the story and the conversation so far, with the correct answers",
        _coqa,
    ),
    Layout(
        "HaluEval QA",
        ("knowledge", "question", "right_answer", "hallucinated_answer"),
        "two given answers per question, one right, one wrong",
        _halueval_pair,
    ),
    Layout(
        "HaluEval QA samples",
        ("knowledge", "question", "answer", "hallucination"),
        "a given answer with its verdict",
        _halueval_sample,
    ),
    Layout(
        "HaluEval general", ("user_query", "chatgpt_response"), "a given answer with its verdict", _halueval_general
    ),
    Layout("GSM8K", ("question", "answer"), "the correct answer is what follows `####`", _gsm8k),
)
