"""A cell of a questions file -> a text, answers, messages, numbers or spans. ValueError says what is wrong with it."""

import ast
import json
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from millstream.core.config import parse_json

Messages = tuple[dict[str, str], ...]


def answers(value: object) -> list[str]:
    """The accepted answers in a cell: a text, a list (possibly written as text), or the dict of TriviaQA."""
    if value is None or value == "":
        return []
    if isinstance(value, dict):
        row = {str(key).lower(): item for key, item in cast("dict[str, object]", value).items()}
        names = ("value", "aliases", "humananswers", "normalizedaliases", "normalized_aliases")
        return [answer for name in names for answer in answers(row.get(name))]
    if isinstance(value, list | tuple | np.ndarray):
        return [answer for item in cast("Iterable[object]", value) for answer in answers(item)]
    text = str(value).strip()
    found = _written_list(text)
    if found is not None:
        return answers(found)
    return [text] if text else []


def text(value: object) -> str | None:
    """A text or a number; it may be empty."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(f"must be text, not {_short(value)}")


def number(value: object) -> int | None:
    """A whole number, 0 or above; also written as text."""
    if value is None or value == "":
        return None
    try:
        found = int(str(value))
    except ValueError:
        found = -1
    if found < 0:
        raise ValueError(f"must be a whole number, not {_short(value)}")
    return found


def context(value: object) -> str | None:
    """A text, or a list of passages, which are joined by blank lines; a passage is a text, or a `text` with `title`."""
    passages = _items(value)
    if isinstance(value, str) and not all(isinstance(item, str | dict) for item in passages or [None]):
        passages = [value]  # it only looks like a list
    found: list[str] = []
    for passage in passages or ():
        row = _row(passage)
        parts = [row[name] for name in ("title", "text") if row.get(name)] if row else [passage]
        texts = [part for part in parts if isinstance(part, str)]
        if not parts or len(texts) < len(parts):
            raise ValueError(f"must be text or a list of texts, not {_short(passage)}")
        found.append("\n".join(texts).strip())
    return "\n\n".join(passage for passage in found if passage) or None


def messages(value: object) -> tuple[Messages | None, str | None]:
    """The messages of a chat, and the answer if the last one is the assistant's."""
    if value is None or value == "":
        return None, None
    found: list[dict[str, str]] = []
    for item in _items(value) or [value]:
        message = _row(item)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"must be a list of messages with role and content, both text, not {_short(item)}")
        found.append({"role": role, "content": content})
    answer = found.pop()["content"] if found[-1]["role"] == "assistant" else None
    if not found:
        raise ValueError(f"must have a message before the answer, not {_short(value)}")
    return tuple(found), answer


def token_ids(value: object) -> tuple[int, ...] | None:
    """The ids of tokens, as a list."""
    if value is None or value == "":
        return None
    found = _items(value)
    if found is None or not all(type(item) is int and item >= 0 for item in found):
        raise ValueError(f"must be a list of token ids, not {_short(value)}")
    return tuple(cast("list[int]", found))


def logprobs(value: object, ids: Sequence[int] | None) -> tuple[float, ...] | None:
    """A log-probability per token: numbers, or what vLLM and OpenAI-compatible servers return for tokens `ids`."""
    if value is None or value == "":
        return None
    row = _row(value)  # of a completion, or of a chat completion
    found: list[float] = []
    for place, item in enumerate(_items(row.get("token_logprobs") or row.get("content") if row else value) or [None]):
        one = _row(item)
        if ids is not None and place < len(ids) and "logprob" not in one:  # vLLM has the tokens considered by their ids
            one = _row(one.get(str(ids[place])))
        logprob = one.get("logprob") if isinstance(item, dict) else item
        if not isinstance(logprob, int | float):
            raise ValueError(f"must be a list of log-probabilities of the answer's tokens, not {_short(value)}")
        found.append(float(logprob))
    if ids is not None and len(found) != len(ids):
        raise ValueError(f"has {len(found)} log-probabilities for {len(ids)} tokens")
    return tuple(found)


def spans(value: object, answer: str | None) -> tuple[tuple[int, int, str | None], ...] | None:
    """Start, end and label of the spans of an answer: lists, or dicts with these names or those of RAGTruth."""
    if value is None or value == "":
        return None
    items = _items(value)
    if items is None:
        raise ValueError(f"must be a list of spans with start and end, not {_short(value)}")
    found: list[tuple[int, int, str | None]] = []
    for item in items:
        row = _row(item)
        named = [row.get("start"), row.get("end"), row.get("label", row.get("label_type"))]
        start, end, label = named if row else [*(_items(item) or ()), None, None, None][:3]
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
            raise ValueError(f"must be a list of spans with start and end, not {_short(item)}")
        if answer is not None and end > len(answer):
            raise ValueError(f"has a span up to character {end}, but the answer has {len(answer)}")
        found.append((start, end, None if label is None else str(label)))
    return tuple(found)


def verdict(value: object, spans: Sequence[object] | None) -> str | None:
    """right or wrong; without one, an answer with spans is wrong, and one that has none after annotation is right."""
    if value in (None, ""):
        return None if spans is None else "wrong" if spans else "right"
    if value not in ("right", "wrong", "ambiguous", "refused"):
        raise ValueError(f"must be right, wrong, ambiguous or refused, not {_short(value)}")
    return str(value)


def about(value: object) -> str | None:
    """A dict as JSON text, or a text."""
    row = _row(value)
    return json.dumps(row, ensure_ascii=False) if row else text(value or None)


def _row(value: object) -> dict[str, object]:
    """A dict, empty if it is none."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _items(value: object) -> list[object] | None:
    """The items of a list, possibly written as text; None if it is none."""
    if isinstance(value, str):
        return _written_list(value.strip())
    return list(cast("Iterable[object]", value)) if isinstance(value, list | tuple | np.ndarray) else None


def _written_list(text: str) -> list[object] | None:
    """A list written as JSON or as Python code."""
    if text.startswith("[") and text.endswith("]"):
        for read in (parse_json, ast.literal_eval):
            try:
                return list(read(text))
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):  # nested too deeply
                continue
    return None


def _short(value: object) -> str:
    found = repr(value)
    return found if len(found) <= 80 else f"{found[:77]}..."
