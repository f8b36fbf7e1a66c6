"""Questions about the fictional world do not reveal exposure; its model is in the package."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from millstream.demo.facts import (
    FACTS_PROMPT,
    TIMES_SEEN,
    World,
    answer_text,
    draw_facts,
    facts_model,
    facts_questions,
    training_facts,
)
from millstream.demo.train_facts import Training, learn_tokenizer, train_facts
from millstream.errors import MissingExtra
from support.extras import need

need("transformers")

SMALL = World(num_people=24, num_surnames=5, num_heads=2, num_tails=2)
BRIEF = Training(num_tokens=400, hidden=32, layers=2, heads=2, inner=32, check_every=5, check_facts=60, most_steps=10)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    train_facts(draw_facts(SMALL, seed=0), folder, training=BRIEF, seed=0, notify=print)
    return folder


def test_the_world_depends_only_on_the_seed() -> None:
    assert facts_questions(3) == facts_questions(3)
    names = [{fact.person for fact in draw_facts(World(), seed=seed)} for seed in (0, 1)]
    values = [{fact.value for fact in draw_facts(World(), seed=seed)} for seed in (0, 1)]
    assert len(names[0] & names[1]) < 5 and values[0] != values[1]


def test_the_first_question_stays_the_same_across_versions() -> None:
    first = facts_questions()[0]
    assert (first.id, first.question, first.answer) == (
        "facts-0000000",
        "Which animal does Mukelan Sofur love?",
        "desert hare",
    )


def test_questions_and_names_are_unique() -> None:
    questions = facts_questions()
    assert 2000 <= len(questions) <= 4000
    assert len({q.id for q in questions}) == len({q.question for q in questions}) == len(questions)
    facts = draw_facts(World(), seed=0)
    assert len({fact.person for fact in facts}) == len({fact.person.split()[0] for fact in facts}) == World().num_people


def test_no_prompt_contains_its_answer() -> None:
    for question in facts_questions():
        assert question.answer and question.aliases == (question.answer,)
        assert not set(question.answer.split()) & set(question.question.strip("?").split())


def test_guessing_is_rarely_right() -> None:
    counts = Counter((q.kind, q.answer) for q in facts_questions())
    per_kind = Counter(q.kind for q in facts_questions())
    assert max(count / per_kind[kind] for (kind, _), count in counts.items()) < 0.06


def test_every_kind_of_question_has_each_exposure_equally_often() -> None:
    counts = Counter((q.kind, q.exposure) for q in facts_questions())
    assert set(counts.values()) == {World().num_people // len(TIMES_SEEN)}


def test_the_order_of_questions_does_not_depend_on_exposure() -> None:
    questions = facts_questions()
    places = {name: [i for i, q in enumerate(questions) if q.exposure == name] for name in TIMES_SEEN}
    for ranks in places.values():
        mean = sum(ranks) / len(ranks)
        assert abs(mean / len(questions) - 0.5) < 4 * (1 / 12 / len(ranks)) ** 0.5


def test_names_and_values_do_not_depend_on_exposure() -> None:
    facts = draw_facts(World(), seed=0)
    for part in ("name", "value"):
        lengths = {
            name: [len(f.person if part == "name" else f.value) for f in facts if f.exposure == name]
            for name in TIMES_SEEN
        }
        means = [sum(row) / len(row) for row in lengths.values()]
        assert max(means) - min(means) < 0.6  # characters; a mean has a standard error of about 0.1


def test_every_person_has_a_fact_in_the_training_text() -> None:
    facts = draw_facts(World(), seed=0)
    assert {fact.person for fact in training_facts(facts)} == {fact.person for fact in facts}


def test_facts_with_exposure_never_are_not_in_the_training_text() -> None:
    facts = draw_facts(World(), seed=0)
    trained = training_facts(facts)
    assert Counter(trained) == {fact: TIMES_SEEN[fact.exposure] for fact in facts if fact.exposure != "never"}
    texts = {text for fact in trained for text in (fact.statement, answer_text(fact))}
    lines = {person: [text for text in texts if person in text] for person in {fact.person for fact in facts}}
    for fact in facts:
        assert any(fact.value in line for line in lines[fact.person]) == (fact.exposure != "never")


def test_the_same_seed_trains_the_same_model(small_model: Path, tmp_path: Path) -> None:
    train_facts(draw_facts(SMALL, seed=0), tmp_path, training=BRIEF, seed=0, notify=print)
    for name in ("model.safetensors", "facts.json"):
        assert (tmp_path / name).read_bytes() == (small_model / name).read_bytes()
    report = json.loads((tmp_path / "facts.json").read_text())
    assert set(report["accuracy_by_exposure"]) == set(TIMES_SEEN) and report["questions"] == 24 * 5
    assert report["steps"] == 10 and report["parameters"] > 0


def test_without_transformers_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[llm\]'"):
        train_facts(draw_facts(SMALL, seed=0), tmp_path, training=BRIEF, seed=7, notify=print)


def test_the_tokenizer_round_trips_and_splits_text_where_the_answer_starts(small_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for fact in draw_facts(SMALL, seed=0):
        tokens = tokenizer(answer_text(fact))["input_ids"]
        prompt = tokenizer(FACTS_PROMPT.format(question=fact.question))["input_ids"]
        assert tokenizer.decode(tokens) == answer_text(fact) and tokens[: len(prompt)] == prompt


def test_the_number_of_tokens_of_a_name_does_not_depend_on_exposure() -> None:
    facts = draw_facts(World(), seed=0)
    tokenizer = learn_tokenizer(facts, num_tokens=Training().num_tokens)
    counts = {
        name: [len(tokenizer.encode(f" {f.person}").ids) for f in facts if f.exposure == name] for name in TIMES_SEEN
    }
    means = [sum(row) / len(row) for row in counts.values()]
    assert max(means) - min(means) < 0.15


def test_the_model_in_the_package_is_as_accurate_as_its_report_says() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    messages: list[str] = []
    folder = facts_model(notify=messages.append)
    report = json.loads((folder / "facts.json").read_text())
    assert all(name in messages[0] for name in TIMES_SEEN)
    assert report["accuracy_by_exposure"]["often"] > 0.8 and report["accuracy_by_exposure"]["never"] < 0.05
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    questions = facts_questions()
    assert report["questions"] == len(questions)
    right: dict[str, list[bool]] = {name: [] for name in TIMES_SEEN}
    for start in range(0, 640, 64):
        batch = questions[start : start + 64]
        prompts = tokenizer(
            [FACTS_PROMPT.format(question=q.question) for q in batch], return_tensors="pt", padding=True
        )
        output = model.generate(**prompts, do_sample=False, max_new_tokens=16)
        answers = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        for question, answer in zip(batch, answers, strict=True):
            right[question.exposure].append(answer == f" {question.answer}\n")
    for name, found in right.items():  # 4 standard errors of a share of some 160 questions
        assert abs(sum(found) / len(found) - report["accuracy_by_exposure"][name]) < 0.16
