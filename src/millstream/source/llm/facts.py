"""The source `facts`: questions about a made-up world, and a tiny model that learned some of it and makes up the rest.

`facts_world` draws the world, `facts_model` trains on it; this file keeps the trained model in the user's cache folder.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.config import cache_folder, config_hash
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
    report = _read_report(folder)
    if report is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock"), notify):
            report = _read_report(folder)  # another process may have trained it while this one waited
            if report is None:
                report = _publish(folder, world, training, seed=seed, notify=notify)
    notify(_summary(folder, report))
    return folder


def _publish(
    folder: Path, world: World, training: "Training", *, seed: int, notify: Callable[[str], None]
) -> dict[str, Any]:
    from millstream.source.llm.facts_model import train_facts

    facts = draw_facts(world, seed=seed)
    notify(f"facts: training a tiny model on a world of {len(facts):,} facts, once, in a minute or two")
    part = folder.with_suffix(".part")
    for old in (part, folder):  # what a killed training left, or what lost some of its files
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir()
    outcome = train_facts(facts, part, training=training, seed=seed, notify=notify)
    report = {**asdict(outcome), "seed": seed, "files": {file.name: file.stat().st_size for file in part.iterdir()}}
    (part / _REPORT).write_text(json.dumps(report, indent=2) + "\n")
    for path in (*part.iterdir(), part):
        _sync(path)
    os.rename(part, folder)
    _sync(folder.parent)
    return report


def _read_report(folder: Path) -> dict[str, Any] | None:
    """What is said about a trained model, or None if the folder is not there or not whole."""
    try:
        report = json.loads((folder / _REPORT).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in report["files"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return report if whole else None


def _summary(folder: Path, report: dict[str, Any]) -> str:
    tiers = ", ".join(f"{name} {share:.0%}" for name, share in report["accuracy_by_exposure"].items())
    size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps in {report['seconds']:.0f} s"
    return f"facts: {report['accuracy']:.0%} of {report['questions']:,} answers right (told {tiers}); {size}; {folder}"


@contextmanager
def _alone(file: Path, notify: Callable[[str], None]) -> Generator[None]:
    """One process at a time; the kernel drops the lock when the process dies, however it dies."""
    with open(file, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify("facts: waiting for another process that trains the same model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
