"""`facts`: a fictional world of people, and a tiny language model trained on it that knows only some of its facts.

Training shows a fact often, sometimes, rarely or never. This exposure is drawn per relation, independently of names and
values, so a question does not reveal whether the model can answer it. `train_facts.py` made the folder `facts_model`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from millstream.demo.smollm2 import smollm2_model
from millstream.traces.llm.questions import Question

FACTS_PROMPT = "Question: {question}\nAnswer:"
FACTS_MODEL = Path(__file__).parent / "facts_model"
REPORT = "facts.json"  # in a model's folder
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


def facts_questions(seed: int = 0) -> list[Question]:
    """Every question of the world with this seed.

    >>> facts_questions()[0].id
    'facts-0000000'
    """
    return questions_of(draw_facts(World(), seed=seed))


def facts_model(*, notify: Callable[[str], None]) -> Path:
    """The folder of the model, which was trained on the world with seed 0.

    >>> model = AutoModelForCausalLM.from_pretrained(facts_model(notify=say))
    """
    notify(_summary(json.loads((FACTS_MODEL / REPORT).read_text())))
    return FACTS_MODEL


def _summary(report: dict[str, Any]) -> str:
    tiers = ", ".join(f"{name} {share:.0%}" for name, share in report["accuracy_by_exposure"].items())
    size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} training steps"
    return f"facts: {report['accuracy']:.0%} of {report['questions']:,} answers right (seen {tiers}); {size}"


# Built-in questions, models and prompts: see `millstream.traces.llm.questions` and `millstream.traces.llm.model`.
QUESTIONS = {"facts": facts_questions, "world": Path(__file__).parent / "world.jsonl"}
MODELS = {"facts": facts_model, "smollm2": smollm2_model}
PROMPTS = {"facts": FACTS_PROMPT}  # the default prompt of a model
