"""A language model judges answers: what it is asked, what its reply means, and a file that keeps every reply.

A reply is kept under a hash of the model and of all that it was asked, so the same command asks nothing twice.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from millstream.core.console import Progress, plural, say
from millstream.core.files import cache_folder
from millstream.core.lines import append_lines, read_lines
from millstream.core.remote import is_url
from millstream.errors import RemoteError
from millstream.traces.rules import AMBIGUOUS, NONE, RIGHT, VERDICTS, WRONG, Verdicts
from millstream.traces.scores import Bools
from millstream.traces.store.manifest import JUDGE_REPLIES

PROMPT = """Grade the answer to a question. You are given the question, one or more correct answers, and the answer \
to grade.

The answer is CORRECT if it gives one of the correct answers, in any wording, and contradicts none of them. It is \
INCORRECT if it gives something else, denies the correct answer, names several candidates without choosing one, or \
does not answer. It is UNSURE if you cannot tell.

Question: {question}
Correct answers: {references}
Answer to grade: {answer}

Reply with one word: CORRECT, INCORRECT or UNSURE."""
_MEANINGS = {"CORRECT": RIGHT, "INCORRECT": WRONG, "NOT CORRECT": WRONG, "UNSURE": AMBIGUOUS}
_WORD = re.compile(r"\b(not\s+correct|incorrect|correct|unsure)\b", re.IGNORECASE)
_MOST_REFERENCES = 20  # TriviaQA has up to hundreds
_HOPELESS = 20  # requests that a server refuses before it has answered one
_WINDOW, _MOST_ROWS, _MOST_TOKENS = 512, 16, 16_384  # of a local model: prompts sorted by length, and a batch

Reply = tuple[str, str | None, str | None]  # of which prompt; its text, or why there is none


class Judge(Protocol):
    """A model that replies to prompts, given with their keys, in any order."""

    name: str

    def replies(self, prompts: Iterable[tuple[str, str]]) -> Iterator[Reply]: ...


@dataclass(frozen=True)
class Judging:
    """The verdict on every record, and how many replies were asked for, unreadable or refused."""

    verdicts: Verdicts
    asked: int
    unreadable: int
    refused: int
    reason: str | None  # of the first refusal

    def notes(self) -> list[str]:
        """What a user should know of answers without a verdict."""
        found: list[str] = []
        if self.unreadable:
            found.append(f"{plural(self.unreadable, 'answer')} unlabelled: the judge replied none of the three words")
        if self.refused:
            found.append(f"{plural(self.refused, 'answer')} unlabelled: {self.reason}")
        return found


def prompt_of(question: str, references: Sequence[str], answer: str) -> str:
    """What the judge is asked; of many references only the first that differ in more than case."""
    distinct: dict[str, str] = {}
    for text in references:
        distinct.setdefault(text.strip().casefold(), text.strip())
    shown = "; ".join(list(distinct.values())[:_MOST_REFERENCES])
    return PROMPT.format(question=question.strip(), references=shown, answer=answer.strip())


def verdict_of(reply: str) -> str | None:
    """What a reply means; None if it names no verdict, or several and does not begin with one."""
    text = reply.rpartition("</think>")[2]
    found = list(_WORD.finditer(text))
    words = [" ".join(match[0].upper().split()) for match in found]
    if not words or (len(set(words)) > 1 and re.search(r"\w", text[: found[0].start()])):
        return None
    return _MEANINGS[words[0]]


def replies_file(store: Path) -> Path:
    """Where the replies of judges are kept: in the store, or in the cache folder for a URL."""
    if not is_url(store):
        return store / JUDGE_REPLIES
    folder = cache_folder() / "judge"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(str(store).encode()).hexdigest()[:24]}.jsonl"


def judge_answers(
    judge: Judge, chunks: Iterable[pa.Table], wanted: Bools, file: Path, *, max_new_tokens: int, progress: Progress
) -> Judging:
    """The verdicts on the `wanted` records of chunks with `question`, `answer` and `aliases`."""
    known = {str(row["key"]): str(row["reply"]) for row in read_lines(file)[0] if {"key", "reply"} <= row.keys()}
    meanings = {key: _code(reply) for key, reply in known.items()}
    keys: list[str | None] = []  # of every record

    def unknown() -> Iterator[tuple[str, str]]:
        asked: set[str] = set()
        for chunk in chunks:
            for row in chunk.to_pylist():
                text = prompt_of(row["question"] or "", row["aliases"], row["answer"]) if wanted[len(keys)] else None
                key = None if text is None else _key(judge.name, max_new_tokens, text)
                keys.append(key)
                progress(len(keys), "judged")
                if text is not None and key is not None and key not in meanings and key not in asked:
                    asked.add(key)
                    yield key, text

    num_asked = num_refused = 0
    reason: str | None = None
    for key, reply, problem in judge.replies(unknown()):
        num_asked += 1
        if reply is None:
            num_refused += 1
            reason = reason or problem
            if num_refused == _HOPELESS == num_asked and not known:
                raise RemoteError(f"{judge.name}: cannot judge ({reason})")
        else:
            append_lines(file, [{"key": key, "reply": reply, "model": judge.name}], sync=False)
            meanings[key] = _code(reply)
    found = np.array([NONE if key is None else meanings.get(key, NONE) for key in keys], np.int8)
    replied = sum(key in meanings for key in keys if key is not None)
    unreadable = replied - int((found != NONE).sum())
    return Judging(found, num_asked, unreadable, num_refused, reason)


def _code(reply: str) -> int:
    verdict = verdict_of(reply)
    return NONE if verdict is None else VERDICTS.index(verdict)


def _key(model: str, max_new_tokens: int, text: str) -> str:
    return hashlib.sha256(json.dumps([model, max_new_tokens, text]).encode()).hexdigest()[:32]


def make_judge(
    *, endpoint: str | None, model: str | None, key_env: str | None, concurrency: int, max_new_tokens: int
) -> Judge:
    """The judge that the settings of `label` name: a model of a server, or a local one."""
    if endpoint is None:
        return LocalJudge(model or "", max_new_tokens)
    return ServerJudge(endpoint, model, key_env=key_env, concurrency=concurrency, max_new_tokens=max_new_tokens)


class ServerJudge:
    """A model of an OpenAI-compatible server."""

    def __init__(
        self, url: str, model: str | None, *, key_env: str | None, concurrency: int, max_new_tokens: int
    ) -> None:
        from millstream.traces.llm.endpoint import Endpoint

        self._endpoint = Endpoint(url, model, key_env=key_env, concurrency=concurrency)
        self._max_new_tokens = max_new_tokens
        self.name = self._endpoint.model

    def replies(self, prompts: Iterable[tuple[str, str]]) -> Iterator[Reply]:
        from millstream.traces.llm.endpoint import Request

        requests = (
            Request(id=key, messages=[{"role": "user", "content": text}], max_tokens=self._max_new_tokens)
            for key, text in prompts
        )
        for answer in self._endpoint.complete(requests):
            yield str(answer.id), answer.choices[0].text if answer.choices else None, answer.error


class LocalJudge:
    """A model in this process, by the name on the Hugging Face hub or by its folder; loaded when it is first needed."""

    def __init__(self, model: str, max_new_tokens: int) -> None:
        from millstream.traces.llm.model import ModelSettings, describe_model

        self._settings = ModelSettings(model)
        self._card = describe_model(self._settings, notify=say)
        self._max_new_tokens = max_new_tokens
        self._loaded: Any = None
        self.name = f"{Path(model).name}@{self._card.revision}"

    def replies(self, prompts: Iterable[tuple[str, str]]) -> Iterator[Reply]:
        coming = iter(prompts)
        while window := list(islice(coming, _WINDOW)):
            yield from self._replies(window)

    def _replies(self, window: Sequence[tuple[str, str]]) -> Iterator[Reply]:
        tokenizer = self._card.tokenizer
        texts, has_chat = [text for _, text in window], bool(tokenizer.chat_template)
        if has_chat:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        else:
            texts = [f"{text}\n\nGrade:" for text in texts]
        ids = tokenizer(texts, add_special_tokens=not has_chat)["input_ids"]
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        context = self._card.context
        while order:
            width = len(ids[order[0]])
            if context is not None and width + self._max_new_tokens > context:
                yield window[order.pop(0)][0], None, f"longer than the context of the model, {context} tokens"
                continue
            count = max(1, min(_MOST_ROWS, _MOST_TOKENS // (width + self._max_new_tokens)))
            batch, order = order[:count], order[count:]
            for place, reply in zip(batch, self._generate([ids[place] for place in batch]), strict=True):
                yield window[place][0], reply, None

    def _generate(self, batch: Sequence[list[int]]) -> list[str]:
        import torch

        from millstream.traces.llm.decoding import Decoding, as_lists
        from millstream.traces.llm.model import load_model

        if self._loaded is None:
            self._loaded = load_model(self._settings, self._card)
        loaded = self._loaded
        prompts = loaded.padded(batch)
        config = Decoding(max_new_tokens=self._max_new_tokens).config(eos=sorted(loaded.eos) or None, pad=loaded.pad)
        with torch.inference_mode():
            found = loaded.model.generate(
                input_ids=prompts.ids_BT, attention_mask=prompts.mask_BT, generation_config=config
            )
        replies = as_lists(found.sequences[:, prompts.prompt :])
        return loaded.tokenizer.batch_decode(replies, skip_special_tokens=True)
