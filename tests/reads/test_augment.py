"""Augmentation is a function of seed, epoch and record; without randomness it matches a slow Python loop."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import BadSource
from millstream.reads.features import Augment
from support.batches import pack, random_reads, unpack
from support.effort import num_examples

IUPAC = "ACGTRYSWKMBDHVN"
COMPLEMENTS = dict(zip(IUPAC + "U" + IUPAC.lower() + "u", "TGCAYRSWMKVHDBNA" + "tgcayrswmkvhdbna", strict=True))
EVERYTHING = Augment(reverse_complement=0.5, max_length=20, mask=0.2, n="random", seed=3)

reads_of = st.lists(st.text(alphabet=IUPAC + IUPAC.lower() + "Uu", max_size=40), max_size=8)


def augmented(augment: Augment, reads: Sequence[str], numbers: Sequence[int], **options: Any) -> list[str]:
    result = augment.apply(*pack(reads), np.array(numbers, np.int64), **options)
    return unpack(result.flat, result.offsets)


def slow(augment: Augment, read: str) -> str:
    read = read.upper() if augment.upper else read
    if augment.n == "drop":
        read = "".join(base for base in read if base not in "Nn")
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
        for part in augment.apply(flat, offsets, numbers, epoch=2, quality=flat[::-1].copy()):
            assert part is not None
            hashed.update(part.tobytes())
    return hashed.hexdigest()[:16]


def test_the_result_is_pinned_for_all_versions():
    assert digest() == "040e0a03d843c62a"


# -- without randomness


@given(reads_of, st.booleans(), st.sampled_from(["keep", "drop"]), st.sampled_from([None, 1, 7, 100]), st.booleans())
def test_deterministic_augmentation_matches_a_slow_loop(
    reads: list[str], upper: bool, n: Any, length: Any, reverse: bool
):
    augment = Augment(upper=upper, n=n, max_length=length, crop="start", reverse_complement=reverse)
    assert augmented(augment, reads, range(len(reads))) == [slow(augment, read) for read in reads]


@given(st.lists(st.text(alphabet=IUPAC + IUPAC.lower()), max_size=5))
def test_the_reverse_complement_of_the_reverse_complement_is_the_read(reads: list[str]):
    augment = Augment(upper=False, reverse_complement=True)
    once = augmented(augment, reads, range(len(reads)))
    assert augmented(augment, once, range(len(reads))) == reads


@given(reads_of, st.sampled_from(["keep", "random", "drop"]), st.booleans())
def test_base_qualities_stay_with_their_bases(reads: list[str], n: Any, reverse: bool):
    flat, offsets = pack(reads)
    augment = Augment(upper=False, n=n, max_length=9, reverse_complement=reverse)
    quality = np.arange(flat.size, dtype=np.uint8)  # identifies the base: there are at most 8 * 40 = 256 + 64 of them
    result = augment.apply(flat, offsets, np.arange(len(reads)), quality=quality)
    assert result.quality is not None and result.quality.size == result.flat.size
    for i in range(len(reads)):
        bases = unpack(result.flat, result.offsets)[i]
        values = result.quality[result.offsets[i] : result.offsets[i + 1]]
        for base, value in zip(bases, values, strict=True):
            before = reads[i][(int(value) - int(offsets[i])) % 256]
            assert (COMPLEMENTS[before] if reverse else before) == base or (before in "Nn" and n == "random")
        if n != "drop":
            assert (np.diff(values) == (255 if reverse else 1)).all()


@given(reads_of)
def test_a_crop_is_a_substring_of_the_read(reads: list[str]):
    for before, after in zip(
        reads, augmented(Augment(upper=False, max_length=5), reads, range(len(reads))), strict=True
    ):
        assert after in before and len(after) == min(len(before), 5)


def test_offsets_may_start_in_the_middle_of_a_larger_batch():
    reads = random_reads(6, length=30, seed=2)
    flat, offsets = pack(reads)
    result = EVERYTHING.apply(flat, offsets[2:5], np.array([2, 3]))
    assert unpack(result.flat, result.offsets) == augmented(EVERYTHING, reads, range(6))[2:4]


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
    bases = "".join(augmented(Augment(n="random", upper=False), ["NNNNnnnnA"] * 5_000, range(5_000)))
    for base in "CGTacgt":
        assert bases.count(base) / 20_000 == pytest.approx(0.25, abs=0.02)
    crops = augmented(Augment(max_length=1, upper=False), ["abcdefghij"] * 10_000, range(10_000))
    assert [crops.count(base) / 10_000 for base in "abcdefghij"] == pytest.approx([0.1] * 10, abs=0.015)


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


def test_record_numbers_and_qualities_must_match_the_reads():
    flat, offsets = pack(["ACGT"])
    with pytest.raises(ValueError, match=r"2 .* 1 reads"):
        Augment().apply(flat, offsets, np.arange(2))
    with pytest.raises(ValueError, match=r"3 .* 4 bases"):
        Augment().apply(flat, offsets, np.arange(1), quality=flat[:3])
