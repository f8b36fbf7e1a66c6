"""What every read classifier promises: predictions are independent, both strands count, and each net learns."""

# B batch, C classes

import multiprocessing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from millstream.errors import BadSetting
from millstream.reads.classifiers import KS, LEAST_BITS, MOST_BITS, ClassifierSpec, clades_of, fitting_bits
from millstream.reads.classifiers.nets import KmerLinear, ReadNet, ReadPredictions
from millstream.reads.classifiers.nets import probabilities as probabilities_of
from millstream.reads.features import KmerBag
from millstream.reads.kind import ReadSettings
from millstream.reads.mapping import load_classes, load_mapping
from millstream.training.study import Kit
from millstream.training.task import Batch
from support.small_classifiers import (
    LENGTHS,
    NUM_CLASSES,
    batch_of,
    easy_reads,
    learn,
    make_kit,
    probabilities,
    random_reads,
    reverse_complement,
    together_as_alone,
)

NETS = ["kmer-linear", "cnn", "lstm", "transformer"]
SEQUENTIAL = ["cnn", "lstm", "transformer"]  # these see the two strands of a read differently


@cache
def built(name: str, **changes: Any) -> tuple[Kit, ReadNet]:
    """A net with random weights, shared between tests."""
    kit = make_kit(name, **changes)
    torch.manual_seed(0)
    net = kit.build(batch_of(kit, random_reads([100])))
    with torch.no_grad():
        for key, buffer in net.named_buffers():
            if key.startswith("table") or key.endswith("running_mean"):
                buffer.normal_(std=0.3)
        for key, parameter in net.named_parameters():
            if key.endswith("bias") and name != "kmer-linear":  # zeros at first, with which padding might stay zero
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return kit, net.eval()


class Given(ReadNet):
    """Its logits are in the batch."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__(1, num_classes)

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return batch["given"], {}


def logits_of(given: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(given).log()


# -- predictions


@pytest.mark.parametrize("name", NETS)
def test_a_prediction_depends_on_no_other_read_and_no_padding(name: str):
    kit, net = built(name)
    reads = random_reads(LENGTHS)
    together = together_as_alone(kit, net, reads)
    assert probabilities(kit, net, reads[::-1]) == pytest.approx(together[::-1], abs=1e-5)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_wider_padding_does_not_change_the_logits(name: str):
    kit, net = built(name)
    batch = dict(batch_of(kit, random_reads((40, 90))))
    with torch.inference_mode():
        expected = net.logits(batch)[0]
        for pad in (1, 8, 30):
            wider = {key: functional.pad(value, (0, pad)) for key, value in batch.items() if key != "numbers"}
            assert net.logits(wider)[0].numpy() == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_reads_too_short_for_a_token_have_the_same_prediction(name: str):
    kit, net = built(name)
    none = probabilities(kit, net, ["", ""])
    assert np.isfinite(none).all() and none.sum(axis=1) == pytest.approx(1, abs=1e-5)
    mixed = probabilities(kit, net, [random_reads([80])[0], ""])
    assert mixed[1] == pytest.approx(none[0], abs=1e-5) and none[1] == pytest.approx(none[0], abs=1e-6)
    assert np.isfinite(probabilities(kit, net, ["A", "C", "NN"])).all()
    if name == "kmer-linear":
        assert none[0] == pytest.approx(1 / NUM_CLASSES)  # its biases are zero


@pytest.mark.parametrize("name", NETS)
def test_reads_too_short_for_a_token_can_be_trained_on(name: str):
    kit, net = make_kit(name), make_kit(name).build(batch_of(built(name)[0], ["ACGTACGT"]))
    for reads in (["", "A"], ["", "ACGTACGTACGTACG"]):
        loss, _ = net.train()(batch_of(kit, reads, [0, 1], train=True), torch.tensor([0, 1]), torch.ones(2))
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_a_read_and_its_reverse_complement_have_the_same_prediction(name: str):
    kit, net = built(name)
    reads = random_reads(LENGTHS)
    found, other = probabilities(kit, net, reads), probabilities(kit, net, [reverse_complement(read) for read in reads])
    assert found == pytest.approx(other, abs=1e-5)
    one_way = make_kit(name, reverse_complement=False)
    forward, backward = (
        probabilities(one_way, net, some) for some in (reads, [reverse_complement(read) for read in reads])
    )
    assert np.abs(forward - backward).max() > 1e-3
    assert found == pytest.approx((forward + backward) / 2, abs=1e-5)


def test_kmer_linear_needs_one_strand_only():
    kit, net = built("kmer-linear")
    reads = random_reads(LENGTHS)
    assert not any(key.startswith("other_") for key in batch_of(kit, reads))
    other = probabilities(kit, net, [reverse_complement(read) for read in reads])
    assert probabilities(kit, net, reads) == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_half_of_the_training_reads_are_reverse_complemented(name: str):
    kit, _ = built(name)
    reads = random_reads([60] * 40)
    seen, scored = batch_of(kit, reads, train=True), batch_of(kit, reads)
    assert not any(key.startswith("other_") for key in seen)
    is_reversed = (seen["input_ids"] == scored["other_input_ids"]).all(dim=1)
    is_same = (seen["input_ids"] == scored["input_ids"]).all(dim=1)
    assert (is_reversed ^ is_same).all() and 8 <= int(is_reversed.sum()) <= 32
    forward = make_kit(name, reverse_complement=False)
    assert torch.equal(batch_of(forward, reads, train=True)["input_ids"], scored["input_ids"])


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_order_of_bases_matters(name: str):
    """Every part of a read matters, both ends included."""
    kit, net = built(name, reverse_complement=False)
    read = "C" * 63
    found = probabilities(kit, net, [read, "GAT" + read[3:], read[:-3] + "GAT", read[:30] + "GAT" + read[33:]])
    assert min(np.abs(found[a] - found[b]).max() for a in range(4) for b in range(a)) > 1e-5


def test_the_prediction_is_the_most_probable_class():
    given = logits_of([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]]) + torch.tensor([[3.0], [-40.0]])
    answers = ReadPredictions({})(Given(), {"given": given})
    assert list(answers) == ["class", "probability"]
    assert answers["class"].tolist() == [1, 0] and answers["class"].dtype == torch.int32
    assert answers["probability"].tolist() == pytest.approx([0.7, 0.6])


def test_strands_are_averaged_as_probabilities():
    batch = {"given": logits_of([[0.9, 0.1, 0.0]]), "other_given": logits_of([[0.2, 0.2, 0.6]])}
    assert probabilities_of(Given(), batch)[0][0].tolist() == pytest.approx([0.55, 0.15, 0.3])


def test_a_pair_is_of_the_class_that_both_mates_may_be_of():
    pairs = ReadPredictions({"genus": np.array([0, 0, 1])}, mates=2)
    given = [[0.5, 0.1, 0.4], [0.1, 0.4, 0.5], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]
    answers = pairs(Given(), {"given": logits_of(given)})
    assert answers["class"].tolist() == [2, 0]
    assert answers["probability"].tolist() == pytest.approx([0.2 / 0.29, 0.08 / 0.17])
    assert answers["genus"].tolist() == [1, 0]
    assert answers["genus_probability"].tolist() == pytest.approx([0.2 / 0.29, 0.16 / 0.17])
    assert ReadPredictions({})(Given(), {"given": logits_of(given)})["class"].tolist() == [0, 2, 0, 1]


def test_a_mate_that_is_surely_of_no_class_makes_a_pair_less_certain():
    given = logits_of([[0.6, 0.1, 0.1, 0.2], [0.1, 0.0, 0.0, 0.9], [0.6, 0.1, 0.1, 0.2], [0.6, 0.1, 0.1, 0.2]])
    answers = ReadPredictions({}, mates=2)(Given(), {"given": given})
    assert answers["class"].tolist() == [0, 0] and answers["probability"][0] < 0.3 and answers["probability"][1] > 0.8


def test_the_probability_of_a_taxon_is_the_sum_over_its_classes():
    taxa = ReadPredictions({"genus": np.array([1, 0, 1, -1, -1]), "family": np.array([0, 0, 0, -1, 0])})
    answers = taxa(Given(5), {"given": logits_of([[0.2, 0.3, 0.2, 0.25, 0.05], [0.05, 0.04, 0.01, 0.8, 0.1]])})
    assert answers["class"].tolist() == [1, 3]
    assert answers["genus"].tolist() == [1, 1] and answers["genus"].dtype == torch.int32
    assert answers["genus_probability"].tolist() == pytest.approx([0.4, 0.06])
    assert answers["family"].tolist() == [0, 0]
    assert answers["family_probability"].tolist() == pytest.approx([0.75, 0.2])


def test_the_rank_class_has_a_column_of_its_own():
    answers = ReadPredictions({"class": np.array([0, 0, 0])})(Given(), {"given": logits_of([[0.2, 0.3, 0.5]])})
    assert answers["class"].tolist() == [2] and answers["probability"].tolist() == pytest.approx([0.5])
    assert answers["rank_class"].tolist() == [0] and answers["rank_class_probability"].tolist() == pytest.approx([1.0])


def test_tables_larger_than_the_memory_budget_are_refused():
    with pytest.raises(BadSetting, match=r"50000 classes .* 1\.6 GB\. .*memory=3\.3GB"):
        make_kit("kmer-linear", num_classes=50_000, bits=None, memory=300_000_000)


@pytest.mark.parametrize("width", [12, 33, 50, 129, 200])
def test_a_transformer_may_have_any_width(width: int):
    kit, net = built("transformer", width=width)
    assert probabilities(kit, net, random_reads([60])).sum() == pytest.approx(1, abs=1e-5)


# -- learning


def test_the_loss_is_the_weighted_cross_entropy():
    given, target = torch.randn(6, NUM_CLASSES, generator=torch.manual_seed(0)), torch.tensor([0, 2, 1, 1, 0, 2])
    weight = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 1.0])
    loss, parts = Given()({"given": given}, target, weight)
    found = np.exp(given.numpy()) / np.exp(given.numpy()).sum(axis=1, keepdims=True)
    expected = np.mean(-np.log(found[np.arange(6), target.numpy()]) * weight.numpy())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert list(parts) == ["cross_entropy"] and parts["cross_entropy"].item() == pytest.approx(expected, rel=1e-5)


def test_a_batch_may_have_a_single_read():
    kit, net = built("cnn")
    batch = batch_of(kit, random_reads([40]), [1], train=True)
    loss, _ = net.train()(batch, batch["label"], torch.ones(1))
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize(("name", "steps"), [("kmer-linear", 60), ("cnn", 15), ("lstm", 30), ("transformer", 45)])
def test_every_net_learns_to_separate_classes_that_differ(name: str, steps: int):
    kit = make_kit(name, num_classes=2, layers=1)
    torch.manual_seed(0)
    net = kit.build(batch_of(kit, easy_reads(4, seed=0)[0]))
    before, after = learn(kit, net, steps)
    assert after < 0.3 and after < before / 1.5


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_gradients_reach_every_parameter(name: str):
    kit, _ = built(name)
    torch.manual_seed(0)
    reads = random_reads(LENGTHS)
    net = kit.build(batch_of(kit, reads)).train()
    net(batch_of(kit, reads, train=True), torch.arange(6) % 3, torch.ones(6))[0].backward()
    assert [
        key for key, parameter in net.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ] == []


# -- kmer-linear


def counted(ks: Mapping[int, int], bits: int, reads: Sequence[str], labels: Sequence[int]) -> tuple[KmerLinear, Batch]:
    """The net after it counted the reads in two batches; and all of them as one batch."""
    bag = KmerBag(tuple(ks), tuple(ks.values()), bits)
    kit = Kit([bag], lambda _: KmerLinear(bag, NUM_CLASSES))
    net = kit.build({})
    assert isinstance(net, KmerLinear) and net.needs_preparation
    net.prepare(batch_of(kit, reads[part], labels[part]) for part in (slice(0, 7), slice(7, None)))
    with torch.no_grad():
        net.gain.copy_(torch.linspace(0.2, 0.5, len(net.ks)))
        net.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return net, batch_of(kit, reads, labels)


def bags_of(batch: Batch, k: int) -> list[np.ndarray]:
    return np.split(batch[f"buckets_{k}"].numpy(), batch[f"starts_{k}"].numpy())[1:]


def slow_counts(batch: Batch, k: int, bits: int, without: int | None = None) -> np.ndarray:
    counts = np.zeros((1 << bits, NUM_CLASSES))
    for number, bag in enumerate(bags_of(batch, k)):
        for bucket in bag.tolist() if number != without else ():
            counts[bucket, int(batch["label"][number])] += 1
    return counts


def slow_sizes(net: KmerLinear, counts: np.ndarray, k: int) -> np.ndarray:
    """The mean log count over the k-mers of random DNA."""
    return np.log(1 + counts)[net.bag.background()[k]].mean(axis=0)


LABELS = [0, 1, 2, 0, 0, 1, 0, 0, 2, 1, 0, 0]


def test_counted_weights_match_a_slow_count():
    reads = random_reads([50, 20, 90, 3, 40, 70, 0, 60, 30, 5, 100, 45], seed=4)
    net, batch = counted({4: 1, 7: 2}, 6, reads, LABELS)
    expected = np.tile(np.array([0.1, -0.2, 0.3]), (len(reads), 1))
    for k, gain in ((4, 0.2), (7, 0.5)):
        counts = slow_counts(batch, k, 6)
        weights = np.log(1 + counts) - slow_sizes(net, counts, k)
        assert getattr(net, f"table_{k}").numpy() == pytest.approx(weights, abs=1e-5)
        expected += gain * np.array([weights[bag].sum(axis=0) for bag in bags_of(batch, k)])
    with torch.no_grad():
        assert net.eval().logits(batch)[0].numpy() == pytest.approx(expected, abs=1e-4)


def test_during_training_a_read_is_excluded_from_its_own_counts():
    """There are enough buckets that no two k-mers of a read share one; the sizes of classes include the read."""
    reads = random_reads([40, 30, 50, 40, 8, 40, 40, 40, 30, 2, 50, 40], seed=5)
    reads[3] = reads[0][5:35] + reads[3][:10]  # shared with a read of its class, and with one of another
    reads[5] = reads[0][:20] + reads[5][:20]
    net, batch = counted({8: 1, 10: 2}, 20, reads, LABELS)
    for k in (8, 10):
        assert all(len(set(bag.tolist())) == len(bag) for bag in bags_of(batch, k))
    expected = np.tile(np.array([0.1, -0.2, 0.3]), (len(reads), 1))
    for k, gain in ((8, 0.2), (10, 0.5)):
        sizes = slow_sizes(net, slow_counts(batch, k, 20), k)
        for number, bag in enumerate(bags_of(batch, k)):
            weights = np.log(1 + slow_counts(batch, k, 20, without=number)) - sizes
            expected[number] += gain * weights[bag].sum(axis=0)
    with torch.no_grad():
        assert net.train().logits(batch)[0].numpy() == pytest.approx(expected, abs=1e-3)
        assert np.abs(net.eval().logits(batch)[0].numpy() - expected).max() > 1


def test_only_a_gain_per_k_and_a_bias_per_class_are_trained():
    net, batch = counted({4: 1, 7: 2}, 6, random_reads([50] * 12, seed=4), LABELS)
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == {"gain": (2,), "bias": (NUM_CLASSES,)}
    table = net.table_4.clone()  # type: ignore[operator]
    net.train()(batch, batch["label"], torch.ones(12))[0].backward()
    assert net.gain.grad.all() and net.bias.grad.all()  # type: ignore[union-attr]
    net.optimizer(0.1, 0.0).step()
    assert torch.equal(net.table_4, table)  # type: ignore[arg-type]
    assert net.num_rows(batch) == 12


def test_a_class_with_more_reads_has_no_larger_weights():
    few = random_reads([100] * 30, seed=8)
    net, _ = counted({8: 1}, 6, 4 * few + few, [0] * 120 + [1] * 30)
    found = net.table_8[:, :2]  # type: ignore[index]
    assert found[:, 0].numpy() == pytest.approx(found[:, 1].numpy(), abs=0.05)  # the counts differ by log(4)


def test_random_dna_has_a_score_of_zero_in_classes_of_any_size():
    reads = random_reads([2000] * 40 + [300], seed=3)
    net, _ = counted({8: 2, 10: 1}, 12, reads, [0] * 35 + [1] * 5 + [2])
    kit = Kit([net.bag], lambda _: net)
    with torch.no_grad():
        net.bias.zero_()
        scores = net.eval().logits(batch_of(kit, random_reads([1000] * 300, seed=9)))[0].numpy()
    assert np.abs(scores.mean(axis=0) / scores.std(axis=0)).max() < 0.25
    assert np.bincount(scores.argmax(axis=1), minlength=3).max() < 200  # of 300, none of the classes attracts most


def test_reads_without_evidence_for_a_class_have_a_probability_of_zero():
    genomes = random_reads([6000, 6000, 500], seed=3)
    reads = [genome[at : at + 200] for genome in genomes for at in range(0, len(genome) - 150, 50)]
    labels = [label for label, genome in enumerate(genomes) for _ in range(0, len(genome) - 150, 50)]
    net, _ = counted({12: 1, 14: 2}, 14, reads, labels)
    kit = Kit([net.bag], lambda _: net)

    def predict(reads: Sequence[str], mates: int = 1) -> Mapping[str, Tensor]:
        with torch.inference_mode():
            return ReadPredictions({"genus": np.array([0, 0, 1])}, mates)(net.eval(), batch_of(kit, reads))

    of_class = [genomes[0][100:250], genomes[1][3000:3100], genomes[2][20:220]]
    found = predict(of_class)
    assert found["class"].tolist() == [0, 1, 2] and (found["probability"] > 0.9).all()
    nothing = ["", "N" * 200, genomes[0][:11], "ACGTACGTACN" * 20]  # no k-mers
    found = predict([*nothing, genomes[0][:12] + "N", *random_reads([5000] * 20, seed=1)])
    assert found["probability"][:5].tolist() == found["genus_probability"][:5].tolist() == [0.0] * 5
    assert int((found["probability"][5:] > 0).sum()) <= 2
    found = predict([of_class[1], "", "N" * 30, of_class[2], "", ""], mates=2)
    assert found["class"][:2].tolist() == [1, 2]
    assert (found["probability"] > 0.9).tolist() == [True, True, False] and found["probability"][2] == 0


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_reads_without_bases_are_not_classified(name: str):
    kit, net = built(name)
    with torch.inference_mode():
        found = ReadPredictions({})(net, batch_of(kit, ["", "N" * 40, "N" * 20 + "ACGTACGT" + "N" * 20, "ACGTACGT"]))
    assert (found["probability"] > 0).tolist() == [False, False, True, True]


# -- the zoo


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12,24/8", {12: 1, 24: 8}), ("5", {5: 1}), ("31/2, 1", {31: 2, 1: 1}), ("auto", KS), ("7/1", {7: 1})],
)
def test_the_setting_k_lists_lengths_and_subsampling(text: str, expected: dict[int, int]):
    (bag,) = make_kit("kmer-linear", k=text).features
    assert isinstance(bag, KmerBag) and (bag.ks, bag.every) == (tuple(expected), tuple(expected.values()))
    assert bag.bits == 9


@pytest.mark.parametrize("text", ["", "a", "12,", "12;24", "12/x", "1.5", "12/8/2"])
def test_an_invalid_list_of_lengths_is_refused(text: str):
    with pytest.raises(BadSetting, match=rf"^k={text}:"):
        make_kit("kmer-linear", k=text)


@pytest.mark.parametrize("text", ["0", "32", "12,40/8", "-3", "12/0", "12/-1"])
def test_lengths_out_of_range_are_refused(text: str):
    with pytest.raises(BadSetting, match=rf"k={text}: .*1 to 31"):
        make_kit("kmer-linear", k=text)


@pytest.mark.parametrize("memory", [1 << 22, 3_000_000_00, 1 << 31, 777_777_777])
@pytest.mark.parametrize("weights", [1, 3, 20, 257, 1000])
def test_buckets_take_between_a_quarter_and_half_of_the_memory(weights: int, memory: int):
    bits = fitting_bits(weights, memory)
    assert LEAST_BITS <= bits <= MOST_BITS
    size = 4 * weights * 2**bits
    assert size <= memory / 2 or bits == LEAST_BITS
    assert 2 * size > memory / 2 or bits == MOST_BITS


def test_tables_have_the_buckets_that_fit_or_are_set():
    kit = make_kit("kmer-linear", bits=None, memory=1 << 23)
    net = kit.build(batch_of(kit, ["ACGTACGT"]))
    size = sum(buffer.nbytes for name, buffer in net.named_buffers() if name.startswith("table"))
    assert (1 << 19) < size <= 1 << 21
    kit = make_kit("kmer-linear", bits=5)
    assert kit.build({}).table_4.shape == (32, NUM_CLASSES)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_nets_have_the_given_width_and_classes(name: str):
    for width, num_classes in ((8, 2), (32, 7)):
        kit = make_kit(name, width=width, num_classes=num_classes)
        batch = batch_of(kit, random_reads((40, 50)))
        net = kit.build(batch)
        assert (net.width, net.num_classes) == (width, num_classes)
        assert net.logits(batch)[0].shape == (2, num_classes)
        assert net.num_rows(batch) > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured in /proc")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_counts_of_many_classes_become_weights_in_little_memory():
    """Two tables of 26 MB each, in a process of its own; it took 205 MB when a step was 65,536 rows of any width."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(megabytes_to_weigh) < 40


def megabytes_to_weigh() -> float:
    KmerLinear(KmerBag((14, 16), (4, 8), 16), 2)._weigh()  # what is compiled when first used
    net = KmerLinear(KmerBag((14, 16), (4, 8), 16), 100)
    for k in net.ks:
        net._table(k).copy_(torch.randint(0, 4, (1 << 16, 100)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present value
    before = megabytes("VmRSS")
    net._weigh()
    return megabytes("VmHWM") - before


def megabytes(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1000


# -- a loss over ranks


def test_the_loss_over_ranks_is_the_mean_over_the_class_and_its_taxa():
    logits_BC = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    target_B, weight_B = torch.tensor([0, 1, 2, 3, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0])
    net = Given(4)
    own = functional.cross_entropy(logits_BC, target_B, reduction="none")
    torch.testing.assert_close(net.loss(logits_BC, target_B, weight_B), (own * weight_B).mean())
    net.clades = [np.array([0, 0, 1, 7])]  # the last class has no genus
    likely_BC = logits_BC.softmax(1)
    genus_BC = torch.stack([likely_BC[:, :2].sum(1)] * 2 + [likely_BC[:, 2], likely_BC[:, 3]], dim=1)
    genus = -genus_BC.gather(1, target_B[:, None])[:, 0].log()
    torch.testing.assert_close(net.loss(logits_BC, target_B, weight_B), ((own + genus) / 2 * weight_B).mean())


def test_a_net_with_ranks_learns_the_genus_of_species_that_cannot_be_told_apart():
    """Two genera of two species each; species are labelled at random."""
    reads, genera = easy_reads(128, seed=1)
    labels = torch.from_numpy(2 * genera + np.random.default_rng(0).integers(0, 2, len(genera)))
    test, true = easy_reads(128, seed=2)
    kit = make_kit("lstm", num_classes=4, clades=[np.array([0, 0, 1, 1])])
    torch.manual_seed(0)
    net = kit.build(batch_of(kit, reads[:4]))
    batch, optimizer = batch_of(kit, reads, labels.tolist(), train=True), net.optimizer(4 * net.lr, 0.0)
    for _ in range(25):
        optimizer.zero_grad()
        net(batch, labels, torch.ones(len(labels)))[0].backward()
        optimizer.step()
    found = probabilities(kit, net.eval(), test).reshape(-1, 2, 2)
    of_genus = found.sum(2)
    assert (of_genus.argmax(1) == true).mean() > 0.95
    assert of_genus.max(1).mean() > 0.9 and found.max((1, 2)).mean() < 0.75


def test_ranks_are_levels_above_the_classes_each_once():
    columns = {"class_id": [0, 1, 2], "species": list("abc"), "genus": ["G", "G", None], "family": ["F", "F", None]}
    classes = load_classes(load_mapping(columns))
    assert [level.tolist() for level in clades_of("species, genus,family", classes)] == [[0, 0, 5]]
    assert clades_of("", classes) == [] == clades_of("species", classes)
    with pytest.raises(BadSetting, match=r"ranks=genus,order: .* order; .*species, genus, family"):
        clades_of("genus,order", classes)
    settings = ReadSettings(ranks="genus", width=8)
    kit = ClassifierSpec("cnn", settings, classes).kit()
    net = kit.build(batch_of(kit, random_reads([20])))
    assert isinstance(net, ReadNet) and [level.tolist() for level in net.clades] == [[0, 0, 5]]


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_uneven_reads_go_through_a_net_with_little_padding(name: str, monkeypatch: pytest.MonkeyPatch):
    kit, net = built(name)
    net.eval()  # whatever the test before it did
    reads = random_reads([20, 300, 20, 40, 290, 20, 310, 30])
    alone = np.concatenate([probabilities(kit, net, [read]) for read in reads])
    sizes: list[int] = []
    logits = type(net).logits

    def counting(self: ReadNet, batch: Batch) -> Any:
        sizes.append(batch["input_ids"].numel())
        return logits(self, batch)

    monkeypatch.setattr(net, "at_most", 4)
    monkeypatch.setattr(type(net), "logits", counting)
    batch = batch_of(kit, reads)
    assert probabilities(kit, net, reads) == pytest.approx(alone, abs=1e-5)
    assert sum(sizes) < 0.6 * 2 * batch["input_ids"].numel()  # both strands
