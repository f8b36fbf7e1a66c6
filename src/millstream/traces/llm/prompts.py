"""Questions -> prompts: the text around a question, a chat template, or prompts that the questions bring along."""

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.core.registry import extensions
from millstream.errors import BadSetting
from millstream.traces.llm.model import Tokenizer
from millstream.traces.llm.questions import Question

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

    def ids(self, tokenizer: Tokenizer, questions: Sequence[Question]) -> list[list[int]]:
        """The token ids of each prompt: those given, else of the question's own prompt or messages, else of the text.

        The tokenizer adds special tokens to a prompt of the question's own, unless it begins with one.
        """
        begin: str | None = getattr(tokenizer, "bos_token", None)
        found: list[list[int]] = [[] for _ in questions]
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by whether special tokens are added
        for place, question in enumerate(questions):
            if question.given is not None and question.given.prompt_ids is not None:
                found[place] = list(question.given.prompt_ids)
            elif question.prompt is not None:
                texts[not (begin and question.prompt.startswith(begin))][place] = question.prompt
            elif question.messages is not None:
                texts[False][place] = _chat(tokenizer, [dict(message) for message in question.messages])
            else:
                texts[self.special][place] = self.fill(question.question)
        for special, by_place in texts.items():
            if by_place:
                encoded = tokenizer(list(by_place.values()), add_special_tokens=special)["input_ids"]
                for place, ids in zip(by_place, encoded, strict=True):
                    found[place] = ids
        return found


def make_prompt(spec: str, tokenizer: Tokenizer, *, stop: str | None) -> Prompt:
    """`auto` is the chat template of the model if it has one, else plain. `stop`: strings separated by `|`."""
    has_chat = bool(tokenizer.chat_template)
    name = ("chat" if has_chat else "plain") if spec == "auto" else spec
    if name == "chat":
        if not has_chat:
            raise BadSetting("prompt=chat: this model has no chat template; use prompt=plain or prompt=few-shot")
        text = _chat(tokenizer, [{"role": "user", "content": CHAT.replace(QUESTION, _MARK)}])
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


def built_in_prompts() -> Mapping[str, str]:
    """Prompts by name, each with a `{question}`; the default prompt of the model of the same name."""
    return ChainMap(*(module.PROMPTS for module in extensions("built_ins")))


def _chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Messages in the template of the model, which adds the special tokens, up to where the answer starts."""
    if not tokenizer.chat_template:
        raise BadSetting("the questions have messages, but this model has no chat template. Give them a prompt column")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _stops(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    escaped = given.encode("latin-1", "backslashreplace")  # so that unicode_escape keeps non-Latin characters
    parts = escaped.decode("unicode_escape") if "\\" in given else given
    return tuple(part for part in parts.split("|") if part)
