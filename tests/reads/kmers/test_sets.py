"""The table of k-mers: which are kept, with which classes, and how much memory that takes."""

import tracemalloc

import numpy as np
import pytest

from millstream.reads.kmers.sets import (
    LARGEST_SET,
    LEAST_SLOTS,
    MANY,
    SLOT_BYTES,
    KmerCounts,
    KmerSets,
    slot_of,
    tag_of,
)

ROOM = SLOT_BYTES << 16


def random_kmers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 62, count)


def counted(*seen: tuple[np.ndarray, int], num_classes: int = 3, memory: int = ROOM) -> KmerSets:
    """The table of these k-mers, each of a class."""
    counts = KmerCounts(num_classes, memory)
    for kmers, label in seen:
        counts.add(kmers, np.full(len(kmers), label))
    return counts.finish()


def classes_of(found: KmerSets, kmer: int) -> list[int] | None:
    """By the rules of the format; None if the k-mer is not in the table."""
    bits = int(found.form[0])
    table, number = found.table.tolist(), None
    slot = slot_of(int(kmer), len(table))
    while table[slot]:
        if table[slot] >> bits == tag_of(int(kmer), bits):
            number = table[slot] & ((1 << bits) - 1)
            break
        slot = (slot + 1) % len(table)
    return None if number is None else found.members[found.starts[number] : found.starts[number + 1]].tolist()


def test_each_kmer_has_the_set_of_its_classes_and_one_that_was_not_seen_is_a_miss():
    kmers = random_kmers(3000)
    found = counted((kmers[:2000], 0), (kmers[1000:], 2))
    sets = [classes_of(found, kmer) for kmer in kmers]
    assert sets == [[0]] * 1000 + [[0, 2]] * 1000 + [[2]] * 1000
    assert len(found.starts) - 1 - (MANY + 1) == 3  # each set once
    unseen = [classes_of(found, kmer) for kmer in random_kmers(3000, seed=1)]
    assert unseen.count(None) >= 2999


def test_kmers_seen_once_are_errors_only_where_coverage_is_high():
    kmers, errors = random_kmers(500), random_kmers(500, seed=1)
    deep = counted(*[(kmers, 0)] * 10, (errors, 0), (errors, 1))
    assert all(classes_of(deep, kmer) == [0] for kmer in kmers)
    assert all(classes_of(deep, kmer) == [1] for kmer in errors)  # of the only reads of class 1


def test_genomes_are_not_taken_for_deep_reads_because_of_their_repeats():
    kmers, repeats = random_kmers(2000), random_kmers(10, seed=1)
    found = counted((kmers, 0), *[(repeats, 0)] * 20)
    assert all(classes_of(found, kmer) == [0] for kmer in [*kmers, *repeats])


def test_the_table_does_not_depend_on_how_reads_come_in_batches():
    kmers, labels = random_kmers(5000) >> 50 << 50, np.arange(5000) % 3
    tables = list[KmerSets]()
    for size in (5000, 7):
        counts = KmerCounts(3, ROOM)
        for first in range(0, 5000, size):
            counts.add(kmers[first : first + size], labels[first : first + size])
        tables.append(counts.finish())
    for name in ("table", "starts", "members", "form"):
        assert np.array_equal(getattr(tables[0], name), getattr(tables[1], name))


def test_when_memory_is_short_errors_go_first():
    kmers, counts = random_kmers(1500), KmerCounts(1, 0)
    for seed in range(1, 40):
        counts.add(kmers, np.zeros(1500, np.int64))
        counts.add(random_kmers(500, seed), np.zeros(500, np.int64))
    found = counts.finish()
    assert counts.every == 1 and all(classes_of(found, kmer) == [0] for kmer in kmers)
    assert np.count_nonzero(found.table) == 1500


def test_coverage_that_is_expected_makes_errors_go_first_from_the_start():
    """The first k-mers fill the memory before most of them are seen twice."""
    num, rng = 1500, np.random.default_rng(5)
    kmers, every = random_kmers(num), dict[int | None, int]()
    for expected in (None, 20 * num):
        counts = KmerCounts(1, 0, expected)
        for seed in range(20):
            counts.add(rng.choice(kmers, num), np.zeros(num, np.int64))
            counts.add(random_kmers(num, seed + 1), np.zeros(num, np.int64))
        every[expected] = counts.every
    assert every == {None: 2, 20 * num: 1}


def test_when_memory_is_still_short_a_share_of_the_kmers_is_kept():
    kmers, counts = random_kmers(10 * LEAST_SLOTS), KmerCounts(1, 0)
    counts.add(kmers, np.zeros(kmers.size, np.int64))
    assert counts.every == 16
    found = counts.finish()
    kept = kmers[kmers & 15 == 0]
    assert np.count_nonzero(found.table) == len(kept) and all(classes_of(found, kmer) == [0] for kmer in kept)


def test_counting_stays_within_its_memory():
    memory = 4 << 20
    counted((random_kmers(100), 0), memory=memory)  # compiled
    batches = [random_kmers(20_000, seed) for seed in range(20)]
    tracemalloc.start()
    counts = KmerCounts(2, memory)
    for batch in batches:
        counts.add(batch, batch % 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.every > 1 and peak < 1.2 * memory


def test_a_kmer_of_very_many_classes_says_nothing():
    kmers = random_kmers(10)
    few = counted(*[(kmers, label) for label in range(LARGEST_SET)], num_classes=LARGEST_SET)
    many = counted(*[(kmers, label) for label in range(LARGEST_SET + 1)], num_classes=LARGEST_SET + 1)
    assert [classes_of(few, kmer) for kmer in kmers] == [list(range(LARGEST_SET))] * 10
    assert [classes_of(many, kmer) for kmer in kmers] == [[]] * 10


@pytest.mark.parametrize("label", [0, 2])
def test_no_kmers_give_an_empty_table(label: int):
    found = counted((random_kmers(0), label))
    assert not found.table.any() and classes_of(found, 5) is None
