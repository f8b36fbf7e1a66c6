"""Answers as tokens and text: where a generated or given one starts and ends, and the characters of its tokens."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import cast

from millstream.errors import BadSetting
from millstream.traces.llm.model import Tokenizer
from millstream.traces.llm.questions import Given

Ranges = list[tuple[int, int]]  # of characters: start and end
ENDS = ("line", "sentence")
_LINE = re.compile(r"\n")
# Not after an initial, the number of a list or one of these titles: "J. K. Rowling", "1.", "Dr. Seuss".
_SENTENCE = re.compile(
    r"""(?<!\b[A-Z\d])(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?]+["'”’)\]]*(?=\s|$)|(?=\n)"""
)
_PART = "\ufffd"  # what a part of a character is decoded to


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt: `ids` up to the token that ended it; `length` of them from `begin` on are it.

    Those before `begin` are reasoning. If that does not end, the last token stands for an answer that is empty.
    """

    ids: list[int]
    length: int
    text: str  # of the answer
    whole_text: str  # of all ids
    finish: str  # eos, stop, length, given, or as the server says
    begin: int = 0
    offsets: Ranges | None = field(default=None, compare=False)  # the characters of `text` that each of `ids` covers


@dataclass(frozen=True)
class Part:
    """Which part of a text is the answer: after a mark, such as `</think>`, and its first sentence or line, or all."""

    after: str | None = None
    end: str | None = None  # sentence or line

    def __post_init__(self) -> None:
        if self.end is not None and self.end not in ENDS:
            raise BadSetting(f"answer_end={self.end}: must be one of {', '.join(ENDS)}")
        if self.after == "":
            raise BadSetting("answer_after=: is empty. Give the mark that ends the reasoning, such as </think>")


ALL = Part()


def cut_answer(
    tokenizer: Tokenizer,
    generated: Sequence[int],
    *,
    eos: Container[int],
    stop: Sequence[str],
    part: Part = ALL,
) -> Answer:
    """Cut at the end of the answer: the end-of-text token, a stop string, or the maximum length."""
    ids = list(generated)  # padding only follows an end-of-text token or a stop string, and is cut with it
    end = next((index for index, token in enumerate(ids) if token in eos), None)
    count, finish = (len(ids), "length") if end is None else (end, "eos")
    ids = ids[: count + (end is not None)]
    text, ranges, complete = decode(tokenizer, ids[:count])
    cut = len(text)
    if any(mark in text for mark in stop):
        count = next(n for n, ready in enumerate(complete, 1) if any(mark in text[:ready] for mark in stop))
        ids, text, finish = ids[:count], text[: complete[count - 1]], "stop"
        cut = min(found for found in map(text.find, stop) if found >= 0)
    begin, start, cut = _chosen(tokenizer, ids[:count], text, ranges, cut, part, ended=finish != "length")
    return Answer(
        ids=ids,
        length=sum(end <= cut for _, end in ranges[begin:count]) if start < cut or not begin else 0,
        text=text[start:cut].strip(),
        whole_text=text,
        finish=finish,
        begin=min(begin, max(len(ids) - 1, 0)),
        offsets=_within(ranges[:count], *_stripped(text, start, cut), more=len(ids) - count),
    )


def given_answer(
    tokenizer: Tokenizer, given: Given, ids: Sequence[int], *, eos: Container[int], part: Part = ALL
) -> Answer:
    """A given answer as it is: its text is not stripped, and its tokens are all there are."""
    count = len(ids) - (bool(ids) and ids[-1] in eos)
    decoded, ranges, _ = decode(tokenizer, ids[:count])
    text = decoded.strip() if given.text is None else given.text
    found = _aligned(ranges, decoded, text)
    if found is None and given.text is not None:
        found = _mapped(tokenizer, text, list(ids[:count]))
    thinking = 0
    if found is None and part.after is not None:  # servers may return the text without the reasoning in the tokens
        thinking, after, _ = _chosen(tokenizer, ids[:count], decoded, ranges, len(decoded), part, ended=True)
        found = _aligned([(first - after, last - after) for first, last in ranges], decoded[after:], text)
        part = Part(end=part.end)
    if found is None:  # the text is of other tokens: a part of it cannot be found among these
        return Answer(list(ids), count, text, text, given.finish or "given")
    begin, start, cut = _chosen(tokenizer, ids[:count], text, found, len(text), part, ended=True)
    begin = max(begin, thinking)
    whole = (start, cut) == (0, len(text))
    return Answer(
        ids=list(ids),
        length=sum(end <= cut for _, end in found[begin:]) if start < cut or not begin else 0,
        text=text if whole else text[start:cut].strip(),
        whole_text=decoded if given.text is None else text,
        finish=given.finish or ("eos" if count < len(ids) else "given"),
        begin=min(begin, max(len(ids) - 1, 0)),
        offsets=_within(found, *((0, len(text)) if whole else _stripped(text, start, cut)), more=len(ids) - count),
    )


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, Ranges, list[int]]:
    """The text of tokens, the characters that each covers, and how many are complete after each.

    A token with a part of a character covers all of it; a special token has no text. Each token is decoded with those
    before it until a character is complete, as inference servers do when they stream: linear in the number of tokens.
    """
    text = _text(tokenizer, ids)
    ranges: Ranges = []
    complete: list[int] = []
    first = read = end = 0  # tokens before `read` are decoded; those from `first` on are the context of the next
    pieces: list[str] = []
    for count in range(1, len(ids) + 1):
        before, now = _text(tokenizer, ids[first:read]), _text(tokenizer, ids[first:count])
        if now == before and count == read + 1:  # a special token
            ranges.append((end, end))
            read = count
        elif len(now) > len(before) and not now.endswith(_PART):
            pieces.append(now[len(before) :])
            ranges += [(end, end + 1)] * (count - read - 1)
            ranges.append((end, end := end + len(pieces[-1])))
            first, read = read, count
        complete.append(end)
    ranges += [(end, len(text))] * (len(ids) - len(ranges))  # a character that is never complete
    if text.startswith("".join(pieces)):
        return text, ranges, complete
    # The text of a token depends on what follows: decode every beginning.
    complete = [_shared(_text(tokenizer, ids[:count]), text) for count in range(1, len(ids) + 1)]
    return text, list(zip([0, *complete], complete, strict=False)), complete


def _chosen(
    tokenizer: Tokenizer, ids: Sequence[int], text: str, ranges: Ranges, cut: int, part: Part, *, ended: bool
) -> tuple[int, int, int]:
    """First token, first character and end of the chosen part of `text[:cut]`.

    A text without the mark that has not `ended` is all reasoning, and the answer is empty.
    """
    begin = start = 0
    if part.after is not None:
        place, number = text.find(part.after, 0, cut), _token_of(tokenizer, part.after)
        if number is not None and number in ids:  # a special token has no text
            begin = list(ids).index(number) + 1
            start = ranges[begin - 1][1]
        elif place >= 0:
            start = place + len(part.after)
            begin = sum(end <= start for _, end in ranges)
        elif not ended:
            begin, start = len(ids), cut
    if part.end is not None:
        first = _stripped(text, start, cut)[0]
        found = (_LINE if part.end == "line" else _SENTENCE).search(text, first, cut)
        cut = cut if found is None else found.start() if part.end == "line" else found.end()
    return begin, min(start, cut), cut


def _token_of(tokenizer: Tokenizer, mark: str) -> int | None:
    """The token that is this mark, if there is one."""
    ids = tokenizer([mark], add_special_tokens=False)["input_ids"][0]
    return ids[0] if len(ids) == 1 else None


def _aligned(ranges: Ranges, decoded: str, text: str) -> Ranges | None:
    """The ranges in `text`, which may begin with other white space than what was decoded, and end earlier.

    Servers return the tokens of a stop string, but not its text: their ranges end after that of the text.
    """
    answer = text.strip()
    if not decoded.lstrip().startswith(answer):
        return None
    shift = (len(text) - len(text.lstrip())) - (len(decoded) - len(decoded.lstrip())) if answer else 0
    return [(max(start + shift, 0), max(end + shift, 0)) for start, end in ranges]


def _mapped(tokenizer: Tokenizer, text: str, ids: list[int]) -> Ranges | None:
    """The ranges as a tokenizer states them that changes texts, if these are its tokens."""
    try:
        found = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)  # pyright: ignore
    except NotImplementedError:  # slow tokenizers
        return None
    pairs = cast("Ranges", found["offset_mapping"][0])
    return pairs if found["input_ids"][0] == ids else None


def _shared(one: str, other: str) -> int:
    """The number of characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return end - len(part.lstrip()), start + len(part.rstrip()) if part.strip() else end


def _within(ranges: Ranges, start: int, end: int, *, more: int = 0) -> Ranges:
    """The ranges from `start` on, cut to before `end`, and `more` empty ones for the tokens that ended the answer."""
    size = max(end - start, 0)
    cut = [(min(max(first - start, 0), size), min(max(last - start, 0), size)) for first, last in ranges]
    return cut + [(size, size)] * more


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)
