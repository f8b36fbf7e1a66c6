"""What we use of a Hugging Face tokenizer, with types."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Texts -> ids and back."""

    chat_template: str | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool = False) -> list[str]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...
