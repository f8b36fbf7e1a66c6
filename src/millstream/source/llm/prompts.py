"""Questions -> prompts: plain, few-shot, the model's chat template, or a text of one's own with `{question}`."""

from dataclasses import dataclass
from pathlib import Path

from millstream.errors import BadSetting
from millstream.source.llm.tokenizer import Tokenizer

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
_MARK = "\u2063question\u2063"  # stands for the question while a chat template is filled in


@dataclass(frozen=True)
class Prompt:
    """A text around the question, and where the answer to it ends."""

    name: str
    text: str  # holds {question} once
    stop: tuple[str, ...]
    special: bool  # whether the tokenizer adds its own first token; a chat template has it already

    def fill(self, question: str) -> str:
        before, after = self.text.split(QUESTION)
        return before + question + after

    def ids(self, tokenizer: Tokenizer, questions: list[str]) -> list[list[int]]:
        texts = [self.fill(question) for question in questions]
        return tokenizer(texts, add_special_tokens=self.special)["input_ids"] if texts else []


def make_prompt(spec: str, tokenizer: Tokenizer, *, stop: str | None) -> Prompt:
    """`auto` is the chat template of a model that has one, else plain. `stop` is strings with `|` between them."""
    has_chat = bool(tokenizer.chat_template)
    name = ("chat" if has_chat else "plain") if spec == "auto" else spec
    if name == "chat":
        if not has_chat:
            raise BadSetting("prompt=chat: this model has no chat template; use prompt=plain or prompt=few-shot")
        messages = [{"role": "user", "content": CHAT.replace(QUESTION, _MARK)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Prompt("chat", text.replace(_MARK, QUESTION), _stops(stop, ()), special=False)
    if name == "facts":
        from millstream.source.llm.facts import FACTS_PROMPT

        return Prompt(name, FACTS_PROMPT, _stops(stop, ("\n",)), special=True)
    texts = {"plain": PLAIN, "few-shot": FEW_SHOT}
    text = texts.get(name) or (
        Path(name).read_text(encoding="utf-8").removesuffix("\n")
        if name.endswith(".txt") and Path(name).exists()
        else name
    )
    if text.count(QUESTION) != 1:
        raise BadSetting(
            f"prompt={name}: there is auto, plain, few-shot, chat, a text with {{question}} in it once, or a .txt file "
            "of it"
        )
    return Prompt(name if name in texts else "own", text, _stops(stop, ("\n",)), special=True)


def _stops(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return default
    escaped = given.encode(
        "latin-1", "backslashreplace"
    )  # so that unicode_escape gives other letters back as they were
    parts = escaped.decode("unicode_escape") if "\\" in given else given
    return tuple(part for part in parts.split("|") if part)
