"""Scoring answers against aliases: millstream against the official TriviaQA code in plain Python, in the same run.

    python benchmarks/label.py            # 100,000 answers, 25 aliases each; prints seconds, pairs/s and the ratio
    python benchmarks/label.py --data FILE.jsonl   # aliases of real questions, {"aliases": [...]} per line

The plain version follows the official script: every answer against every alias, one pair at a time. It runs on
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

from millstream.traces.label import CHUNK_RECORDS, score_chunk

PUNCTUATION = {*string.punctuation, "‘", "’", "´", "`"}
CONSONANTS, VOWELS = "bcdfglmnrst", "aeio"


def plain_text(text: str) -> str:
    """The official normalisation, character by character."""
    lowered = text.replace("_", " ").lower()
    spaced = "".join(" " if char in PUNCTUATION else char for char in lowered)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", spaced).split())


def plain_f1(answer: str, true: str) -> float:
    """Bag-of-words F1 of two texts."""
    ours, theirs = Counter(plain_text(answer).split()), Counter(plain_text(true).split())
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0


def plain(answers: Sequence[str], aliases: Sequence[Sequence[str]]) -> list[tuple[bool, float]]:
    """Exact match and F1 of every answer, normalising each alias for both, as in the official script."""
    return [
        (max(plain_text(answer) == plain_text(true) for true in some), max(plain_f1(answer, true) for true in some))
        for answer, some in zip(answers, aliases, strict=True)
    ]


def synthetic_aliases(num: int, rng: random.Random) -> list[list[str]]:
    """Spelling variants of names of one to four words, as in TriviaQA: with articles, punctuation and some accents."""
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
    """Answers, about half of them right, and `per_answer` aliases for each."""
    rng = random.Random(0)
    source = [json.loads(line)["aliases"] for line in data.open()] if data else synthetic_aliases(num, rng)
    pool = [alias for some in source for alias in some]
    aliases = [(source[i % len(source)] + rng.choices(pool, k=per_answer))[:per_answer] for i in range(num)]
    answers = [rng.choice(some if rng.random() < 0.5 else pool) for some in aliases]
    return [text + rng.choice(["", ".", " in the year 1984", ", I think"]) for text in answers], aliases


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()  # of all threads; other programs do not count
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--aliases", type=int, default=25)
    parser.add_argument("--every", type=int, default=100, help="the plain version scores one answer in this many")
    parser.add_argument("--data", type=Path, help="JSON Lines file with aliases")
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
