"""Trains the model of `facts`, as in the package: `python -m millstream.demo.train_facts FOLDER`."""

import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millstream.demo.facts import (
    FACTS_PROMPT,
    REPORT,
    TIMES_SEEN,
    Fact,
    World,
    answer_text,
    draw_facts,
    training_facts,
    vocabulary_texts,
)
from millstream.traces.llm import transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

END, PAD = "<|end|>", "<|pad|>"
END_ID, PAD_ID = 0, 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """The shape of the model and its training, which ends at the accuracy `enough`."""

    num_tokens: int = 1500
    hidden: int = 128
    layers: int = 6
    heads: int = 4
    inner: int = 256
    initial_std: float = 0.06
    """Three times the usual 0.02: after 500 steps 45 % of 2,000 facts were learnt, against 16 % with 0.02."""
    batch_size: int = 32
    rate: float = 2e-3
    warm_up: int = 50
    enough: float = 0.5
    check_every: int = 25
    check_facts: int = 500
    most_steps: int = 1500


def train_facts(
    facts: Sequence[Fact], folder: Path, *, training: Training, seed: int, notify: Callable[[str], None]
) -> None:
    """Train a model on text about the facts; save it, its tokenizer and its accuracy on all facts in the folder.

    Training ends at an accuracy, not at a time limit: the outcome is the same on a slow machine.
    """
    with _seeded_torch(seed):
        tokenizer = learn_tokenizer(facts, num_tokens=training.num_tokens)
        model = _new_model(training, num_tokens=tokenizer.get_vocab_size())
        exam = _Exam.of(facts, tokenizer)
        steps = _train_model(
            model, _batches(facts, tokenizer, training, seed=seed), exam, training=training, notify=notify
        )
        model.half()  # pyright: ignore[reportUnknownMemberType]
        _save(model, tokenizer, folder)
        right = exam.take(model.float())  # pyright: ignore[reportUnknownMemberType]
    tiers = {name: [i for i, fact in enumerate(facts) if fact.exposure == name] for name in TIMES_SEEN}
    report = {
        "seed": seed,
        "steps": steps,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "questions": len(facts),
        "accuracy": _share(right),
        "accuracy_by_exposure": {name: _share(right[rows]) for name, rows in tiers.items()},
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Exam:
    """Questions with their correct answers as rows of tokens, and a mask of the tokens that are the answer.

    Greedy decoding generates the correct answer if and only if each of its tokens is the most likely one given the
    correct tokens before it, so one forward pass replaces generation.
    """

    tokens: Tensor
    is_answer: Tensor

    @staticmethod
    def of(facts: Sequence[Fact], tokenizer: "Tokenizer") -> "_Exam":
        rows = [_encode(tokenizer, answer_text(fact)) for fact in facts]
        starts = [len(_encode(tokenizer, FACTS_PROMPT.format(question=fact.question))) - 1 for fact in facts]
        tokens = _pad(rows)
        columns = torch.arange(tokens.shape[1])
        is_answer = (columns >= torch.tensor(starts)[:, None]) & (tokens != PAD_ID)
        return _Exam(tokens=tokens, is_answer=is_answer)

    def take(self, model: "LlamaForCausalLM", num_facts: int | None = None) -> Tensor:
        """Which of the first `num_facts` questions (all by default) are answered correctly."""
        model.eval()
        right: list[Tensor] = []
        with torch.no_grad():
            chunks = _chunks(self.tokens[:num_facts], 256), _chunks(self.is_answer[:num_facts], 256)
            for tokens, is_answer in zip(*chunks, strict=True):
                best = _logits(model, tokens[:, :-1]).argmax(dim=-1)
                right.append(((best == tokens[:, 1:]) | ~is_answer[:, 1:]).all(dim=1))
        model.train()
        return torch.cat(right)


def _train_model(
    model: "LlamaForCausalLM",
    batches: Iterator[Tensor],
    exam: _Exam,
    *,
    training: Training,
    notify: Callable[[str], None],
) -> int:
    """Train until the accuracy is high enough; returns the number of steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / training.warm_up))
    model.train()
    for step, tokens in zip(range(1, training.most_steps + 1), batches, strict=False):
        logits = _logits(model, tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD_ID)
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        warm_up.step()
        if step % training.check_every == 0:
            known = _share(exam.take(model, training.check_facts))
            if step % (4 * training.check_every) == 0:
                notify(f"facts: step {step}, {known:.0%} of answers right; training stops at {training.enough:.0%}")
            if known >= training.enough:
                return step
    return training.most_steps


def _batches(facts: Sequence[Fact], tokenizer: "Tokenizer", training: Training, *, seed: int) -> Iterator[Tensor]:
    """Endless passes over the training text, each shuffled differently.

    A row is one question with its answer, then the statement of another fact: rows have nearly the same length, so
    there is little padding, and the question comes first, as in a prompt.
    """
    trained = training_facts(facts)
    answers = [[*_encode(tokenizer, answer_text(fact)), END_ID] for fact in trained]
    statements = [[*_encode(tokenizer, f"{fact.statement}\n"), END_ID] for fact in trained]
    rng = Random(seed)
    while True:
        pairs = zip(rng.sample(answers, len(trained)), rng.sample(statements, len(trained)), strict=True)
        yield from _chunks(_pad([answer + statement for answer, statement in pairs]), training.batch_size)


def learn_tokenizer(facts: Sequence[Fact], *, num_tokens: int) -> "Tokenizer":
    transformers()  # imports tokenizers too, or raises an error that names the missing extra
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[END, PAD],  # numbered END_ID, PAD_ID
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(vocabulary_texts(facts), trainer)
    return tokenizer


def _new_model(training: Training, *, num_tokens: int) -> "LlamaForCausalLM":
    hf = transformers()
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=training.hidden,
            intermediate_size=training.inner,
            num_hidden_layers=training.layers,
            num_attention_heads=training.heads,
            initializer_range=training.initial_std,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )


def _save(model: "LlamaForCausalLM", tokenizer: "Tokenizer", folder: Path) -> None:
    transformers("utils.logging").disable_progress_bar()
    model.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    fast = transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def _logits(model: "LlamaForCausalLM", tokens: Tensor) -> Tensor:
    output: Any = model(input_ids=tokens, use_cache=False)
    return output.logits


def _encode(tokenizer: "Tokenizer", text: str) -> list[int]:
    return tokenizer.encode(text).ids


def _pad(rows: Sequence[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])


def _chunks(rows: Tensor, size: int) -> Iterator[Tensor]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _share(right: Tensor) -> float:
    return round(right.double().mean().item(), 4)


@contextmanager
def _seeded_torch(seed: int) -> Generator[None]:
    """Seeded, on two threads (more only slow down a model of this size); restores both afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(min(2, num_threads))
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


if __name__ == "__main__":
    train_facts(draw_facts(World(), seed=0), Path(sys.argv[1]), training=Training(), seed=0, notify=print)
