"""The source `facts`: questions about a made-up world, and a tiny model that learned some of it and makes up the rest.

`facts_world` draws the world, `facts_model` trains on it; this file keeps the trained model in the user's cache folder.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.config import cache_folder, config_hash
from millstream.source.llm.cached import make_once
from millstream.source.llm.facts_world import FACTS_PROMPT, World, draw_facts, questions_of
from millstream.source.llm.question import Question

if TYPE_CHECKING:
    from millstream.source.llm.facts_model import Training

__all__ = ["FACTS_PROMPT", "facts_model", "facts_questions"]

VERSION = 1  # of the world and its training: another number, another model
_REPORT = "facts.json"


def facts_questions(seed: int = 0) -> list[Question]:
    """Every question of the world with this seed.

    >>> facts_questions()[0].id
    'facts-0000000'
    """
    return questions_of(draw_facts(World(), seed=seed))


def facts_model(seed: int = 0, *, notify: Callable[[str], None]) -> Path:
    """The folder of the model trained on the world with this seed; the first call trains it, in a minute or two.

    >>> model = AutoModelForCausalLM.from_pretrained(facts_model(notify=say))
    """
    from millstream.source.llm.facts_model import Training  # imports torch

    return cached_model(World(), Training(), seed=seed, notify=notify)


def cached_model(world: World, training: "Training", *, seed: int, notify: Callable[[str], None]) -> Path:
    """The folder of the model with these settings, trained now if it is not there or not whole."""
    settings = {"version": VERSION, "seed": seed, "world": asdict(world), "training": asdict(training)}
    folder = cache_folder() / f"facts-{config_hash(settings)}"
    make_once(folder, partial(_train, world=world, training=training, seed=seed, notify=notify), notify=notify)
    notify(_summary(folder, json.loads((folder / _REPORT).read_text())))
    return folder


def _train(folder: Path, *, world: World, training: "Training", seed: int, notify: Callable[[str], None]) -> None:
    from millstream.source.llm.facts_model import train_facts

    facts = draw_facts(world, seed=seed)
    notify(f"facts: training a tiny model on a world of {len(facts):,} facts, once, in a minute or two")
    outcome = train_facts(facts, folder, training=training, seed=seed, notify=notify)
    (folder / _REPORT).write_text(json.dumps({**asdict(outcome), "seed": seed}, indent=2) + "\n")


def _summary(folder: Path, report: dict[str, Any]) -> str:
    tiers = ", ".join(f"{name} {share:.0%}" for name, share in report["accuracy_by_exposure"].items())
    size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps in {report['seconds']:.0f} s"
    return f"facts: {report['accuracy']:.0%} of {report['questions']:,} answers right (told {tiers}); {size}; {folder}"
