"""Scoring answers against aliases: millstream beside TriviaQA's own way, in plain Python, in the same run.

    python benchmarks/label.py            # 100,000 answers of 25 aliases; prints seconds, pairs a second and the ratio
    python benchmarks/label.py --data FILE.jsonl   # aliases of real questions: {"aliases": [...]} a line

The plain program is the official script's functions, called as it calls them: every answer against every alias. It runs
on every k-th answer, before and after millstream, and its time is scaled up. It has no ROUGE-L and no containment.
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

SYLLABLES = (
    "ba be bi bo ca ce co da de di do fa fe la le li lo ma me mi mo na ne no ra re ri ro sa se ta te ti to é".split()
)


def normalize_answer(s: str) -> str:
    def remove_articles(text: str) -> str:
        return re.sub(r"\b(a|an|the)\b", " ", text)

    def white_space_fix(text: str) -> str:
        return " ".join(text.split())

    def handle_punc(text: str) -> str:
        exclude = set(string.punctuation + "".join(["‘", "’", "´", "`"]))
        return "".join(ch if ch not in exclude else " " for ch in text)

    return white_space_fix(remove_articles(handle_punc(s.replace("_", " ").lower()))).strip()


def f1_score(prediction: str, ground_truth: str) -> float:
    prediction_tokens = normalize_answer(prediction).split()
    ground_truth_tokens = normalize_answer(ground_truth).split()
    num_same = sum((Counter(prediction_tokens) & Counter(ground_truth_tokens)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(prediction_tokens), num_same / len(ground_truth_tokens)
    return 2 * precision * recall / (precision + recall)


def exact_match_score(prediction: str, ground_truth: str) -> bool:
    return normalize_answer(prediction) == normalize_answer(ground_truth)


def plain(answers: Sequence[str], aliases: Sequence[Sequence[str]]) -> list[tuple[bool, float]]:
    return [
        (max(exact_match_score(said, true) for true in some), max(f1_score(said, true) for true in some))
        for said, some in zip(answers, aliases, strict=True)
    ]


def made_up_aliases(num: int, rng: random.Random) -> list[list[str]]:
    """Spellings of names of one to four words, as TriviaQA's are: with articles, punctuation and some accents."""
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(50_000)]
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
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
    print(f"{given.answers} answers x {given.aliases} aliases, {pairs} pairs, one core; best of 3 {sorted(ours)}")
    print(f"millstream  {best:8.2f} s {pairs / best:12,.0f} pairs/s   EM, F1, ROUGE-L, containment, refusals")
    print(f"plain       {theirs_s:8.2f} s {pairs / theirs_s:12,.0f} pairs/s   EM, F1; from {len(some)} answers")
    print(f"millstream is {theirs_s / best:.0f} times as fast")


if __name__ == "__main__":
    main()
