"""Validation reads of groups that training never sees, and a warning when splits share exact sequences."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.reads import leaks
from millstream.reads.leaks import shared_sequences
from millstream.reads.study import Classification
from millstream.training.run import study_of

REGEX = r"(?P<class_id>\d+)\|(?P<genome>\w+)\|(?P<number>\d+)"


def bases(rng: np.random.Generator, length: int = 60) -> str:
    return rng.choice(np.frombuffer(b"ACGT", np.uint8), length).tobytes().decode()


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    """Reads of forty genomes of two classes."""
    rng = np.random.default_rng(0)
    path = tmp_path / "reads.fa"
    path.write_text("".join(f">{n % 2}|g{n % 40}|{n}\n{bases(rng)}\n" for n in range(800)))
    (tmp_path / "map.tsv").write_text("class_id\tspecies\n0\tx\n1\ty\n")
    return path


def study(reads: Path, *, regex: str = REGEX, **settings: object) -> Classification:
    data = {"train": str(reads), "header_regex": regex, **settings.pop("data", {})}  # pyright: ignore
    given = {"mapping": str(reads.parent / "map.tsv"), "model": "kmer-linear", "memory": "200MB", **settings}
    found = study_of({"data": data, **given})
    assert isinstance(found, Classification)
    return found


def genomes_of(split: ms.Collection) -> set[str]:
    return set(split.column("genome").to_pylist())


def test_no_group_is_in_both_training_and_validation(reads: Path, capsys: pytest.CaptureFixture[str]):
    splits = study(reads, by="genome").splits
    train, val = genomes_of(splits.train), genomes_of(splits.scored["val"])
    assert train | val == {f"g{number}" for number in range(40)} and not train & val
    assert 1 <= len(val) <= 12
    assert len(splits.train) + len(splits.scored["val"]) == 800
    assert "a tenth of the values of genome" in capsys.readouterr().err


def test_reads_without_a_known_class_are_in_neither(reads: Path):
    (reads.parent / "map.tsv").write_text("class_id\tspecies\n0\tx\n")
    with pytest.raises(BadSource, match="1 class_id values are not in"):
        study(reads, by="genome")
    splits = study(reads, by="genome", regex=r"(?:(?P<class_id>0)|1)\|(?P<genome>\w+)").splits
    assert len(splits.train) + len(splits.scored["val"]) == 400


def test_whole_files_or_contigs_are_held_out(reads: Path):
    rng = np.random.default_rng(1)
    files = [reads.with_name(f"{number}.fa") for number in range(6)]
    for number, file in enumerate(files):
        file.write_text("".join(f">{number % 2}|g|{number} x\n{bases(rng)}\n" for _ in range(3)))
    paths = ",".join(map(str, files))
    splits = study(reads, by="file", data={"train": paths}).splits
    train, val = (set(split.column("file").to_pylist()) for split in (splits.train, splits.scored["val"]))
    assert train | val == {file.name for file in files} and train and val and not train & val
    splits = study(reads, by="name", data={"train": paths}).splits
    train, val = (set(split.column("name").to_pylist()) for split in (splits.train, splits.scored["val"]))
    assert train and val and not train & val


def test_a_large_column_is_split_in_pieces_as_at_once(reads: Path, monkeypatch: pytest.MonkeyPatch):
    opened = ms.open(reads, header_regex=REGEX)
    whole = ms.split(opened, folds=3, by="name")
    backwards = opened.subset(np.arange(800)[::-1])
    whole_backwards = ms.split(backwards, folds=3, by="name")
    monkeypatch.setattr("millstream.reads.reads.PIECE", 256)
    monkeypatch.setattr("millstream.core.collection.PIECE", 256)
    assert [s.fingerprint for s in ms.split(opened, folds=3, by="name")] == [s.fingerprint for s in whole]
    assert [s.fingerprint for s in ms.split(backwards, folds=3, by="name")] == [s.fingerprint for s in whole_backwards]


def test_the_file_of_a_read_is_a_field(reads: Path):
    again = reads.with_name("again.fa")
    again.write_text(">0|g|1\nACGT\n")
    opened = ms.open([again, reads], header_regex=REGEX)
    fetched = opened.fetch([5, 0, 1], ["file"])
    assert list(fetched.columns["file"]) == ["reads.fa", "again.fa", "reads.fa"]  # pyright: ignore
    assert "file" not in opened.column_names  # pyright: ignore


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"by": "strain"}, "by=strain: .* must be one of file, class_id, genome, number"),
        ({"by": "genome", "data": {"val": "reads.fa"}}, "by=genome: .*data.val is set"),
    ],
)
def test_a_group_that_cannot_be_held_out_is_a_wrong_setting(reads: Path, settings: dict[str, object], says: str):
    with pytest.raises(BadSetting, match=says):
        study(reads, **settings)


def test_one_group_cannot_be_held_out(reads: Path):
    reads.write_text("".join(f">0|g|{number}\nACGT\n" for number in range(9)))
    with pytest.raises(BadSource, match="too few values of genome"):
        study(reads, by="genome")


def test_shared_sequences_are_counted_on_both_strands_and_in_any_case(tmp_path: Path):
    rng = np.random.default_rng(2)
    train = [bases(rng) for _ in range(500)]
    back = str.maketrans("ACGT", "TGCA")
    val = [
        train[7],
        train[8].lower(),
        train[9].translate(back)[::-1],
        train[9][1:],
        "ACGT",
        *(bases(rng) for _ in range(95)),
    ]
    opened: list[ms.Collection] = []
    for name, some in (("train.fa", [*train, "ACGT"]), ("val.fa", val)):
        (tmp_path / name).write_text("".join(f">r\n{one}\n" for one in some))
        opened.append(ms.open(tmp_path / name))
    shared = shared_sequences(opened[1], opened[0])
    assert shared == (3, 99, 1.0)  # four bases are no evidence
    assert shared.estimate == 3 / 99


def test_a_sample_of_large_training_data_is_enough_to_find_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leaks, "SCANNED", 1024)
    monkeypatch.setattr(leaks, "RUN", 64)
    rng = np.random.default_rng(3)
    (tmp_path / "a.fa").write_text("".join(f">r\n{bases(rng)}\n" for _ in range(4096)))
    reads = ms.open(tmp_path / "a.fa")
    shared = shared_sequences(reads, reads)
    assert (shared.sampled, shared.share) == (2000, 0.25)
    assert shared.estimate == pytest.approx(1, abs=0.1)


def test_training_warns_when_validation_reads_are_training_reads(reads: Path):
    val = reads.with_name("val.fa")
    rng = np.random.default_rng(4)
    own = "".join(f">0|new|{number}\n{bases(rng)}\n" for number in range(50))
    val.write_text(own + "".join(reads.read_text().splitlines(keepends=True)[:20]))
    text = study(reads, data={"val": str(val)}).summary()
    assert "val leaks: 10 of 60 sampled reads have the exact sequence of a training read" in text
    val = reads.with_name("other.fa")
    val.write_text(own)
    assert "leaks" not in study(reads, data={"val": str(val)}).summary()
