"""Reads longer than a net reads: windows cover them, each is as good as a read of its own, and together they vote."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.reads.batch import ReadBatch
from millstream.reads.classifiers import as_built
from millstream.reads.classifiers.nets import LEAST_VOTE, ReadCNN
from millstream.reads.classifiers.nets import probabilities as probabilities_of
from millstream.reads.features import BothStrands, TokenFeature
from millstream.reads.kind import ReadSettings
from millstream.reads.tokenizers.kmers import kmer
from millstream.reads.windows import OVERLAP, WINDOW, Windows, bases_in, tokens_in, windows_of
from support.small_classifiers import batch_of, make_kit, probabilities, random_reads

LENGTHS = (37, 400, 100, 1031, 0, 101)
NETS = ["cnn", "lstm", "transformer"]


def window_texts(read: str, bases: int) -> list[str]:
    _, starts, sizes = windows_of(np.array([len(read)]), bases)
    return [read[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


@given(st.lists(st.integers(0, 5000), max_size=8), st.integers(1, 700))
def test_windows_cover_every_read_and_share_a_quarter(lengths: list[int], bases: int):
    counts, starts, sizes = windows_of(np.array(lengths, np.int64), bases)
    edges = np.cumsum([0, *counts])
    for read, length in enumerate(lengths):
        own, ends = (found[edges[read] : edges[read + 1]] for found in (starts, starts + sizes))
        assert own[0] == 0 and ends[-1] == length and len(own) == counts[read]
        assert (sizes[edges[read] : edges[read + 1]] == min(length, bases)).all()
        assert (ends[:-1] - own[1:] >= bases // OVERLAP).all()
        assert len(own) <= 1 + max(length - bases, 0) / max(bases - bases // OVERLAP, 1) + 1


def test_a_window_has_as_many_tokens_as_were_asked_for():
    for tokenizer in (kmer(1), kmer(6), kmer(6, stride=3)):
        bases = bases_in(tokenizer, 50)
        whole = np.full(bases, ord("A"), np.uint8)
        assert tokenizer.tokenize(whole, np.array([0, bases])).attention_mask.sum() == 50
        assert tokens_in(tokenizer, bases) == 50
        assert bases_in(tokenizer, tokens_in(tokenizer, WINDOW)) <= WINDOW


@pytest.mark.parametrize("name", NETS)
def test_windows_vote_by_their_mean_log_probability(name: str):
    kit = make_kit(name, max_length=100, width=16)
    torch.manual_seed(0)
    net = kit.build(batch_of(kit, random_reads([60]))).eval()
    bases = 100 if name == "cnn" else {"lstm": 102, "transformer": 201}[name]
    reads = random_reads(LENGTHS)
    net.at_most = 3  # windows per pass
    found = probabilities(kit, net, reads)
    for read, row in zip(reads, found, strict=True):
        windows = window_texts(read, bases)
        alone = probabilities(kit, net, windows)
        mean = np.log(np.maximum(alone, LEAST_VOTE)).mean(axis=0)
        assert row == pytest.approx(np.exp(mean) / np.exp(mean).sum(), abs=1e-5)
    assert found.sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_windows_without_bases_do_not_vote():
    kit = make_kit("cnn", max_length=100)
    torch.manual_seed(0)
    net = kit.build(batch_of(kit, random_reads([60]))).eval()
    (read,) = random_reads([175])
    for unknown in ("N" * 1000, "N" * 2000):
        with torch.inference_mode():
            found, is_supported = probabilities_of(net, batch_of(kit, [unknown, read + unknown]))
        voters = [window for window in window_texts(read + unknown, 100) if window.strip("N")]
        assert is_supported.tolist() == [False, True] and len(voters) < 5
        mean = np.log(np.maximum(probabilities(kit, net, voters), LEAST_VOTE)).mean(axis=0)
        assert found[1].numpy() == pytest.approx(np.exp(mean) / np.exp(mean).sum(), abs=1e-5)


def test_a_window_of_every_long_read_is_trained_on_another_in_each_epoch():
    kit = make_kit("cnn", max_length=50, reverse_complement=False)
    reads = random_reads([400, 30])
    flat = np.frombuffer("".join(reads).encode(), np.uint8)
    batch = ReadBatch(np.arange(2), flat, np.array([0, 400, 430]), {})
    seen: set[str] = set()
    (feature,) = kit.features
    for epoch in range(8):
        ids = np.asarray(feature(batch, seed=1, epoch=epoch)["input_ids"])
        texts = ["".join("?ACGTN"[number] for number in row if number) for row in ids]
        assert ids.shape == (2, 50) and texts[0] in reads[0] and texts[1] == reads[1]
        assert np.array_equal(ids, np.asarray(feature(batch, seed=1, epoch=epoch)["input_ids"]))
        seen.add(texts[0])
    assert len(seen) > 5


def test_reads_that_fit_are_seen_as_without_windows():
    plain = BothStrands(make_kit("cnn").features[0])  # type: ignore[arg-type]
    flat = np.frombuffer("".join(random_reads([80, 100])).encode(), np.uint8)
    batch = ReadBatch(np.arange(2), flat, np.array([0, 80, 180]), {})
    found, expected = Windows(plain, 100)(batch), plain(batch)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(expected[name])) for name in found)


def test_a_transformer_reads_windows_of_the_length_it_was_built_for():
    (read,) = random_reads([200])
    cut = make_kit("transformer", max_length=7, reverse_complement=False)
    assert batch_of(cut, [read], train=True)["input_ids"].shape == (1, 7)
    net = cut.build(batch_of(cut, [read], train=True))
    assert net.place.shape == (7, 16)  # type: ignore[union-attr]
    again = as_built("transformer", ReadSettings(), {name: value.shape for name, value in net.state_dict().items()})
    assert again.max_length == 7


def test_a_very_long_read_goes_through_the_net_in_pieces(monkeypatch: pytest.MonkeyPatch):
    kit = make_kit("cnn", max_length=1000, width=8, layers=1)
    net = kit.build(batch_of(kit, random_reads([60]))).eval()
    sizes: list[int] = []
    logits = ReadCNN.logits

    def counting(self: ReadCNN, batch: Any) -> Any:
        sizes.append(batch["input_ids"].numel())
        return logits(self, batch)

    monkeypatch.setattr(ReadCNN, "logits", counting)
    flat = np.random.default_rng(0).choice(np.frombuffer(b"ACGT", np.uint8), 300_000)
    (feature,) = kit.scoring or ()
    made = feature(ReadBatch(np.arange(1), flat, np.array([0, flat.size]), {}))
    num_bytes = sum(np.asarray(value).nbytes for value in made.values())
    assert num_bytes < feature.growth * flat.size  # type: ignore[attr-defined]
    with torch.inference_mode():
        found, _ = probabilities_of(net, {name: torch.as_tensor(value) for name, value in made.items()})
    assert found.shape == (1, 3)
    assert sum(sizes) == 2 * 400 * 1000 and max(sizes) * 8 * 4 <= 4 << 20  # both strands


def test_windows_keep_tokens_of_both_strands_together():
    feature = TokenFeature(kmer(1), make_kit("cnn").features[0].augment, (), None, "longest", np.int32)  # type: ignore[attr-defined]
    (read,) = random_reads([90])
    made = Windows(BothStrands(feature), 40)(
        ReadBatch(np.arange(1), np.frombuffer(read.encode(), np.uint8), np.array([0, 90]), {})
    )
    ids, other = (np.asarray(made[name]) for name in ("input_ids", "other_input_ids"))
    assert np.asarray(made["windows"]).tolist() == [3] and ids.shape == (3, 40)
    assert np.array_equal(other, 5 - ids[:, ::-1])
