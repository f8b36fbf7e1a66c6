"""Questions -> prompts: the text around a question, a chat template, or prompts that the questions bring along."""

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millstream.core.registry import extensions
from millstream.errors import BadSetting
from millstream.traces.llm.answers import ALL, Part
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
WITH_CONTEXT = {
    "plain": "Answer the question concisely, from the context.\n\nContext: {context}\n\nQ: {question} A:",
    "chat": "Answer the question concisely, from the context, with the answer only.\n\n{context}\n\n{question}",
}
QUESTION, CONTEXT = "{question}", "{context}"
# {name}, { name }, {name.part}, {name[0]}, {name!r} or {name:>9}, as Python fills in; {2} and {} may be LaTeX
_FIELD = r"\{\s*[^\W\d]\w*(?:\.\w+|\[\w*\])*\s*(?:![ars])?(?::[^{}\"'\s]*)?\}"
_PLACEHOLDER = re.compile(rf"\{{{_FIELD}\}}|{_FIELD}")
_FILLED = re.compile(r"\{(?:question|context)\}")
_MARKS = {QUESTION: "\u2063question\u2063", CONTEXT: "\u2063context\u2063"}  # stand for them in a chat template


@dataclass(frozen=True)
class EncodedQuestion:
    """A question, its prompt as token ids and, if it is given, its answer."""

    question: Question
    ids: list[int]
    answer_ids: list[int] | None = None
    cut: int = 0  # characters of the context that are left out


@dataclass(frozen=True)
class Prompt:
    """The text around the question, and which part of what follows is the answer."""

    name: str
    text: str  # contains {question} once, and may contain {context} once
    stop: tuple[str, ...]
    special: bool  # whether the tokenizer adds special tokens; a chat template already has them
    part: Part = ALL
    system: str | None = None  # of chats
    truncate: bool = False  # cut a context that is too long
    bare: str | None = None  # the text around a question without a context, if `text` shows one

    def fill(self, question: str, context: str | None = None) -> str:
        texts = {QUESTION: question, CONTEXT: context or ""}
        text = self.text if context is not None or self.bare is None else self.bare
        return _FILLED.sub(lambda found: texts[found[0]], text)

    def encode(
        self, tokenizer: Tokenizer, questions: Sequence[Question], *, context: int | None = None, new: int = 0
    ) -> list[EncodedQuestion]:
        """Prompts and given answers as token ids.

        A given text is what follows the prompt, so it is tokenised together with it. Where the two share a token, the
        answer is tokenised alone, so that the prompt has the tokens it has when an answer is generated. Between a text
        prompt of ours that ends in no white space and an answer that begins with none, there is a space, as a model
        would generate it. `context` and `new` are the tokens of the model and of an answer, for `truncate`.
        """
        texts = [self.text_of(tokenizer, question) for question in questions]
        found = self._encode(tokenizer, questions, texts)
        if not self.truncate or context is None:
            return found
        return [
            self._shortened(tokenizer, one, context - (new if one.answer_ids is None else len(one.answer_ids)))
            for one in found
        ]

    def text_of(self, tokenizer: Tokenizer, question: Question) -> tuple[str, bool] | None:
        """The prompt, and whether special tokens are added to it: not to a chat, nor to one that begins with them.

        None if the question brings token ids.
        """
        begin: str | None = getattr(tokenizer, "bos_token", None)
        if question.given is not None and question.given.prompt_ids is not None:
            return None
        if question.prompt is not None:
            return question.prompt, not (begin and question.prompt.startswith(begin))
        if question.messages is not None:
            return _chat(tokenizer, [dict(message) for message in question.messages], self.system), False
        if CONTEXT in self.text and question.context is None and self.bare is None:
            raise BadSetting(
                f"prompt={self.name}: contains {CONTEXT}, but the question {question.id!r} has no context. Use a "
                f"prompt without {CONTEXT}"
            )
        return self.fill(question.question, question.context), self.special

    def _encode(
        self, tokenizer: Tokenizer, questions: Sequence[Question], texts: Sequence[tuple[str, bool] | None]
    ) -> list[EncodedQuestion]:
        prompts = _tokens(tokenizer, texts)
        answers: list[str | None] = []
        for question, text in zip(questions, texts, strict=True):
            given = question.given
            answer = None if given is None or given.ids is not None else given.text
            ours = text[0] if text is not None and text[1] and question.prompt is None else None
            apart = ours and answer and not ours[-1].isspace() and not answer[0].isspace()
            answers.append(f" {answer}" if apart else answer)
        joined = _tokens(
            tokenizer,
            [
                (text[0] + answer, text[1]) if text and answer else None
                for text, answer in zip(texts, answers, strict=True)
            ],
        )
        alone = _tokens(tokenizer, [(answer, False) if answer else None for answer in answers])
        found: list[EncodedQuestion] = []
        for question, prompt, whole, answer in zip(questions, prompts, joined, alone, strict=True):
            given = question.given
            ids = list(given.prompt_ids) if given is not None and given.prompt_ids is not None else prompt
            follows = answer if whole[: len(ids)] != ids else whole[len(ids) :]
            given_ids = None if given is None else follows if given.ids is None else list(given.ids)
            found.append(EncodedQuestion(question, ids, given_ids))
        return found

    def _shows_context(self, question: Question) -> bool:
        """Whether the context is in the prompt, as text."""
        if question.given is not None and question.given.prompt_ids is not None:
            return False
        if question.prompt is None and question.messages is None:
            return CONTEXT in self.text
        texts = (
            [question.prompt] if question.prompt is not None else [one["content"] for one in question.messages or ()]
        )
        return any(question.context is not None and question.context in text for text in texts)

    def _shortened(self, tokenizer: Tokenizer, encoded: EncodedQuestion, limit: int) -> EncodedQuestion:
        """With the end of the context cut off, so that the prompt has at most `limit` tokens, if that is enough."""
        question = whole = encoded.question
        if not self._shows_context(question):
            return encoded
        while (over := len(encoded.ids) - limit) > 0 and question.context:
            tokens = len(_tokens(tokenizer, [(question.context, False)])[0])
            keep = int(len(question.context) * max(0.0, 1 - over / max(tokens, 1)))
            question = _with_context(question, question.context[: min(keep, len(question.context) - 1)].rstrip())
            encoded = self._encode(tokenizer, [question], [self.text_of(tokenizer, question)])[0]
        return replace(encoded, cut=len(whole.context or "") - len(question.context or ""))


def _with_context(question: Question, context: str) -> Question:
    """The question with another context, also where its own prompt or messages show it."""
    old, prompt, messages = question.context or "", question.prompt, question.messages
    return replace(
        question,
        context=context,
        prompt=None if prompt is None else prompt.replace(old, context, 1),
        messages=None
        if messages is None
        else tuple({**one, "content": one["content"].replace(old, context, 1)} for one in messages),
    )


def _tokens(tokenizer: Tokenizer, texts: Sequence[tuple[str, bool] | None]) -> list[list[int]]:
    """The tokens of texts, each with whether the tokenizer adds special ones; of none, none."""
    found: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = {place: text[0] for place, text in enumerate(texts) if text is not None and text[1] == special}
        if chosen:
            encoded = tokenizer(list(chosen.values()), add_special_tokens=special)["input_ids"]
            for place, ids in zip(chosen, encoded, strict=True):
                found[place] = ids
    return found


def check_prompt(spec: str, system: str | None) -> None:
    """BadSetting for texts that are wrong for any model, before one is made or loaded."""
    if spec not in ("auto", "plain", "few-shot", "chat", *built_in_prompts()):
        _own_text(spec.removeprefix("chat:"), spec)
    if system is not None:
        _unescape(system, f"system={system}")


def with_texts(tokenizer: Tokenizer, questions: Sequence[Question]) -> list[Question]:
    """The questions; one that is only the token ids of its prompt gets their text."""
    return [
        one
        if one.question or one.given is None
        else replace(one, question=tokenizer.decode(one.given.prompt_ids or (), skip_special_tokens=True).strip())
        for one in questions
    ]


def make_prompt(
    spec: str,
    tokenizer: Tokenizer,
    *,
    stop: str | None,
    context: bool = False,
    system: str | None = None,
    part: Part = ALL,
    truncate: bool = False,
) -> Prompt:
    """`auto` is the chat template of the model if it has one, else plain. `stop`: strings separated by `|`.

    `chat:TEXT` puts a text of one's own in the chat template. With `context`, the questions have one, and the prompts
    of ours show it.
    """
    check_prompt(spec, system)
    has_chat = bool(tokenizer.chat_template)
    system = None if system is None else _unescape(system, f"system={system}")
    name = ("chat" if has_chat else "plain") if spec == "auto" else spec
    if name == "chat" or name.startswith("chat:"):
        if not has_chat:
            raise BadSetting(f"prompt={spec}: this model has no chat template; use prompt=plain or prompt=few-shot")
        own = _own_text(name.removeprefix("chat:"), spec) if ":" in name else None
        text = _in_template(tokenizer, own or (WITH_CONTEXT["chat"] if context else CHAT), system)
        bare = _in_template(tokenizer, CHAT, system) if context and not own else None
        return Prompt("chat", text, _stops(stop, ()), False, part, system, truncate, bare)
    if system is not None:
        raise BadSetting(f"system={system}: is for chat templates, but prompt={name} is none; use prompt=chat")
    texts = {"plain": WITH_CONTEXT["plain"] if context else PLAIN, "few-shot": FEW_SHOT, **built_in_prompts()}
    text = texts[name] if name in texts else _own_text(name, spec)
    bare = PLAIN if context and name == "plain" else None
    return Prompt(name if name in texts else "own", text, _stops(stop, ("\n",)), True, part, None, truncate, bare)


def _in_template(tokenizer: Tokenizer, text: str, system: str | None) -> str:
    """The text in the chat template of the model, with its placeholders."""
    marked = _FILLED.sub(lambda found: _MARKS[found[0]], text)
    filled = _chat(tokenizer, [{"role": "user", "content": marked}], system)
    for placeholder, mark in _MARKS.items():
        filled = filled.replace(mark, placeholder)
    return filled


def _own_text(spec: str, name: str) -> str:
    is_file = spec.endswith(".txt") and Path(spec).exists()
    text = Path(spec).read_text(encoding="utf-8").removesuffix("\n") if is_file else spec
    if text.count(QUESTION) != 1 or text.count(CONTEXT) > 1:
        raise BadSetting(
            f"prompt={name}: must be one of auto, plain, few-shot, chat, a text that contains {{question}} once and "
            "{context} at most once, a .txt file of such a text, or chat: and a text or file"
        )
    return _unescape(text, f"prompt={name}")


def _unescape(text: str, name: str) -> str:
    """A prompt with `{{word}}` as `{word}`; any other placeholder would reach the model as it is written."""
    unknown = [found for found in _PLACEHOLDER.findall(_FILLED.sub("", text)) if not found.startswith("{{")]
    doubled = [f"{{{placeholder}}}" for placeholder in _MARKS if f"{{{placeholder}}}" in text]
    if unknown or doubled:
        raise BadSetting(
            f"{name}: contains {(doubled + unknown)[0]}, but only {QUESTION} and {CONTEXT} are filled in. Write "
            "braces that the model is to see twice: {{word}}"
        )
    return _PLACEHOLDER.sub(lambda found: found[0][1:-1] if found[0].startswith("{{") else found[0], text)


def built_in_prompts() -> Mapping[str, str]:
    """Prompts by name, each with a `{question}`; the default prompt of the model of the same name."""
    return ChainMap(*(module.PROMPTS for module in extensions("built_ins")))


def _chat(tokenizer: Tokenizer, messages: list[dict[str, str]], system: str | None) -> str:
    """Messages in the template of the model, which adds the special tokens, up to where the answer starts."""
    if not tokenizer.chat_template:
        raise BadSetting("the questions have messages, but this model has no chat template. Give them a prompt column")
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja2's, which is imported by the tokenizer only
        reason = " ".join(str(error).split())[:200]
        raise BadSetting(f"the chat template of this model refuses the messages ({reason})") from None


def _stops(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    escaped = given.encode("latin-1", "backslashreplace")  # so that unicode_escape keeps non-Latin characters
    parts = escaped.decode("unicode_escape") if "\\" in given else given
    return tuple(part for part in parts.split("|") if part)
