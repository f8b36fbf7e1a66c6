"""Base qualities: uncertain bases are masked for every classifier, and tokens come with their qualities."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.errors import BadSetting, BadSource
from millstream.reads.batch import ReadBatch
from millstream.reads.classifiers import CLASSIFIERS
from millstream.reads.classify import classify
from millstream.reads.features import tokens
from millstream.reads.qualities import Masked
from millstream.reads.simulate import SimulateSettings, simulate
from support.commands import run_here
from support.small_classifiers import make_kit, random_reads

MODELS = [name for name in CLASSIFIERS if name != "hf"]


def reads_with(sequences: list[str], qualities: list[str] | None) -> ReadBatch:
    flat, quality = (
        None if texts is None else np.frombuffer("".join(texts).encode(), np.uint8) for texts in (sequences, qualities)
    )
    assert flat is not None
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return ReadBatch(np.arange(len(sequences)), flat, offsets, {}, quality)


def text_of(phred: list[int]) -> str:
    return "".join(chr(33 + value) for value in phred)


@pytest.mark.parametrize("name", MODELS)
def test_a_base_of_low_quality_is_an_n_for_every_classifier(name: str):
    (read,) = random_reads([120])
    phred = np.random.default_rng(0).integers(2, 60, 120)
    masked = "".join(base if value >= 10 else "N" for base, value in zip(read, phred, strict=True))
    assert 5 < masked.count("N") < 40
    plain, careful = make_kit(name), make_kit(name, min_quality=10)
    for without, with_ in ((plain.features, careful.features), (plain.scoring, careful.scoring)):
        for one, other in zip(without or (), with_ or (), strict=True):
            expected = one(reads_with([masked], None))
            found = other(reads_with([read], [text_of(phred.tolist())]))
            assert found.keys() == expected.keys() and "quality" in (other.fields or ())
            assert all(np.array_equal(np.asarray(found[key]), np.asarray(expected[key])) for key in found)


def test_qualities_follow_their_bases_through_cropping_and_the_other_strand():
    rng = np.random.default_rng(1)
    sequences = random_reads([60, 20, 45])
    lines = [text_of(rng.integers(2, 42, len(read)).tolist()) for read in sequences]
    feature = tokens("base", qualities=True, crop_length=30, reverse_complement=0.5)
    assert feature.fields == ["sequence", "quality"]
    strands = set()
    for epoch in range(6):
        made = feature(reads_with(sequences, lines), seed=3, epoch=epoch)
        ids, phred = (np.asarray(made[name]) for name in ("input_ids", "qualities"))
        assert phred.shape == ids.shape == (3, 30) and (phred[ids == 0] == 0).all()
        for row, values in zip(ids, phred, strict=True):
            text = "".join("?ACGT"[base] for base in row if base)
            line = text_of(values[: len(text)].tolist())
            whole = next(n for n, known in enumerate(lines) if line in known or line[::-1] in known)
            at = lines[whole].find(line)
            strands.add(at >= 0)
            if at >= 0:
                assert sequences[whole][at : at + len(text)] == text
            else:
                at = lines[whole].find(line[::-1])
                assert sequences[whole][at : at + len(text)].translate(str.maketrans("ACGT", "TGCA"))[::-1] == text
    assert strands == {True, False}


def test_a_token_has_the_lowest_quality_of_its_bases():
    feature = tokens("kmer(3, stride=2)", qualities=True)
    made = feature(reads_with(["ACGTACGT", "AC"], [text_of([9, 30, 8, 40, 41, 2, 20, 20]), "II"]))
    assert np.asarray(made["qualities"]).tolist() == [[8, 8, 2], [0, 0, 0]]
    with pytest.raises(ValueError, match="qualities=True"):
        tokens("base", qualities=True, n="drop")


def test_a_cnn_tells_reads_apart_by_quality_alone():
    kit = make_kit("cnn", qualities=True)
    (read,) = random_reads([80])
    pairs = {}
    for name, value in (("low", 3), ("high", 38)):
        made: dict[str, Any] = {"numbers": np.arange(1)}
        for feature in kit.scoring or ():
            made |= feature(reads_with([read], [text_of([value] * 80)]))
        pairs[name] = {key: torch.as_tensor(values) for key, values in made.items()}
    torch.manual_seed(0)
    net = kit.build(pairs["low"]).eval()
    low, high = (net.logits(batch)[0] for batch in pairs.values())
    assert (low - high).abs().max() > 1e-3
    longer = make_kit("cnn", qualities=True, max_length=30)
    (feature,) = longer.scoring or ()
    made = feature(reads_with([read], [text_of(list(range(2, 82)))]))
    assert np.asarray(made["qualities"])[:, 0].tolist() == [2, 18, 35, 52]
    assert np.asarray(made["qualities"])[-1, -1] == 81 and np.asarray(made["other_qualities"])[-1, 0] == 81


def test_reads_without_qualities_are_an_error():
    with pytest.raises(BadSource, match="no base qualities"):
        Masked(tokens("base"), 5)(reads_with(["ACGT"], None))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qualities")
    genomes: list[Path] = []
    for number, seed in ((562, 1), (573, 2)):
        genomes.append(path / f"{number}_x.fna")
        genomes[-1].write_text(f">s\n{random_reads([4000], seed)[0]}\n")
    for name, seed in (("train.fq", 1), ("val.fq", 2), ("plain.fa", 3)):
        settings = SimulateSettings(reads=400, profile="illumina", length=80, error=0.02, seed=seed)
        simulate(genomes, [path / name], settings=settings, mapping=path / "species.tsv")
    return path


def test_a_run_keeps_its_minimum_quality_for_classification(made: Path, tmp_path: Path):
    given = {
        "data": {"train": str(made / "train.fq"), "val": str(made / "val.fq")}, "mapping": str(made / "species.tsv"),
        "model": "kmer-linear,cnn", "epochs": 1, "k": "8", "bits": 12, "width": 8, "layers": 1, "memory": "200MB",
    }  # fmt: skip
    ms.train(**given, min_quality=15, qualities=True, out=str(tmp_path / "run"))
    done = classify(tmp_path / "run", made / "val.fq", tmp_path / "a.tsv", threshold=0)
    assert done.num_rows == 400
    lines = (made / "val.fq").read_text().splitlines()
    low = "".join(
        f"{lines[at]}\n{lines[at + 1]}\n+\n{'#' * len(lines[at + 3])}\n" for at in range(0, 40, 4)
    )  # of quality 2
    (tmp_path / "low.fq").write_text(low)
    for model in ("kmer-linear", "cnn"):
        out = tmp_path / f"{model}.tsv"
        assert classify(tmp_path / "run", tmp_path / "low.fq", out, model=model, threshold=0).num_classified == 0
    with pytest.raises(BadSetting, match=r"min_quality=15: .*plain\.fa"):
        classify(tmp_path / "run", made / "plain.fa", tmp_path / "b.tsv")
    with pytest.raises(BadSetting, match=r"qualities=true: .*plain\.fa"):
        ms.train(**{**given, "data": {"train": str(made / "plain.fa")}}, qualities=True, out=str(tmp_path / "none"))
    files = [f"data.train={made / 'plain.fa'}", f"mapping={made / 'species.tsv'}", "model=cnn", "min_quality=10"]
    code, _, err = run_here("train", *files, f"out={tmp_path / 'other'}")
    assert code != 0 and "plain.fa has no base qualities" in err and "Traceback" not in err
