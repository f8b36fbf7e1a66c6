"""Scoring answers against aliases: millstream beside TriviaQA's own way, in plain Python, in the same run.

    python benchmarks/label.py            # 100,000 answers of 25 aliases; prints seconds, pairs a second and the ratio
    python benchmarks/label.py --data FILE.jsonl   # aliases of real questions: {"aliases": [...]} a line

The plain program works as the official script does: every answer against every alias, one pair at a time. It runs on
every k-th answer, before and after millstream, and its time is scaled up. It has no ROUGE-L and no containment.
"""

import argparse
import json
import random
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.dataset.label import CHUNK_RECORDS, score_chunk

PUNCTUATION = {*string.punctuation, "‘", "’", "´", "`"}
CONSONANTS, VOWELS = "bcdfglmnrst", "aeio"


def plain_text(text: str) -> str:
    """The official normalisation, letter by letter."""
    lowered = text.replace("_", " ").lower()
    spaced = "".join(" " if letter in PUNCTUATION else letter for letter in lowered)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", spaced).split())


def plain_f1(said: str, true: str) -> float:
    """Bag-of-words F1 of two texts."""
    ours, theirs = Counter(plain_text(said).split()), Counter(plain_text(true).split())
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0


def plain(answers: Sequence[str], aliases: Sequence[Sequence[str]]) -> list[tuple[bool, float]]:
    """Exact match and F1 of every answer, each alias normalised anew for both, as the official script does."""
    return [
        (max(plain_text(said) == plain_text(true) for true in some), max(plain_f1(said, true) for true in some))
        for said, some in zip(answers, aliases, strict=True)
    ]


def made_up_aliases(num: int, rng: random.Random) -> list[list[str]]:
    """Spellings of names of one to four words, as TriviaQA's are: with articles, punctuation and some accents."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(50_000)]
    words[::40] = [word.replace("e", "é") for word in words[::40]]
    forms: list[Callable[[str], str]] = [str.title, str.upper, "The {}".format, "{} (disambiguation)".format, str]
    names = [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(num * 6)]
    return [
        [rng.choice(forms)(name).replace(" ", rng.choice(" -_")) for name in names[i * 6 : i * 6 + 6] * 5]
        for i in range(num)
    ]


def texts(num: int, per_answer: int, data: Path | None) -> tuple[list[str], list[list[str]]]:
    """Answers of which about half are right, and as many aliases for each, all their own."""
    rng = random.Random(0)
    source = [json.loads(line)["aliases"] for line in data.open()] if data else made_up_aliases(num, rng)
    pool = [alias for some in source for alias in some]
    aliases = [(source[i % len(source)] + rng.choices(pool, k=per_answer))[:per_answer] for i in range(num)]
    said = [rng.choice(some if rng.random() < 0.5 else pool) for some in aliases]
    return [text + rng.choice(["", ".", " in the year 1984", ", I think"]) for text in said], aliases


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()  # of all threads; other programs on the machine do not count
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--aliases", type=int, default=25)
    parser.add_argument("--every", type=int, default=100, help="the plain program takes one answer in so many")
    parser.add_argument("--data", type=Path, help="JSON lines with aliases")
    given = parser.parse_args()
    answers, aliases = texts(given.answers, given.aliases, given.data)
    table = pa.table({"answer": answers, "aliases": pa.array(aliases, pa.list_(pa.string()))})
    some, theirs = answers[:: given.every], aliases[:: given.every]

    scored: list[pa.Table] = []

    def label() -> None:
        scored[:] = [score_chunk(table.slice(at, CHUNK_RECORDS)) for at in range(0, given.answers, CHUNK_RECORDS)]

    before = seconds(lambda: plain(some, theirs))
    ours = [seconds(label) for _ in range(3)]
    expected = plain(some, theirs)
    after = seconds(lambda: plain(some, theirs))

    whole = pa.concat_tables(scored)
    assert whole.column("em").to_pylist()[:: given.every] == [em for em, _ in expected]
    np.testing.assert_allclose(whole.column("f1").to_pylist()[:: given.every], [f1 for _, f1 in expected], atol=1e-6)

    pairs = given.answers * given.aliases
    best, theirs_s = min(ours), min(before, after) * given.answers / len(some)
    print(f"{given.answers} answers x {given.aliases} aliases, {pairs} pairs; CPU seconds, best of 3")
    print(f"millstream  {best:8.2f} s {pairs / best:12,.0f} pairs/s   EM, F1, ROUGE-L, containment, refusals")
    print(f"plain       {theirs_s:8.2f} s {pairs / theirs_s:12,.0f} pairs/s   EM, F1; from {len(some)} answers")
    print(f"millstream is {theirs_s / best:.0f} times as fast")


if __name__ == "__main__":
    main()
