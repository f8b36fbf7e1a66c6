"""Token statistics are those of the answer's own tokens, whatever else lies in a batch."""

from math import exp, log
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.core.batches import ColumnBatch, fetch_batch
from millstream.traces.features import STATS

NUMBERS = np.array([4, 0, 7, 2, 9, 5])


def record(number: int) -> dict[str, object]:
    """1 to 4 tokens of an answer, then in most records a stop token whose numbers are far off."""
    rng = np.random.default_rng(number)
    answer, stop = 1 + number % 4, int(number % 3 != 0)
    steps = answer + stop
    top = np.sort(np.log(rng.dirichlet(np.full(30, 0.2), steps) + 1e-9), axis=1)[:, ::-1][:, :20].astype(np.float32)
    logprobs, entropy, rank = top[:, 0].copy(), rng.random(steps) * 3, rng.integers(0, 5, steps)
    if stop:
        logprobs[-1], entropy[-1], rank[-1], top[-1] = -50, 90, 9999, -40
    return {
        "question_id": f"q{number}",
        "generated_answer": "a " * (number % 3),
        "answer_len": 0 if number == 5 else answer,
        "logprobs": logprobs,
        "entropy": entropy.astype(np.float32),
        "rank": rank.astype(np.int32),
        "topk_logprobs": top,
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    path = tmp_path_factory.mktemp("stats") / "traces"
    with ms.TraceWriter(path) as writer:
        writer.extend(record(number) for number in range(12))
    return ms.open(path)


def stats_of(collection: ms.Collection, numbers: np.ndarray, *names: str) -> np.ndarray:
    feature = ms.features.token_stats(*names)
    return np.asarray(feature(fetch_batch(collection, numbers, feature.fields))["stats"])


def slowly(trace: dict) -> list[float]:
    """The same token by token."""
    count = trace["answer_len"] or len(trace["logprobs"])
    logprobs, entropy = trace["logprobs"][:count].tolist(), trace["entropy"][:count].tolist()
    ranks = [log(1 + rank) for rank in trace["rank"][:count].tolist()]
    tops = trace["topk_logprobs"][:count].tolist()
    margins = [exp(top[0]) - exp(top[1]) for top in tops]
    parts = [[-exp(value) * value for value in top] for top in tops]

    def mean(values: list[float]) -> float:
        return sum(values) / count

    return [
        count,
        len(trace["generated_answer"].split()),
        *(sum(logprobs), mean(logprobs), min(logprobs), logprobs[0], logprobs[-1]),
        *(mean(entropy), max(entropy), entropy[0]),
        *(mean(margins), min(margins), margins[0]),
        *(mean(ranks), max(ranks)),
        mean([sum(map(exp, top)) for top in tops]),
        *(mean([part[place] for part in parts]) for place in range(3)),
        mean([sum(part[3:]) for part in parts]),
    ]


def test_statistics_cover_the_answer_without_the_stop_token(traces: ms.Collection):
    found = stats_of(traces, NUMBERS)
    assert found.shape == (len(NUMBERS), len(STATS)) and found.dtype == np.float32
    np.testing.assert_allclose(found, [slowly(record(number)) for number in NUMBERS.tolist()], rtol=2e-5, atol=2e-6)


def test_a_record_has_the_same_statistics_in_any_batch(traces: ms.Collection):
    together = stats_of(traces, NUMBERS)
    for row, number in zip(together, NUMBERS, strict=True):
        np.testing.assert_array_equal(stats_of(traces, np.array([number]))[0], row)


def test_a_subset_of_statistics_has_the_same_values_and_needs_fewer_fields(traces: ms.Collection):
    names = ("min_logprob", "num_words", "num_tokens")
    assert set(ms.features.token_stats(*names).fields) == {"logprobs", "answer_len", "generated_answer"}
    everything = stats_of(traces, NUMBERS)
    np.testing.assert_array_equal(stats_of(traces, NUMBERS, *names), everything[:, [STATS.index(n) for n in names]])


def columns(counts: list[int], lengths: list[int | None]) -> ColumnBatch:
    many = [np.full((count, 20), -1.5, np.float32) for count in counts]
    one = [array[:, 0] for array in many]
    values = {
        "logprobs": one,
        "entropy": list(one),
        "rank": [(-x).astype(np.int32) for x in one],
        "topk_logprobs": many,
    }
    texts: list[str | None] = [None] * len(counts)
    return ColumnBatch(np.arange(len(counts)) + 30, {**values, "answer_len": lengths, "generated_answer": texts})


def test_an_answer_without_tokens_has_zeros_and_does_not_affect_others():
    found = np.asarray(ms.features.token_stats()(columns([0, 2, 0, 0, 3, 0], [0, 1, 0, None, None, 4]))["stats"])
    assert not found[[0, 2, 3, 5]].any()
    assert found[:, STATS.index("num_tokens")].tolist() == [0, 1, 0, 0, 3, 0]
    assert found[[1, 4], STATS.index("sum_logprob")].tolist() == [-1.5, -4.5]


def test_a_token_that_was_ruled_out_gives_no_nan():
    batch = columns([2, 3], [1, 2])
    for top in batch.columns["topk_logprobs"]:
        top[:, 1:] = -np.inf
    found = np.asarray(ms.features.token_stats()(batch)["stats"])
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:, STATS.index("mean_margin")], np.exp(-1.5), rtol=1e-6)


def test_missing_and_nan_values_are_refused_with_the_record_number():
    batch = columns([2, 2, 2], [1, 1, 1])
    batch.columns["entropy"][1] = np.array([np.nan, 1], np.float32)
    with pytest.raises(ValueError, match="record 31: mean_entropy, max_entropy, first_entropy"):
        ms.features.token_stats()(batch)
    batch.columns["entropy"][1] = None
    with pytest.raises(ValueError, match=r"record 31 has no 'entropy'"):
        ms.features.token_stats()(batch)
    with pytest.raises(ValueError, match="mean_luck"):
        ms.features.token_stats("mean_luck")


def test_a_loader_computes_them_and_a_store_without_the_fields_is_refused(traces: ms.Collection, tmp_path: Path):
    (batch,) = ms.Loader(traces, batch_size=12, features=ms.features.token_stats(), order="none", threads=0)
    assert tuple(batch["stats"].shape) == (12, len(STATS))
    with ms.TraceWriter(tmp_path / "bare") as writer:
        writer.append({"question_id": "q", "logprobs": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="answer_len"):
        ms.Loader(ms.open(tmp_path / "bare"), batch_size=1, features=ms.features.token_stats())
