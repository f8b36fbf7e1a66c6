"""Reads become token ids the same way in whatever batch, order or process they come."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import millstream as ms

REGEX = r"lbl\|(?P<class_id>\d+)"


@pytest.fixture
def reads(tmp_path: Path) -> ms.Reads:
    rng = np.random.default_rng(0)
    file = tmp_path / "reads.fa"
    lines = [f">lbl|{i % 4}\n{''.join(rng.choice(list('ACGTNacgt'), 40 + i % 30))}\n" for i in range(200)]
    file.write_text("".join(lines))
    opened = ms.open(file, header_regex=REGEX)
    assert isinstance(opened, ms.Reads)
    return opened


def test_tokens_come_with_the_columns_named(reads: ms.Reads):
    feature = ms.features.tokens("kmer(4)", columns=["class_id"], max_length=20, pad="max_length")
    batch = feature(reads.fetch([5, 1, 2], feature.fields))
    assert np.asarray(batch["input_ids"]).shape == (3, 20) == np.asarray(batch["attention_mask"]).shape
    assert np.asarray(batch["class_id"]).tolist() == [1, 1, 2]


def test_a_record_comes_out_the_same_in_any_batch_and_other_epochs_differ(reads: ms.Reads):
    feature = ms.features.tokens("base", crop_length=30, reverse_complement=0.5, mask=0.1, n="random", seed=3)
    alone = [np.asarray(feature(reads.fetch([i], feature.fields), epoch=1)["input_ids"])[0] for i in range(50)]
    order = np.random.default_rng(1).permutation(50)
    together = np.asarray(feature(reads.fetch(order, feature.fields), epoch=1)["input_ids"])
    assert all((together[place] == alone[number]).all() for place, number in enumerate(order))
    later = np.asarray(feature(reads.fetch(np.arange(50), feature.fields), epoch=2)["input_ids"])
    assert sum((later[i] == alone[i]).all() for i in range(50)) < 10


def test_feature_and_reads_go_to_another_process_together(reads: ms.Reads):
    feature = ms.features.tokens("kmer(3)", columns=["class_id"], reverse_complement=True)
    again, same = pickle.loads(pickle.dumps((feature, reads)))
    ours, theirs = feature(reads.fetch([7], feature.fields)), again(same.fetch([7], again.fields))
    assert all(np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])) for name in ours)


def test_protein_is_refused_by_base_tokenizers_with_the_letters_found(tmp_path: Path):
    file = tmp_path / "protein.fa"
    file.write_text(">p\nMKVLEEQFHI\n")
    feature = ms.features.tokens("base")
    proteins = ms.open(file)
    assert isinstance(proteins, ms.Reads) and proteins[0].sequence == "MKVLEEQFHI"
    with pytest.raises(ms.errors.BadSource, match=r"[EFILQ]"):
        feature(proteins.fetch([0], feature.fields))
