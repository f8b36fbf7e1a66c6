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
    """For each (question, answer): `p_true_a` with True as choice A, `p_true_b` with True as choice B, and their mean."""
    texts = [
        _TEXT.format(question=question, answer=answer, first=first, second=second)
        for first, second in (("True", "False"), ("False", "True"))
        for question, answer in pairs
    ]
    tokenizer = loaded.tokenizer
    ids_BP, mask_BP = pad(tokenizer(texts)["input_ids"])
    places = (mask_BP.cumsum(1) - 1).clamp_min(0)
    logits_BV = loaded.model(
        input_ids=ids_BP, attention_mask=mask_BP, position_ids=places, use_cache=False, logits_to_keep=1
    ).logits[:, -1]
    logprobs = logits_BV.float().log_softmax(-1)
    first, second = (logprobs[:, _letter_ids(tokenizer, letter)].logsumexp(-1) for letter in "AB")
    chose_first = [float(chosen) for chosen in torch.sigmoid(first - second)]
    as_a, as_b = chose_first[: len(pairs)], [1 - chosen for chosen in chose_first[len(pairs) :]]
    return [{"p_true": (a + b) / 2, "p_true_a": a, "p_true_b": b} for a, b in zip(as_a, as_b, strict=True)]


def _letter_ids(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens that are this letter, with and without a blank before it."""
    return sorted({ids[-1] for ids in tokenizer([letter, f" {letter}"], add_special_tokens=False)["input_ids"]})
