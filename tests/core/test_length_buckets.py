"""Records dealt out by length: each once per epoch, the same for any threads and ranks, resumable, little padding."""

import gzip
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.core.order import LengthBuckets
from support.loading import open_reads

COUNT = 203
TOKENS = ms.features.tokens("base")


@pytest.fixture(scope="module", params=["reads.fa", "reads.fa.gz"])
def reads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    """Of 10 to 409 bases."""
    path = tmp_path_factory.mktemp("reads") / request.param
    lengths = np.random.default_rng(0).integers(10, 410, COUNT)
    text = "".join(f">{number}\n{('ACGT' * 103)[:size]}\n" for number, size in enumerate(lengths))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return open_reads(path)


def batches_of(reads: ms.Reads, state: Any = None, **settings: Any) -> list[list[int]]:
    """The record numbers of each batch of an epoch, or of the rest of it."""
    given = {"batch_size": 8, "length_buckets": 6, "seed": 3, "features": TOKENS, "order": "exact", **settings}
    loader = ms.Loader(reads, **given, notify=lambda _: None)
    if state is not None:
        loader.load_state_dict(state)
    return [batch["numbers"].tolist() for batch in loader]


def padding(reads: ms.Reads, batches: Sequence[Sequence[int]]) -> float:
    """The share of padding in these batches."""
    lengths = [[len(reads[number].sequence) for number in batch] for batch in batches]
    return 1 - sum(map(sum, lengths)) / sum(len(batch) * max(batch) for batch in lengths)


@pytest.mark.parametrize("order", ["exact", "window", "none"])
def test_every_record_comes_once_per_epoch_and_batches_pad_less(reads: ms.Reads, order: str):
    plain = batches_of(reads, order=order, length_buckets=1)
    dealt = batches_of(reads, order=order)
    assert sorted(chain(*dealt)) == list(range(COUNT))
    assert list(map(len, dealt)) == list(map(len, plain))
    assert padding(reads, dealt) < padding(reads, plain) / 2.5
    for first in range(0, len(plain), 6):  # no record moves out of its span
        assert sorted(chain(*dealt[first : first + 6])) == sorted(chain(*plain[first : first + 6]))
    longest = [max(len(reads[number].sequence) for number in batch) for batch in dealt[:6]]
    assert longest != sorted(longest)


def test_epochs_and_seeds_differ_and_threads_do_not(reads: ms.Reads):
    dealt = batches_of(reads)
    assert all(batches_of(reads, threads=threads) == dealt for threads in (0, 1, 3))
    assert batches_of(reads, seed=4) != dealt
    loader = ms.Loader(reads, batch_size=8, length_buckets=6, seed=3, features=TOKENS, notify=lambda _: None)
    epochs = [[batch["numbers"].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] == dealt and epochs[1] != dealt


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batches_of_one_process(reads: ms.Reads, world: int):
    whole = batches_of(reads)
    ranks = [batches_of(reads, batch_size=8 // world, rank=rank, world=world) for rank in range(world)]
    for step, batch in enumerate(whole[:-1]):
        assert sorted(chain(*(rank[step] for rank in ranks))) == sorted(batch)


@pytest.mark.parametrize("changes", [{}, {"threads": 3}, {"batch_size": 5}, {"batch_size": 16, "length_buckets": 1}])
@pytest.mark.parametrize("done", [1, 7, 25])
def test_a_resumed_epoch_has_the_remaining_records_once(reads: ms.Reads, changes: dict[str, int], done: int):
    loader = ms.Loader(reads, batch_size=8, length_buckets=6, seed=3, features=TOKENS, order="exact")
    batches = iter(loader)
    seen = [next(batches)["numbers"].tolist() for _ in range(done)]
    rest = batches_of(reads, loader.state_dict(), **changes)
    assert sorted(chain(*seen, *rest)) == list(range(COUNT))
    assert list(chain(*seen, *rest)) == list(chain(*batches_of(reads)))


def test_records_of_one_length_keep_their_order(tmp_path: Path):
    (tmp_path / "same.fa").write_text("".join(f">{number}\nACGTA\n" for number in range(100)))
    reads = open_reads(tmp_path / "same.fa")
    assert batches_of(reads) == batches_of(reads, length_buckets=1)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers())
def test_dealing_is_a_permutation_into_buckets_of_neighbouring_lengths(lengths: list[int], size: int, key: int):
    numbers = np.arange(len(lengths)) * 7
    dealt = LengthBuckets(100, size).deal(numbers, np.array(lengths), key=key)
    assert sorted(dealt.tolist()) == numbers.tolist()
    buckets = [[lengths[number // 7] for number in dealt[at : at + size]] for at in range(0, len(dealt), size)]
    if len(set(lengths)) > 1:
        ranges = sorted((min(bucket), max(bucket)) for bucket in buckets)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
