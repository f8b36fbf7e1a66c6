"""Questions about the fictional world do not reveal exposure; its model is trained once and loads like any other."""

import json
import os
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.demo.facts import (
    FACTS_PROMPT,
    TIMES_SEEN,
    Training,
    World,
    answer_text,
    cached_model,
    draw_facts,
    facts_questions,
    learn_tokenizer,
    questions_of,
    training_facts,
)
from millstream.errors import MissingExtra
from support.extras import need

need("transformers")

SMALL = World(num_people=24, num_surnames=5, num_heads=2, num_tails=2)
BRIEF = Training(num_tokens=400, hidden=32, layers=2, heads=2, inner=32, check_every=5, check_facts=60, most_steps=10)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def small_model(messages: list[str] | None = None) -> Path:
    return cached_model(SMALL, BRIEF, seed=0, notify=(messages if messages is not None else []).append)


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


def test_a_model_is_trained_once_and_its_accuracy_is_always_reported() -> None:
    first, second = list[str](), list[str]()
    folder = small_model(first)
    weights = (folder / "model.safetensors").stat()
    assert small_model(second) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    assert "training" in first[0] and second == first[-1:]
    assert all(name in second[0] for name in TIMES_SEEN)
    report = json.loads((folder / "facts.json").read_text())
    assert set(report["accuracy_by_exposure"]) == set(TIMES_SEEN) and report["questions"] == 24 * 5
    assert report["steps"] == 10 and report["parameters"] > 0 and report["seconds"] >= 0


def test_the_same_seed_trains_the_same_model() -> None:
    folder = small_model()
    weights = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder)
    assert (small_model() / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("damage", ["no report", "no weights", "short weights", "broken report"])
def test_an_incomplete_model_folder_is_trained_again(damage: str) -> None:
    folder = small_model()
    if damage == "no report":
        (folder / "facts.json").unlink()
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "short weights":
        os.truncate(folder / "model.safetensors", 1000)
    else:
        (folder / "facts.json").write_text("[]")
    messages: list[str] = []
    assert small_model(messages) == folder and "training" in messages[0]
    again: list[str] = []
    small_model(again)
    assert len(again) == 1


def test_the_remains_of_a_killed_training_are_removed() -> None:
    folder = small_model()
    part = folder.with_name(f".{folder.name}.partial")
    folder.rename(part)
    (part / "millstream.json").unlink()
    messages: list[str] = []
    assert small_model(messages) == folder and "training" in messages[0] and not part.exists()


def test_two_concurrent_callers_train_one_model() -> None:
    shutil.rmtree(small_model())
    messages: list[str] = []
    with ThreadPoolExecutor(2) as pool:  # each opens its own lock file, like two processes
        folders = {run.result() for run in [pool.submit(small_model, messages) for _ in range(2)]}
    assert folders == {small_model()}
    assert sum("training a tiny model" in line for line in messages) == 1


def test_without_transformers_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[llm\]'"):
        cached_model(SMALL, BRIEF, seed=7, notify=print)


def test_the_tokenizer_round_trips_and_splits_text_where_the_answer_starts() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model())
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


def test_the_reported_accuracy_equals_that_of_generation() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    training = Training(num_tokens=500, hidden=64, layers=2, inner=128, check_facts=120, most_steps=300)
    folder = cached_model(SMALL, training, seed=1, notify=print)
    report = json.loads((folder / "facts.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    questions = questions_of(draw_facts(SMALL, seed=1))
    right: Counter[str] = Counter()
    for start in range(0, len(questions), 32):
        batch = questions[start : start + 32]
        prompts = tokenizer(
            [FACTS_PROMPT.format(question=q.question) for q in batch], return_tensors="pt", padding=True
        )
        output = model.generate(**prompts, do_sample=False, max_new_tokens=16)
        answers = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right.update(q.exposure for q, answer in zip(batch, answers, strict=True) if answer == f" {q.answer}\n")
    assert report["accuracy"] == round(right.total() / len(questions), 4) and report["accuracy"] >= 0.45
    assert report["accuracy_by_exposure"]["often"] > report["accuracy_by_exposure"]["never"]
