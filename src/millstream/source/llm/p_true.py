"""p(true): the model's own probability that its answer is right, asked with both orders of the choices at once."""

from collections.abc import Callable, Sequence

import torch

from millstream.source.llm.model import LoadedModel
from millstream.source.llm.tokenizer import Tokenizer

P_TRUE_SCHEMA = {"p_true": "float32", "p_true_a": "float32", "p_true_b": "float32"}
_TEXT = """Question: {question}
Proposed answer: {answer}
Is the proposed answer:
 (A) {first}
 (B) {second}
The proposed answer is: ("""
Padding = Callable[[Sequence[Sequence[int]]], tuple[torch.Tensor, torch.Tensor]]


def p_true(loaded: LoadedModel, pairs: Sequence[tuple[str, str]], *, pad: Padding) -> list[dict[str, object]]:
    """For each (question, answer): `p_true_a` with True as choice A, `p_true_b` with it as choice B, and their mean.

    None where the model cannot take so long a text.
    """
    orders = (("True", "False"), ("False", "True"))
    limit = loaded.card.context or 2**31
    asked: list[list[list[int]]] = []
    for question, answer in pairs:
        texts = [_TEXT.format(question=question, answer=answer, first=a, second=b) for a, b in orders]
        asked.append(loaded.tokenizer(texts)["input_ids"])
    fits = [max(map(len, both)) <= limit for both in asked]
    rows = [ids for both, fit in zip(asked, fits, strict=True) if fit for ids in both]
    chose_first = iter(_chose_first(loaded, *pad(rows)) if rows else [])
    found: list[dict[str, object]] = []
    for fit in fits:
        a, b = (next(chose_first), 1 - next(chose_first)) if fit else (None, None)
        found.append({"p_true": None if a is None or b is None else (a + b) / 2, "p_true_a": a, "p_true_b": b})
    return found


def _chose_first(loaded: LoadedModel, ids_BP: torch.Tensor, mask_BP: torch.Tensor) -> list[float]:
    """Probability of the letter A, of A and B."""
    places = (mask_BP.cumsum(1) - 1).clamp_min(0)
    logits_BV = loaded.model(
        input_ids=ids_BP, attention_mask=mask_BP, position_ids=places, use_cache=False, logits_to_keep=1
    ).logits[:, -1]
    logprobs = logits_BV.float().log_softmax(-1)
    first, second = (logprobs[:, _letter_ids(loaded.tokenizer, letter)].logsumexp(-1) for letter in "AB")
    return [float(chosen) for chosen in torch.sigmoid(first - second)]


def _letter_ids(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens that are this letter, with and without a blank before it."""
    return sorted({ids[-1] for ids in tokenizer([letter, f" {letter}"], add_special_tokens=False)["input_ids"]})
