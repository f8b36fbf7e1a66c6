"""Reads as model inputs: augmentation, bags of k-mers and both strands, against slow Python loops."""

import hashlib
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import features
from millstream.core.batches import ColumnBatch
from millstream.errors import BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.features import Augment, BothStrands, KmerBag
from support.batches import pack, random_reads, unpack
from support.effort import num_examples
from support.featuring import write_reads

IUPAC = "ACGTRYSWKMBDHVN"
COMPLEMENTS = dict(zip(IUPAC + "U" + IUPAC.lower() + "u", "TGCAYRSWMKVHDBNA" + "tgcayrswmkvhdbna", strict=True))
EVERYTHING = Augment(reverse_complement=0.5, max_length=20, mask=0.2, n="random", seed=3)

reads_of = st.lists(st.text(alphabet=IUPAC + IUPAC.lower() + "Uu", max_size=40), max_size=8)
COMPLEMENT = str.maketrans("ACGT", "TGCA")
dna_reads = st.lists(st.text(alphabet="ACGT" * 6 + "acgtUu" + "NRYSWKMBDHVn", max_size=40), max_size=5)


def augmented(augment: Augment, reads: Sequence[str], numbers: Sequence[int], **options: Any) -> list[str]:
    return unpack(*augment.apply(*pack(reads), np.array(numbers, np.int64), **options))


def slow(augment: Augment, read: str) -> str:
    read = read.upper()
    if augment.n == "drop":
        read = "".join(base for base in read if base != "N")
    read = read[: augment.max_length]
    return "".join(COMPLEMENTS[base] for base in reversed(read)) if augment.reverse_complement else read


# -- one record, one result


@given(reads_of, st.randoms(use_true_random=False), st.integers(0, 5))
def test_a_record_comes_out_the_same_in_any_batch_and_order(reads: list[str], random: Any, epoch: int):
    numbers = [10**12 + 7 * i for i in range(len(reads))]
    together = dict(zip(numbers, augmented(EVERYTHING, reads, numbers, epoch=epoch), strict=True))
    order = list(range(len(reads)))
    random.shuffle(order)
    for part in (order[: len(order) // 2], order[len(order) // 2 :]):
        some = augmented(EVERYTHING, [reads[i] for i in part], [numbers[i] for i in part], epoch=epoch)
        assert some == [together[numbers[i]] for i in part]


def test_epoch_seed_and_number_each_change_the_result():
    read = random_reads(1, length=200, seed=0)
    augment = Augment(mask=0.5)
    plain = augmented(augment, read, [0])
    assert plain == augmented(augment, read, [0])
    others = [
        augmented(augment, read, [0], epoch=1),
        augmented(augment, read, [1]),
        augmented(Augment(mask=0.5, seed=1), read, [0]),
    ]
    assert len({plain[0], *(other[0] for other in others)}) == 4


def digest() -> str:
    reads = ["", "N", "acgtn" * 9, *random_reads(20, length=60, seed=1, letters="ACGTNRn")]
    numbers = np.arange(len(reads)) * 10**15
    hashed = hashlib.sha256()
    for n in ("keep", "random", "drop"):
        augment = Augment(reverse_complement=0.5, max_length=33, mask=0.1, n=n, seed=2**80 + 5)
        flat, offsets = pack(reads)
        for part in augment.apply(flat, offsets, numbers, epoch=2):
            hashed.update(part.tobytes())
    return hashed.hexdigest()[:16]


def test_the_result_is_pinned_for_all_versions():
    assert digest() == "83737f3747f3b207"


# -- without randomness


@given(reads_of, st.sampled_from(["keep", "drop"]), st.sampled_from([None, 1, 7, 100]), st.booleans())
def test_deterministic_augmentation_matches_a_slow_loop(reads: list[str], n: Any, length: Any, reverse: bool):
    augment = Augment(n=n, max_length=length, crop="start", reverse_complement=reverse)
    assert augmented(augment, reads, range(len(reads))) == [slow(augment, read) for read in reads]


@given(st.lists(st.text(alphabet=IUPAC), max_size=5))
def test_the_reverse_complement_of_the_reverse_complement_is_the_read(reads: list[str]):
    augment = Augment(reverse_complement=True)
    once = augmented(augment, reads, range(len(reads)))
    assert augmented(augment, once, range(len(reads))) == reads


@given(reads_of)
def test_a_crop_is_a_substring_of_the_read(reads: list[str]):
    for before, after in zip(reads, augmented(Augment(max_length=5), reads, range(len(reads))), strict=True):
        assert after in before.upper() and len(after) == min(len(before), 5)


def test_offsets_may_start_in_the_middle_of_a_larger_batch():
    reads = random_reads(6, length=30, seed=2)
    flat, offsets = pack(reads)
    part = EVERYTHING.apply(flat, offsets[2:5], np.array([2, 3]))
    assert unpack(*part) == augmented(EVERYTHING, reads, range(6))[2:4]


def test_the_input_is_not_modified():
    flat, offsets = pack(["acgtnacgtn"])
    EVERYTHING.apply(flat, offsets, np.array([0]))  # `pack` returns read-only arrays: writing would raise
    assert flat.tobytes() == b"acgtnacgtn"


# -- rates


def test_the_fraction_of_reverse_complemented_reads_is_the_setting():
    for fraction in (0.0, 0.3, 1.0):
        found = augmented(Augment(reverse_complement=fraction), ["AAAC"] * 20_000, range(20_000))
        assert set(found) <= {"AAAC", "GTTT"}
        assert found.count("GTTT") / 20_000 == pytest.approx(fraction, abs=0.01 if 0 < fraction < 1 else 0)


def test_bases_are_masked_at_the_given_rate_at_every_position():
    masked = np.array([list(read) for read in augmented(Augment(mask=0.15), ["A" * 50] * 4_000, range(4_000))]) == "N"
    assert masked.mean() == pytest.approx(0.15, abs=0.005)
    assert np.abs(masked.mean(axis=0) - 0.15).max() < 0.03
    neighbours = (masked[:, 1:] & masked[:, :-1]).mean()
    assert neighbours == pytest.approx(0.15**2, abs=0.003)
    assert set(augmented(Augment(mask=1.0), ["ACGT"], [0])) == {"NNNN"}


def test_random_bases_and_crops_are_uniform():
    bases = "".join(augmented(Augment(n="random"), ["NNNNnnnn"] * 5_000, range(5_000)))
    for base in "ACGT":
        assert bases.count(base) / 40_000 == pytest.approx(0.25, abs=0.015)
    crops = augmented(Augment(max_length=1), ["ABCDEFGHIJ"] * 10_000, range(10_000))
    assert [crops.count(base) / 10_000 for base in "ABCDEFGHIJ"] == pytest.approx([0.1] * 10, abs=0.015)


# -- refusals


def test_protein_has_no_reverse_complement():
    with pytest.raises(BadSource, match=r"record 7.*'E' 'L'"):
        augmented(Augment(reverse_complement=1.0), ["ACGT", "AELN"], [3, 7])
    assert augmented(Augment(), ["AELN"], [7]) == ["AELN"]


@settings(max_examples=num_examples(20))
@given(
    st.sampled_from([{"mask": 1.5}, {"reverse_complement": -0.1}, {"max_length": 0}, {"n": "skip"}, {"crop": "end"}])
)
def test_an_invalid_setting_is_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Augment(**wrong)


def test_there_must_be_one_record_number_per_read():
    flat, offsets = pack(["ACGT"])
    with pytest.raises(ValueError, match=r"2 .* 1 reads"):
        Augment().apply(flat, offsets, np.arange(2))


def batch_of(reads: Sequence[str], numbers: Sequence[int] | None = None) -> ReadBatch:
    return ReadBatch(np.arange(len(reads)) if numbers is None else np.array(numbers), *pack(reads), {})


def reverse_complement(bases: str) -> str:
    return bases[::-1].translate(COMPLEMENT)


def bags(made: Mapping[str, Any], k: int) -> list[list[int]]:
    """The buckets of each read."""
    buckets, starts = made[f"buckets_{k}"], made[f"starts_{k}"]
    assert buckets.dtype == starts.dtype == np.int32
    return [part.tolist() for part in np.split(buckets, starts)[1:]]


def slow_hash(kmer: int, k: int) -> int:
    """62 bits, in numbers that never overflow; pinned, because trained models look up their weights by it."""
    size = 2**31
    low, high = kmer % size, kmer // size + k
    for _ in range(2):
        low = (low ^ low // 2**15) * 0x2C1B3C6D % size
        high = ((high + low) % size ^ high // 2**12) * 0x297A2D39 % size
        low = (low + high) % size ^ high // 2**14
    return high * size + low


def slow_bag(read: str, k: int, every: int, bits: int) -> list[int]:
    read = read.upper().replace("U", "T")
    found: list[int] = []
    for start in range(len(read) - k + 1):
        word = read[start : start + k]
        if set(word) <= set("ACGT"):
            words = (word, reverse_complement(word))
            kmer = min(int(text.translate(str.maketrans("ACGT", "0123")), 4) for text in words)
            if (kmer ^ kmer // 2**31) % 2**31 * 0x5D588B65 % 2**31 <= (2**31 - 1) // every:
                found.append(slow_hash(kmer, k) % 2**bits)
    return found


def spread(counts: np.ndarray) -> float:
    """Chi-squared against equal counts, in standard deviations from its expectation."""
    expected = counts.sum() / counts.size
    found = float(((counts - expected) ** 2 / expected).sum())
    return (found - (counts.size - 1)) / (2 * (counts.size - 1)) ** 0.5


# -- bags


@given(reads=dna_reads, k=st.sampled_from([1, 2, 5, 16, 31]), every=st.integers(1, 4), bits=st.sampled_from([1, 8, 30]))
def test_a_bag_has_the_k_mers_of_a_slow_loop(reads: list[str], k: int, every: int, bits: int):
    made = KmerBag((k,), (every,), bits)(batch_of(reads))
    assert bags(made, k) == [slow_bag(read, k, every, bits) for read in reads]


def test_each_k_has_its_own_subsampling():
    reads = random_reads(30, length=80, seed=1)
    made = KmerBag((4, 12, 24), (1, 3, 8), 16)(batch_of(reads))
    assert list(made) == ["buckets_4", "starts_4", "buckets_12", "starts_12", "buckets_24", "starts_24"]
    for k, every in ((4, 1), (12, 3), (24, 8)):
        assert bags(made, k) == [slow_bag(read, k, every, 16) for read in reads]
    assert KmerBag((4,), (1,), 16).fields == ["sequence"]


@given(read=st.text(alphabet="ACGT", min_size=1, max_size=60), k=st.integers(1, 31), every=st.integers(1, 4))
def test_both_strands_of_a_read_give_the_same_bag(read: str, k: int, every: int):
    forward, backward = bags(KmerBag((k,), (every,), 30)(batch_of([read, reverse_complement(read)])), k)
    assert forward == backward[::-1]


def test_subsampling_keeps_the_same_k_mers_everywhere():
    """In other reads, at other positions, on the other strand and in another batch."""
    genome = "".join(np.random.default_rng(0).choice(list("ACGT"), 400))
    whole = KmerBag((14,), (4,), 30)(batch_of([genome]))
    (kept,) = bags(whole, 14)
    pieces = [genome[at : at + 14] for at in range(400 - 13)]
    alone = bags(KmerBag((14,), (4,), 30)(batch_of([reverse_complement(piece) for piece in pieces])), 14)
    assert [bucket for bag in alone for bucket in bag] == kept
    assert 60 < len(kept) < 140  # 387 / 4
    every_one = bags(KmerBag((14,), (1,), 30)(batch_of([genome])), 14)[0]
    assert len(every_one) == 387 and set(kept) < set(every_one)


def test_only_k_mers_with_an_n_are_skipped():
    read = "ACGTACGGTCA"
    whole = bags(KmerBag((4,), (1,), 30)(batch_of([read])), 4)[0]
    for at in range(len(read)):
        for base in ("N", "n", "R"):
            broken = read[:at] + base + read[at + 1 :]
            found = bags(KmerBag((4,), (1,), 30)(batch_of([broken])), 4)[0]
            assert found == [bucket for place, bucket in enumerate(whole) if not place <= at < place + 4]


def test_reads_too_short_for_a_k_mer_are_empty_bags():
    made = KmerBag((5,), (1,), 12)(batch_of(["", "ACGT", "ACGTA", "A", "NNNNNNN", ""]))
    assert [len(bag) for bag in bags(made, 5)] == [0, 0, 1, 0, 0, 0]
    assert made["starts_5"].tolist() == [0, 0, 0, 1, 1, 1]  # type: ignore[attr-defined]
    none = KmerBag((5,), (1,), 12)(batch_of(["", "ACG"]))
    assert len(none["buckets_5"]) == 0 and none["starts_5"].tolist() == [0, 0]  # type: ignore
    nothing = KmerBag((5,), (1,), 12)(batch_of([]))
    assert len(nothing["buckets_5"]) == len(nothing["starts_5"]) == 0  # type: ignore[arg-type]


def test_a_foreign_byte_is_an_error_that_names_its_record():
    batch = batch_of(["ACGT", "ACGT", "AEKlACGT", "!"], numbers=[900, 17, 4321, 5])
    with pytest.raises(BadSource, match=r"4321 .*'E' 'l'"):
        KmerBag((3,), (1,), 12)(batch)
    with pytest.raises(BadSource, match=r"8 .*'\\xff'"):
        KmerBag((30,), (9,), 12)(batch_of(["\xff"], numbers=[8]))


def test_records_other_than_reads_are_refused():
    with pytest.raises(ValueError, match="traces"):
        KmerBag((3,), (1,), 12)(ColumnBatch(np.arange(1), {}))


@pytest.mark.parametrize(
    ("ks", "every", "bits"),
    [
        ((), (), 12),
        ((0,), (1,), 12),
        ((32,), (1,), 12),
        ((3,), (1,), 0),
        ((3,), (1,), 31),
        ((3,), (0,), 12),
        ((3,), (1, 1), 12),
        ((3, 4), (1,), 12),
    ],
)
def test_invalid_sizes_are_refused(ks: tuple[int, ...], every: tuple[int, ...], bits: int):
    with pytest.raises(ValueError, match="ks="):
        KmerBag(ks, every, bits)


def test_buckets_are_uniform_with_and_without_subsampling():
    genome = "".join(np.random.default_rng(5).choice(list("ACGT"), 60_000))
    for k, every in ((14, 1), (31, 1), (16, 3)):
        (found,) = bags(KmerBag((k,), (every,), 7)(batch_of([genome])), k)
        counts = np.bincount(found, minlength=128)
        assert spread(counts) < 5
        assert len(found) == pytest.approx(60_000 / every, rel=0.03)


def test_similar_k_mers_do_not_collide_more_than_random_ones():
    """All 4^6 k-mers of a length, 2,080 of them canonical: consecutive numbers."""
    words = ["".join("ACGT"[number // 4**place % 4] for place in range(6)) for number in range(4**6)]
    found = [bag[0] for bag in bags(KmerBag((6,), (1,), 30)(batch_of(words)), 6)]
    assert len(set(found)) == (4**6 + 4**3) // 2
    assert max(Counter(found).values()) == 2
    assert spread(np.bincount(np.array(sorted(set(found))) % 64, minlength=64)) < 5


def test_a_homopolymer_has_another_bucket_for_each_k():
    made = KmerBag((5, 6, 7), (1, 1, 1), 30)(batch_of(["A" * 7]))
    assert len({bag for k in (5, 6, 7) for bag in bags(made, k)[0]}) == 3


# -- both strands


@pytest.mark.parametrize("spec", ["base", "kmer(3)", "kmer(4, stride=3)"])
def test_both_strands_are_tokenized(spec: str):
    reads = ["ACGTTGCAA", "GGG", "", "ACCNTTAGACCATTGA"]
    others = ["TTGCAACGT", "CCC", "", "TCAATGGTCTAANGGT"]
    plain = features.tokens(spec)
    made = BothStrands(plain)(batch_of(reads), seed=3, epoch=2)
    assert sorted(made) == ["attention_mask", "input_ids", "other_attention_mask", "other_input_ids"]
    for name, expected in plain(batch_of(reads)).items():
        assert np.array_equal(made[name], expected)  # type: ignore[arg-type]
    for name, expected in plain(batch_of(others)).items():
        assert np.array_equal(made[f"other_{name}"], expected)  # type: ignore[arg-type]
    assert BothStrands(plain).fields == plain.fields


def test_scoring_ignores_the_random_reverse_complement_of_training():
    reads = random_reads(20, length=30, seed=0)
    seen, plain = features.tokens("base", reverse_complement=0.5), features.tokens("base")
    made, expected = BothStrands(seen)(batch_of(reads), seed=9), BothStrands(plain)(batch_of(reads))
    assert all(np.array_equal(made[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_both_strands_have_the_same_crop():
    reads = random_reads(20, length=60, seed=0)
    both = BothStrands(features.tokens("base", crop_length=25))
    made = both(batch_of(reads), seed=4, epoch=1)
    again = both(batch_of(reads), seed=4, epoch=2)
    ids, other = np.asarray(made["input_ids"]), np.asarray(made["other_input_ids"])
    assert ids.shape == (20, 25) and np.array_equal(other, 5 - ids[:, ::-1])
    assert not np.array_equal(ids, again["input_ids"])  # type: ignore[arg-type]


def test_features_can_be_pickled():
    for feature in (KmerBag((4,), (1,), 12), BothStrands(features.tokens("kmer(3)"))):
        again = pickle.loads(pickle.dumps(feature))
        made, expected = again(batch_of(["ACGTACGT"])), feature(batch_of(["ACGTACGT"]))
        assert all(np.array_equal(made[name], expected[name]) for name in expected)


# -- tokens of reads in a file


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> ms.Reads:
    return write_reads(tmp_path_factory.mktemp("features") / "reads.fa")


def test_tokens_are_returned_with_the_named_columns(reads: ms.Reads):
    feature = features.tokens("kmer(4)", columns=["class_id"], max_length=20, pad="max_length")
    batch = feature(reads.fetch([5, 1, 2], feature.fields))
    assert np.asarray(batch["input_ids"]).shape == (3, 20) == np.asarray(batch["attention_mask"]).shape
    assert np.asarray(batch["class_id"]).tolist() == [1, 1, 2]


def test_a_record_is_the_same_in_any_batch_and_differs_between_epochs(reads: ms.Reads):
    feature = features.tokens("base", crop_length=30, reverse_complement=0.5, mask=0.1, n="random", seed=3)
    alone = [np.asarray(feature(reads.fetch([i], feature.fields), epoch=1)["input_ids"])[0] for i in range(50)]
    order = np.random.default_rng(1).permutation(50)
    together = np.asarray(feature(reads.fetch(order, feature.fields), epoch=1)["input_ids"])
    assert all((together[row] == alone[number]).all() for row, number in enumerate(order))
    later = np.asarray(feature(reads.fetch(np.arange(50), feature.fields), epoch=2)["input_ids"])
    assert sum((later[i] == alone[i]).all() for i in range(50)) < 10


def test_feature_and_reads_can_be_pickled_together(reads: ms.Reads):
    feature = features.tokens("kmer(3)", columns=["class_id"], reverse_complement=True)
    again, same = pickle.loads(pickle.dumps((feature, reads)))
    ours, theirs = feature(reads.fetch([7], feature.fields)), again(same.fetch([7], again.fields))
    assert all(np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])) for name in ours)


def test_protein_is_refused_by_base_tokenizers_with_the_characters_found(tmp_path: Path):
    file = tmp_path / "protein.fa"
    file.write_text(">p\nMKVLEEQFHI\n")
    feature = features.tokens("base")
    proteins = ms.open(file)
    assert isinstance(proteins, ms.Reads) and proteins[0].sequence == "MKVLEEQFHI"
    with pytest.raises(BadSource, match=r"[EFILQ]"):
        feature(proteins.fetch([0], feature.fields))
