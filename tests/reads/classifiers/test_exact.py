"""`kmer-exact`: what it calls, what it leaves alone, and that it is trained and restored as other classifiers are."""

# B batch, C classes

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.reads.batch import ReadBatch
from millstream.reads.classifiers import classifier_kit
from millstream.reads.classifiers.exact import KmerExact, halves_left_out
from millstream.reads.classifiers.nets import ReadPredictions, probabilities
from millstream.reads.kind import ReadSettings
from millstream.reads.kmers.hits import ChosenKmers, find_hits, whole_reads
from millstream.reads.kmers.matcher import KmerMatcher
from millstream.reads.kmers.sets import KmerSets
from millstream.reads.simulate import SimulateSettings, simulate
from millstream.training.task import Batch

LENGTH = 120
RNG = np.random.default_rng(0)


def dna(length: int) -> str:
    return "".join(RNG.choice(list("ACGT"), length))


SHARED = dna(1500)  # of both genomes
GENOMES = (dna(3000) + SHARED, dna(3000) + SHARED)
KIT = classifier_kit("kmer-exact", ReadSettings(memory="100MB"), 2)


def pieces(genome: str, count: int, seed: int) -> list[str]:
    places = np.random.default_rng(seed).integers(0, len(genome) - LENGTH, count)
    return [genome[place : place + LENGTH] for place in places]


def batch_of(reads: Sequence[str], labels: Sequence[int] = ()) -> Batch:
    flat = np.frombuffer("".join(reads).encode(), np.uint8)
    fetched = ReadBatch(np.arange(len(reads)), flat, np.cumsum([0, *map(len, reads)], dtype=np.int64), {})
    made: dict[str, Any] = {"numbers": fetched.numbers, **KIT.features[0](fetched)}
    if len(labels):
        made["label"] = np.array(labels)
    return {name: torch.as_tensor(value) for name, value in made.items()}


def trained(reads: Sequence[str], labels: Sequence[int]) -> KmerExact:
    torch.manual_seed(0)
    batch = batch_of(reads, labels)
    net = KIT.build(batch)
    assert isinstance(net, KmerExact)
    net.prepare([batch])
    return net.eval()


@pytest.fixture(scope="module")
def net() -> KmerExact:
    reads = [read for label, genome in enumerate(GENOMES) for read in pieces(genome, 300, label)]
    return trained(reads, [0] * 300 + [1] * 300)


def found(net: KmerExact, reads: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """[B, C]: the probabilities. [B]: whether the read is classified."""
    with torch.inference_mode():
        likely_BC, is_supported_B = probabilities(net, batch_of(reads))
    return likely_BC.numpy(), is_supported_B.numpy()


def test_reads_are_of_the_class_that_has_their_kmers_whatever_the_strand(net: KmerExact):
    for label, genome in enumerate(GENOMES):
        reads = pieces(genome[:3000], 50, 7)
        for some in (reads, [read[::-1].translate(str.maketrans("ACGT", "TGCA")) for read in reads]):
            likely_BC, is_supported_B = found(net, some)
            assert is_supported_B.all() and likely_BC[:, label].min() > 0.9


def test_a_foreign_read_is_unclassified(net: KmerExact):
    likely_BC, is_supported_B = found(net, [dna(LENGTH) for _ in range(200)] + ["", "ACGT", "N" * LENGTH])
    assert not is_supported_B.any() and not likely_BC.any()


def test_a_read_that_both_classes_share_is_of_neither_for_certain(net: KmerExact):
    likely_BC, _ = found(net, pieces(SHARED, 30, 3))
    assert np.median(likely_BC.max(axis=1)) < 0.6 and likely_BC.sum(axis=1).min() > 0.8


def test_a_prediction_depends_on_no_other_read(net: KmerExact):
    reads = [*pieces(GENOMES[0], 5, 5), "", dna(300), *pieces(GENOMES[1], 5, 6), "ACG"]
    together = found(net, reads)[0]
    for number, read in enumerate(reads):
        assert found(net, [read])[0][0] == pytest.approx(together[number], abs=1e-6)


def test_a_net_that_is_restored_answers_the_same(net: KmerExact):
    again = KIT.build({})
    again.load_state_dict(net.state_dict())
    assert isinstance(again, KmerExact)
    reads = [*pieces(GENOMES[0], 20, 8), dna(LENGTH)]
    assert np.array_equal(found(again.eval(), reads)[0], found(net, reads)[0])


def test_what_training_draws_is_repeated_and_its_steps_change_nothing(net: KmerExact):
    reads, labels = pieces(GENOMES[0], 200, 0) + pieces(GENOMES[1], 200, 1), [0] * 200 + [1] * 200
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batch = batch_of(reads, labels)
    torch.manual_seed(3)
    loss, _ = net(batch, batch["label"], torch.ones(400))
    torch.manual_seed(3)
    assert net(batch, batch["label"], torch.ones(400))[0] == loss  # a resumed run draws the same
    loss.backward()
    net.optimizer(0.1, 0.0).step()
    assert {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])} == set()


@pytest.mark.parametrize("mates", [1, 2])
def test_at_work_it_answers_as_the_net_does_without_torch(net: KmerExact, mates: int):
    some = [*pieces(GENOMES[0], 30, 5), *pieces(SHARED, 10, 4), dna(300), "", *pieces(GENOMES[1], 20, 6)]
    ranks = {"genus": np.array([0, 0]), "family": np.array([-1, 1])}
    flat = np.frombuffer("".join(some).encode(), np.uint8)
    fetched = ReadBatch(np.arange(len(some)), flat, np.cumsum([0, *map(len, some)], dtype=np.int64), {})
    arrays = {name: value.numpy() for name, value in net.state_dict().items()}
    matcher = KmerMatcher(arrays, 2, ranks, mates, 0)
    answers, _, likely = matcher(matcher.features[0](fetched))
    with torch.inference_mode():
        expected = ReadPredictions(ranks, mates)(net, batch_of(some))
    is_found = expected["probability"].numpy() > 0
    assert (answers["probability"] > 0).tolist() == is_found.tolist()
    assert (np.diff(likely, axis=1) <= 0).all()
    for name, value in expected.items():
        if value.is_floating_point():
            assert answers[name] == pytest.approx(value.numpy(), abs=1e-5), name
    is_sure = is_found & (np.abs(answers["probability"] - 0.5) > 0.01)
    assert answers["class"][is_sure].tolist() == expected["class"][is_sure].tolist()


def test_classifying_with_it_imports_no_torch():
    code = "import millstream.reads.classify, millstream.reads.classify_command, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kmers_of_blocks_that_are_left_out_count_only_when_reads_are_classified():
    """A class has the first half of its genome only in a block that is left out."""
    numbers = np.arange(10_000)
    out, kept = (numbers[(halves_left_out(numbers) == which).all(axis=1)][0] for which in (True, False))
    genome = dna(4000)
    halves = batch_of([genome[:2020], genome[2000:], dna(4000)], [0, 0, 1])
    halves["numbers"] = torch.tensor([out, kept, kept + 1])
    net = KIT.build(halves)
    assert isinstance(net, KmerExact)
    net.prepare([halves])
    whole = batch_of([genome[:500], genome[3000:3500]])
    found = net.logits(whole)[0].argmax(dim=1)
    assert found.tolist() == [0, 0]
    chosen = ChosenKmers(*(whole[name].numpy() for name in ("kmers", "places", "starts")))
    sets = KmerSets(*(getattr(net, name).numpy() for name in net.BUFFERS))
    tested = whole_reads(np.array([500, 500]))._replace(is_tested=True)
    seen = find_hits(chosen, tested, sets, by=net.chosen, num_classes=2)
    assert seen.classes[:, 0].tolist() == [-1, 0]


def test_it_is_trained_saved_and_classifies_as_other_models_do(tmp_path: Path):
    genomes = [tmp_path / f"{562 + label}_genome.fna" for label in range(2)]
    for path, genome in zip(genomes, GENOMES, strict=True):
        path.write_text(f">{path.stem}\n{genome[:3000]}\n")
    mapping, reads = tmp_path / "species.tsv", tmp_path / "reads.fa"
    simulate(genomes, [reads], settings=SimulateSettings(reads=1500, length=LENGTH), mapping=mapping)
    out = tmp_path / "run"
    settings = {"model": "kmer-exact", "memory": "300MB"}
    ms.train({"train": str(reads)}, mapping=str(mapping), out=str(out), **settings)
    mixed = tmp_path / "mixed.fa"
    own = [f">own{number}\n{read}\n" for number, read in enumerate(pieces(GENOMES[1][:3000], 20, 9))]
    mixed.write_text("".join([*own, *(f">foreign{number}\n{dna(LENGTH)}\n" for number in range(20))]))
    done = ms.classify(str(out), str(mixed), out=str(tmp_path / "rows.tsv"))
    assert (done.num_classified, done.num_unclassified) == (20, 20)
    rows = [line.split("\t") for line in (tmp_path / "rows.tsv").read_text().splitlines()[1:]]
    assert all((row[2] == "563") == row[0].startswith("own") for row in rows)
