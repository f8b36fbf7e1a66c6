"""Abundances: exact sums however reads are split, and closer to the truth than counts where classes are confusable."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.reads import evidence as evidence_module
from millstream.reads.abundance import HEAD, abundance_table, estimate
from millstream.reads.evidence import UNIT, Evidence, EvidenceSum
from millstream.reads.kraken import Assignments
from millstream.reads.mapping import classes_from_card, load_classes, load_mapping
from millstream.reads.study import make_study


def made(likely: np.ndarray) -> Evidence:
    """Of reads with these probabilities of all classes."""
    order = np.argsort(-likely, axis=1, kind="stable")
    return Evidence.of(order, np.take_along_axis(likely, order, axis=1), likely.shape[1])


def drawn(reads: int, *, classes: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(classes, 0.2), reads)


@given(st.lists(st.integers(0, 200), max_size=6), st.sampled_from([4, 1 << 16]))
def test_the_evidence_does_not_depend_on_where_the_reads_are_split(edges: list[int], most: int):
    likely = drawn(200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_module, "MOST_SETS", most)
        whole, pieces = EvidenceSum(Evidence.none(12)), EvidenceSum(Evidence.none(12))
        whole.add(made(likely))
        for piece in np.split(likely, sorted(edges)):
            pieces.add(made(piece))
        for _ in range(2):
            one, other = whole.total(), pieces.total()
            for name in ("alone", "codes", "units", "reads", "num_merged"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
            pieces = EvidenceSum(Evidence.from_text(other.to_text()))
    assert one.alone.sum() + one.reads.sum() == 200
    assert (one.units.sum(axis=1) - one.reads * UNIT <= one.reads * 4).all()
    assert (one.num_merged > 0) == (most == 4)


def test_reads_that_two_classes_share_go_to_the_one_that_the_other_reads_are_of():
    surely = np.repeat([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], [900, 100, 500], axis=0)
    shared = np.repeat([[0.5, 0.5, 0]], 1000, axis=0)
    found = estimate(made(np.concatenate([surely, shared])))
    assert found.reads == pytest.approx([1800, 200, 500], abs=1)
    assert (found.low <= found.share).all() and (found.share <= found.high).all()
    lengths = np.array([6e6, 2e6, 5e6])
    assert estimate(made(surely), lengths).share == pytest.approx([0.5, 1 / 6, 1 / 3])


def test_em_is_closer_to_an_uneven_community_than_counts_and_its_intervals_cover_it():
    """Two of three classes share most of their genomes, as strains do."""
    rng, covered, errors = np.random.default_rng(1), [], []
    for _ in range(8):
        truth = np.sort(rng.lognormal(0, 1.5, 9))[::-1] / 1.0
        truth = rng.permutation(truth / truth.sum())
        own = rng.choice(9, 4000, p=truth)
        likely = np.full((4000, 9), 1e-6)
        group, is_shared = own // 3 * 3, rng.random(4000) < 0.7
        likely[np.arange(4000), own] = 1
        for member in range(3):  # what is shared is as likely in all of the group
            likely[is_shared, group[is_shared] + member] = 1 + 0.01 * rng.random(is_shared.sum())
        likely /= likely.sum(axis=1, keepdims=True)
        counts = np.bincount(likely.argmax(axis=1), minlength=9) / 4000
        found = estimate(made(likely))
        drawn_truth = np.bincount(own, minlength=9) / 4000
        errors.append([np.abs(counts - drawn_truth).sum(), np.abs(found.share - drawn_truth).sum()])
        covered.append(((found.low <= truth) & (truth <= found.high)).mean())
    of_counts, of_em = np.mean(errors, axis=0)
    assert of_em < 0.2 * of_counts
    assert np.mean(covered) > 0.85


def test_the_table_has_all_reads_and_says_what_is_unclassified():
    columns = {"class_id": [4, 6], "name": ["a", "b"], "tax_id": [562, 563], "genome_length": [4000, 1000]}
    classes = load_classes(load_mapping(columns))
    assignments, lengths = Assignments(classes), classes.genome_lengths
    assert lengths is not None and lengths.tolist() == [4000, 1000]
    found = estimate(made(np.repeat([[1.0, 0], [0, 1]], [40, 10], axis=0)), lengths)
    head, *rows = [line.split("\t") for line in abundance_table(assignments, [40, 10, 50], found, lengths).splitlines()]
    assert "\t".join(head) == HEAD and [row[0] for row in rows] == ["4", "6", ""]
    table = {name: [row[place] for row in rows] for place, name in enumerate(head)}
    assert table["read_share"] == ["0.4", "0.1", "0.5"] and table["reads"] == ["40", "10", "50"]
    assert table["abundance"] == ["0.5", "0.5", ""] and table["genome_length"] == ["4000", "1000", ""]
    some = load_classes(load_mapping({**columns, "genome_length": [4000, None]}))
    assert some.genome_lengths is None


def test_a_run_keeps_the_lengths_of_the_genomes_it_is_trained_on(tmp_path: Path):
    (tmp_path / "genomes").mkdir()
    for name, length in (("562_a.fa", 3000), ("562_b.fa", 5000), ("563_c.fa", 2000)):
        (tmp_path / "genomes" / name).write_text(f">one\n{'ACGT' * (length // 4)}\n")
    mapping, folder = tmp_path / "species.tsv", str(tmp_path / "genomes")
    for head, of_first in (
        ("class_id\ttax_id\tname", 4000),
        ("tax_id\tname\tgenome_length", 7),
        ("tax_id\tname", 4000),
    ):
        keys, cells = ("1\t", "2\t") if "class_id" in head else ("", ""), "\t7" if "length" in head else ""
        mapping.write_text(f"{head}\n{keys[0]}562\ta{cells}\n{keys[1]}563\tb{cells}\n")
        settings = {"data": {"train": folder, "val": folder}, "mapping": str(mapping), "model": "kmer-linear"}
        lengths = classes_from_card(make_study(settings).card).genome_lengths
        assert lengths is not None and lengths.tolist() == [of_first, 7 if cells else 2000]
