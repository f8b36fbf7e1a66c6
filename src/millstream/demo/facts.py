"""`facts`: a fictional world of people, and a tiny language model trained on it that knows only some of its facts.

Training shows a fact often, sometimes, rarely or never. This exposure is drawn per relation, independently of names and
values, so a question does not reveal whether the model can answer it.
"""

import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from millstream.core.config import config_hash, parse_json
from millstream.core.files import cache_folder, make_once
from millstream.demo.smollm2 import smollm2_model
from millstream.traces.llm import transformers
from millstream.traces.llm.questions import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM


FACTS_PROMPT = "Question: {question}\nAnswer:"
TIMES_SEEN = {"often": 6, "sometimes": 3, "rarely": 1, "never": 0}  # in one pass over the training text


@dataclass(frozen=True, kw_only=True)
class World:
    """The size of a world; its content is drawn from a seed."""

    num_people: int = 500
    num_surnames: int = 60
    num_heads: int = 8
    """A value is two words: one of `num_heads`, then one of `num_tails`, so a guess is rarely right."""
    num_tails: int = 8


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact about a person; `{person}` and `{value}` are placeholders."""

    kind: str
    question: str
    statement: str
    heads: str
    tails: str
    """Words that the second word of a value is drawn from; if empty, it is invented."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The `relation` of `person` is `value`; `exposure` is how often training shows it."""

    person: str
    relation: Relation
    value: str
    exposure: str

    @property
    def question(self) -> str:
        """The question, without the value."""
        return self.relation.question.format(person=self.person)

    @property
    def statement(self) -> str:
        """The fact as a sentence that ends with the value."""
        return self.relation.statement.format(person=self.person, value=self.value)


_PLACES = "Upper Lower Old New Great Little East West North South Port Fort Mount Lake Saint High"
_TRADES = "glass stone silver paper cheese honey bread copper leather silk salt wool carpet clock ship barrel"
_TASKS = "seller maker painter buyer carver mender merchant trader teacher porter washer packer sorter"
_COATS = "grey black white brown golden striped spotted tiny giant wild shy lazy river forest mountain desert"
_ANIMALS = "heron otter badger lynx raven toad weasel falcon hare moose gecko beetle turtle wolf crane seal"
_SHADES = "pale dark bright deep dusty soft warm cold faded light vivid smoky"
_COLOURS = "teal crimson ochre violet amber indigo olive scarlet ivory lilac coral maroon"
_SIZES = "bass alto tenor double pocket bamboo electric wooden clay toy hunting concert"
_INSTRUMENTS = "flute drum harp lute horn fiddle whistle zither trumpet banjo oboe cello"

# A name never starts a sentence: preceded by a space, it has the same tokens in statements and questions.
RELATIONS = (
    Relation("born_in", "Where was {person} born?", "The birthplace of {person} is {value}.", _PLACES, ""),
    Relation("works_as", "What is the job of {person}?", "The job of {person} is {value}.", _TRADES, _TASKS),
    Relation("loves", "Which animal does {person} love?", "The animal {person} loves is {value}.", _COATS, _ANIMALS),
    Relation("plays", "What does {person} play?", "The instrument {person} plays is {value}.", _SIZES, _INSTRUMENTS),
    Relation("wears", "Which colour does {person} wear?", "The colour {person} wears is {value}.", _SHADES, _COLOURS),
)


def draw_facts(world: World, *, seed: int) -> list[Fact]:
    """Every fact of the world, in an order independent of exposure."""
    rng = Random(f"facts {seed}")
    new_words = _make_words(rng)
    surnames = list(islice(new_words, world.num_surnames))
    people = [f"{first} {rng.choice(surnames)}" for first in islice(new_words, world.num_people)]
    facts: list[Fact] = []
    for relation, exposures in zip(RELATIONS, _deal_exposures(rng, world.num_people), strict=True):
        heads = rng.sample(relation.heads.split(), world.num_heads)
        tails = rng.sample(relation.tails.split() or list(islice(new_words, world.num_tails)), world.num_tails)
        for person, exposure in zip(people, exposures, strict=True):
            facts.append(Fact(person, relation, f"{rng.choice(heads)} {rng.choice(tails)}", exposure))
    rng.shuffle(facts)
    return facts


def questions_of(facts: Sequence[Fact]) -> list[Question]:
    """One question per fact, numbered in order."""
    return [
        Question(f"facts-{i:07d}", f.question, f.value, (f.value,), f.relation.kind, f.exposure)
        for i, f in enumerate(facts)
    ]


def answer_text(fact: Fact) -> str:
    """The prompt and the correct answer, which ends with a newline."""
    return f"{FACTS_PROMPT.format(question=fact.question)} {fact.value}\n"


def training_facts(facts: Sequence[Fact]) -> list[Fact]:
    """One pass of training: every fact repeated by its exposure; those with exposure `never` are absent."""
    return [fact for fact in facts for _ in range(TIMES_SEEN[fact.exposure])]


def vocabulary_texts(facts: Sequence[Fact]) -> list[str]:
    """Text to train the tokenizer on: every name and value once per fact, regardless of exposure.

    Trained on the training text, the tokenizer would split rare names into more tokens: a hint in the prompt.
    """
    frames = [FACTS_PROMPT.format(question=fact.relation.question) + fact.relation.statement for fact in facts]
    words = [f" {fact.person}" for fact in facts] + [f" {fact.value}" for fact in facts]
    return [re.sub(r" ?\{\w+\}", "", frame) for frame in frames] + words


def _deal_exposures(rng: Random, num_people: int) -> list[list[str]]:
    """For each relation all exposures equally often, shuffled over people; each person has at least one shown fact."""
    tiers = list(TIMES_SEEN)
    while True:
        dealt = [rng.sample([tiers[i % len(tiers)] for i in range(num_people)], num_people) for _ in RELATIONS]
        if all(any(TIMES_SEEN[exposure] for exposure in row) for row in zip(*dealt, strict=True)):
            return dealt


def _make_words(rng: Random) -> Iterator[str]:
    """Capitalised words of two or three syllables, without repeats."""
    used: set[str] = set()
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3))))
        word = ("".join(syllables) + rng.choice("lnrst")).capitalize()
        if word not in used:
            used.add(word)
            yield word


VERSION = 1  # of the world and its training: a new number means a new model
_REPORT = "facts.json"
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of training; accuracy is the fraction of questions with an exact match."""

    steps: int
    seconds: float
    parameters: int
    questions: int
    accuracy: float
    accuracy_by_exposure: dict[str, float]


def facts_questions(seed: int = 0) -> list[Question]:
    """Every question of the world with this seed.

    >>> facts_questions()[0].id
    'facts-0000000'
    """
    return questions_of(draw_facts(World(), seed=seed))


def facts_model(seed: int = 0, *, notify: Callable[[str], None]) -> Path:
    """The folder of the model trained on the world with this seed; the first call trains it (a minute or two).

    >>> model = AutoModelForCausalLM.from_pretrained(facts_model(notify=say))
    """
    return cached_model(World(), Training(), seed=seed, notify=notify)


def cached_model(world: World, training: Training, *, seed: int, notify: Callable[[str], None]) -> Path:
    """The folder of the model with these settings; trains it if it is missing or incomplete."""
    settings = {"version": VERSION, "seed": seed, "world": asdict(world), "training": asdict(training)}
    folder = cache_folder() / f"facts-{config_hash(settings)}"
    make_once(folder, partial(_train, world=world, training=training, seed=seed, notify=notify), notify=notify)
    notify(_summary(folder, parse_json((folder / _REPORT).read_text())))
    return folder


def _train(folder: Path, *, world: World, training: Training, seed: int, notify: Callable[[str], None]) -> None:
    facts = draw_facts(world, seed=seed)
    notify(f"facts: training a tiny model on {len(facts):,} facts (first run only, a minute or two)")
    outcome = train_facts(facts, folder, training=training, seed=seed, notify=notify)
    (folder / _REPORT).write_text(json.dumps({**asdict(outcome), "seed": seed}, indent=2) + "\n")


def _summary(folder: Path, report: dict[str, Any]) -> str:
    tiers = ", ".join(f"{name} {share:.0%}" for name, share in report["accuracy_by_exposure"].items())
    size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps in {report['seconds']:.0f} s"
    return f"facts: {report['accuracy']:.0%} of {report['questions']:,} answers right (seen {tiers}); {size}; {folder}"


def train_facts(
    facts: Sequence[Fact], folder: Path, *, training: Training, seed: int, notify: Callable[[str], None]
) -> Outcome:
    """Train a model on text about the facts, save it and its tokenizer in the folder, and measure it on all facts.

    Training ends at an accuracy, not at a time limit: the outcome is the same on a slow machine.
    """
    began = time.monotonic()
    with _seeded_torch(seed):
        tokenizer = learn_tokenizer(facts, num_tokens=training.num_tokens)
        model = _new_model(training, num_tokens=tokenizer.get_vocab_size())
        exam = _Exam.of(facts, tokenizer)
        steps = _train_model(
            model, _batches(facts, tokenizer, training, seed=seed), exam, training=training, notify=notify
        )
        right = exam.take(model)
    _save(model, tokenizer, folder)
    tiers = {name: [i for i, fact in enumerate(facts) if fact.exposure == name] for name in TIMES_SEEN}
    return Outcome(
        steps=steps,
        seconds=round(time.monotonic() - began, 1),
        parameters=sum(weight.numel() for weight in model.parameters()),
        questions=len(facts),
        accuracy=_share(right),
        accuracy_by_exposure={name: _share(right[rows]) for name, rows in tiers.items()},
    )


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


# Built-in questions, models and prompts: see `millstream.traces.llm.questions` and `millstream.traces.llm.model`.
QUESTIONS = {"facts": facts_questions, "world": Path(__file__).parent / "world.jsonl"}
MODELS = {"facts": facts_model, "smollm2": smollm2_model}
PROMPTS = {"facts": FACTS_PROMPT}  # the default prompt of a model
