"""Genomes cut into fragments: nothing is lost, and classifiers train on them as on reads."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting
from millstream.reads.fragments import Fragments, are_genomes

RNG = np.random.default_rng(1)
K = 21
LENGTHS = (1000, 5, 61, 60, 0, 250)


def dna(length: int) -> str:
    return "".join(RNG.choice(list("ACGT"), length))


SEQUENCES = [dna(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def fragments(tmp_path_factory: pytest.TempPathFactory) -> Fragments:
    file = tmp_path_factory.mktemp("genomes") / "genomes.fna"
    lines = ["\n".join(text[at : at + 50] for at in range(0, len(text), 50)) for text in SEQUENCES]
    file.write_text("".join(f">c{number}\n{text}\n" for number, text in enumerate(lines)))
    return Fragments(ms.open(file, header_regex=r"c(?P<class_id>\d+)"), length=60, overlap=K - 1)


def kmers(texts: list[str]) -> list[str]:
    return sorted(text[at : at + K] for text in texts for at in range(len(text) - K + 1))


def test_every_kmer_is_in_one_fragment(fragments: Fragments):
    found = fragments.fetch(np.arange(len(fragments)))
    assert kmers(found.sequences()) == kmers(SEQUENCES)
    assert set(found.lengths.tolist()) <= set(range(61))


def test_a_fragment_has_the_columns_of_its_sequence(fragments: Fragments):
    found = fragments.fetch([0, 25, len(fragments) - 1], ["sequence", "name", "class_id"])
    assert list(found.columns["name"]) == ["c0", "c1", "c5"]
    assert list(found.columns["class_id"]) == [0, 1, 5]
    whole = fragments.column("class_id").to_pylist()
    assert len(whole) == len(fragments) and whole[25] == 1 and whole == sorted(whole)
    assert found.numbers.tolist() == [0, 25, len(fragments) - 1]


def test_fragments_come_in_any_order_and_through_the_loader(fragments: Fragments):
    order = RNG.permutation(len(fragments))
    texts = fragments.fetch(np.arange(len(fragments))).sequences()
    assert fragments.fetch(order).sequences() == [texts[number] for number in order]
    batches = ms.Loader(fragments, batch_size=4, features=ms.features.fields("class_id"), seed=1, memory="50MB")
    seen = [number for batch in batches for number in batch["numbers"].tolist()]
    assert sorted(seen) == list(range(len(fragments)))


def genomes(folder: Path) -> Path:
    """Two genomes, and a mapping."""
    for label in range(2):
        sequence = dna(30_000)
        (folder / f"{label}.fna").write_text(f">lbl|{label}|{562 + label}||g{label}\n{sequence}\n")
    (folder / "species.tsv").write_text("class_id\ttax_id\tspecies\n0\t562\tE\n1\t563\tF\n")
    return folder


def test_classifiers_train_straight_from_genomes(tmp_path: Path):
    folder = genomes(tmp_path)
    assert are_genomes(ms.open(f"{folder}/*.fna"))
    settings = {"mapping": str(folder / "species.tsv"), "memory": "300MB", "epochs": 1, "bits": 14}
    out = str(tmp_path / "run")
    done = ms.train({"train": f"{folder}/*.fna"}, model="kmer-exact,kmer-linear", out=out, **settings)
    assert done is not None
    text = (folder / "0.fna").read_text().split("\n")[1]
    reads = tmp_path / "reads.fa"
    lines = [f">r{at}\n{text[at : at + 150]}\n" for at in range(0, 29_000, 500)]
    reads.write_text("".join([*lines, *(f">x{number}\n{dna(150)}\n" for number in range(50))]))
    found = ms.classify(out, str(reads), str(tmp_path / "rows.tsv"), model="kmer-exact")
    rows = [row.split("\t") for row in (tmp_path / "rows.tsv").read_text().splitlines()[1:]]
    assert all((row[2] == "562") == row[0].startswith("r") for row in rows)
    assert found.num_unclassified == 50


def test_contigs_of_draft_genomes_are_told_from_long_reads(tmp_path: Path):
    (tmp_path / "562_draft.fna").write_text("".join(f">c{number}\n{dna(1500)}\n" for number in range(4)))
    (tmp_path / "reads.fq").write_text(f"@long\n{dna(30_000)}\n+\n{'I' * 30_000}\n")
    draft, reads = ms.open(tmp_path / "562_draft.fna"), ms.open(tmp_path / "reads.fq")
    assert are_genomes(draft, by_file=True) and not are_genomes(draft)
    assert not are_genomes(reads, by_file=True) and not are_genomes(reads)


def test_genomes_have_no_mates(tmp_path: Path):
    folder = genomes(tmp_path)
    with pytest.raises(BadSetting, match="paired"):
        ms.train(
            {"train": f"{folder}/*.fna"},
            mapping=str(folder / "species.tsv"),
            model="kmer-exact",
            paired=True,
            out=str(tmp_path / "run"),
        )
