"""Syncmers: the k-mers that are chosen, on both strands, and where they are."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from millstream.errors import BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.syncmers import Syncmers

COMPLEMENT = str.maketrans("ACGT", "TGCA")
CHOSEN = Syncmers(k=9, s=5)


def batch_of(reads: Sequence[str]) -> ReadBatch:
    flat = np.frombuffer("".join(reads).encode(), np.uint8)
    return ReadBatch(np.arange(len(reads)), flat, np.cumsum([0, *map(len, reads)], dtype=np.int64), {})


def found_in(read: str, chosen: Syncmers = CHOSEN) -> dict[int, int]:
    """The k-mers of one read, by place."""
    made = chosen(batch_of([read]))
    places, kmers = (cast(np.ndarray, made[name]) for name in ("places", "kmers"))
    return dict(zip(places.tolist(), kmers.tolist(), strict=True))


def random_read(length: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), length))


def test_both_strands_have_the_same_kmers_at_mirrored_places():
    read = random_read(400)
    forward, backward = found_in(read), found_in(read[::-1].translate(COMPLEMENT))
    assert {len(read) - CHOSEN.k - place: kmer for place, kmer in backward.items()} == forward
    assert 0.3 < len(forward) / (400 - CHOSEN.k + 1) < 0.5  # two in five


def test_whether_a_kmer_is_chosen_depends_on_it_alone():
    read = random_read(300, seed=1)
    together = found_in(read)
    alone = {place: found_in(read[place : place + CHOSEN.k]) for place in range(len(read) - CHOSEN.k + 1)}
    assert together == {place: kmers[0] for place, kmers in alone.items() if kmers}


def test_no_window_of_a_read_is_without_one():
    places = sorted(found_in(random_read(2000, seed=2)))
    assert np.diff(places).max() <= CHOSEN.k - CHOSEN.s


def test_reads_are_told_apart_and_kmers_with_an_n_are_skipped():
    reads = [random_read(40, seed=3), "ACG", "", random_read(40, seed=4)]
    made = CHOSEN(batch_of(reads))
    starts = cast(np.ndarray, made["starts"]).tolist()
    kmers = np.split(cast(np.ndarray, made["kmers"]), starts[1:])
    assert [part.tolist() for part in kmers] == [list(found_in(read).values()) for read in reads]
    assert cast(np.ndarray, made["lengths"]).tolist() == [40, 3, 0, 40]
    whole, masked = found_in(reads[0]), found_in(reads[0][:20] + "N" + reads[0][21:])
    assert masked == {place: kmer for place, kmer in whole.items() if not place <= 20 < place + CHOSEN.k}
    assert found_in(reads[0].lower()) == whole


def test_every_kmer_can_be_chosen():
    assert len(found_in(random_read(200), Syncmers(k=21, s=21))) == 180


def test_protein_is_refused_with_its_record():
    with pytest.raises(BadSource, match="record 1 contains 'E'"):
        CHOSEN(batch_of(["ACGT", "ACE"]))
    with pytest.raises(ValueError, match="s at most k"):
        Syncmers(k=5, s=6)
