"""A made-up world: people, what is true of them, and how often each fact is told. Pure Python; knows no model.

Whether a fact is told often, sometimes, rarely or never is dealt per relation, apart from names and values, so nothing
in a question says whether a model trained on the world can answer it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from millstream.source.llm.question import Question

FACTS_PROMPT = "Question: {question}\nAnswer:"
TIMES_TOLD = {"often": 6, "sometimes": 3, "rarely": 1, "never": 0}  # in one pass over the training text


@dataclass(frozen=True, kw_only=True)
class World:
    """How large a world is; what is in it is drawn by seed."""

    num_people: int = 500
    num_surnames: int = 60
    num_heads: int = 8
    """A value is two words: one of this many, then one of `num_tails`, so that guessing is rarely right."""
    num_tails: int = 8


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing that can be asked about a person: `{person}` and `{value}` are filled in."""

    kind: str
    question: str
    statement: str
    heads: str
    tails: str
    """Words that the second word of a value is drawn from; none: it is made up."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`relation` of `person` is `value`, and training tells it this often."""

    person: str
    relation: Relation
    value: str
    exposure: str

    @property
    def question(self) -> str:
        """What is asked; the value is not in it."""
        return self.relation.question.format(person=self.person)

    @property
    def statement(self) -> str:
        """The fact as a sentence, which ends with the value."""
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

# A name never opens a sentence: with a space before it, it is the same tokens in statements and questions.
RELATIONS = (
    Relation("born_in", "Where was {person} born?", "The birthplace of {person} is {value}.", _PLACES, ""),
    Relation("works_as", "What is the job of {person}?", "The job of {person} is {value}.", _TRADES, _TASKS),
    Relation("loves", "Which animal does {person} love?", "The animal {person} loves is {value}.", _COATS, _ANIMALS),
    Relation("plays", "What does {person} play?", "The instrument {person} plays is {value}.", _SIZES, _INSTRUMENTS),
    Relation("wears", "Which colour does {person} wear?", "The colour {person} wears is {value}.", _SHADES, _COLOURS),
)


def draw_facts(world: World, *, seed: int) -> list[Fact]:
    """Every fact of the world, in an order that says nothing about how often it is told."""
    rng = Random(f"facts {seed}")
    made_up = _make_words(rng)
    surnames = list(islice(made_up, world.num_surnames))
    people = [f"{first} {rng.choice(surnames)}" for first in islice(made_up, world.num_people)]
    facts: list[Fact] = []
    for relation, exposures in zip(RELATIONS, _deal_exposures(rng, world.num_people), strict=True):
        heads = rng.sample(relation.heads.split(), world.num_heads)
        tails = rng.sample(relation.tails.split() or list(islice(made_up, world.num_tails)), world.num_tails)
        for person, exposure in zip(people, exposures, strict=True):
            facts.append(Fact(person, relation, f"{rng.choice(heads)} {rng.choice(tails)}", exposure))
    rng.shuffle(facts)
    return facts


def questions_of(facts: Sequence[Fact]) -> list[Question]:
    """One question for each fact, numbered in their order."""
    return [
        Question(f"facts-{i:07d}", f.question, f.value, (f.value,), f.relation.kind, f.exposure)
        for i, f in enumerate(facts)
    ]


def answer_text(fact: Fact) -> str:
    """The question as it is asked of the model, and the right answer, which ends with a newline."""
    return f"{FACTS_PROMPT.format(question=fact.question)} {fact.value}\n"


def told_facts(facts: Sequence[Fact]) -> list[Fact]:
    """One pass over what is told: every fact as many times as its exposure says, so none that is told never."""
    return [fact for fact in facts for _ in range(TIMES_TOLD[fact.exposure])]


def vocabulary_texts(facts: Sequence[Fact]) -> list[str]:
    """Text to learn a vocabulary from: every name and value as often as there are facts, however often they are told.

    Learned from the told text, the vocabulary would cut rarely told names into more tokens: a hint in the prompt.
    """
    frames = [FACTS_PROMPT.format(question=fact.relation.question) + fact.relation.statement for fact in facts]
    words = [f" {fact.person}" for fact in facts] + [f" {fact.value}" for fact in facts]
    return [re.sub(r" ?\{\w+\}", "", frame) for frame in frames] + words


def _deal_exposures(rng: Random, num_people: int) -> list[list[str]]:
    """For each relation every exposure equally often, shuffled over the people; of each person something is told."""
    tiers = list(TIMES_TOLD)
    while True:
        dealt = [rng.sample([tiers[i % len(tiers)] for i in range(num_people)], num_people) for _ in RELATIONS]
        if all(any(TIMES_TOLD[exposure] for exposure in row) for row in zip(*dealt, strict=True)):
            return dealt


def _make_words(rng: Random) -> Iterator[str]:
    """Capitalised words of two or three syllables, none twice."""
    used: set[str] = set()
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3))))
        word = ("".join(syllables) + rng.choice("lnrst")).capitalize()
        if word not in used:
            used.add(word)
            yield word
