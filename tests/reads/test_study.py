"""`millstream train` on reads: what is learned, counted and refused, and what is in the run folder."""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from sklearn.metrics import f1_score

import millstream as ms
from millstream.errors import BadSetting, BadSource, ConfigMismatch
from millstream.reads.classifiers import ClassifierSpec
from millstream.reads.classifiers.nets import probabilities
from millstream.reads.classify import find_classifier
from millstream.reads.kind import HEADERS, ReadSettings
from millstream.reads.mapping import load_classes, load_mapping
from millstream.reads.simulate import SimulateSettings, simulate
from millstream.reads.study import Classification
from millstream.training.run import study_of
from millstream.training.study import NetModel, Workplace
from millstream.training.task import FitResources
from support.commands import run_here
from support.training import lines_of, weights_of

pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")

TAXA = {  # class id: tax id, species, genus and its tax id, family; the last has no reads
    3: (562, "Escherichia coli", "Escherichia", 561, "Enterobacteriaceae"),
    5: (573, "Klebsiella pneumoniae", "Klebsiella", 570, "Enterobacteriaceae"),
    9: (564, "Escherichia fergusonii", "Escherichia", 561, "Enterobacteriaceae"),
    11: (9606, "Homo sapiens", "", 0, "Hominidae"),
}
LABELS = {class_id: label for label, class_id in enumerate(TAXA)}
GC = (0.15, 0.5, 0.85)  # of the genomes: easy to tell apart
SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 64, "bits": 12, "width": 8, "layers": 1, "lr": 0.02}
CONFIG = Path(__file__).parents[2] / "configs" / "reads.yaml"
UNKNOWN = "ACGTTGCAAGGCTTAACGGATCCATTGACCAGTGGATTACAGGCATCCAAGT"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads of three genomes; some of `val` and `strange` have no known class."""
    path = tmp_path_factory.mktemp("reads")
    mapping = path / "species.tsv"
    lines = ["\t".join(map(str, (class_id, *row))) for class_id, row in TAXA.items()]
    mapping.write_text("\n".join(["class_id\ttax_id\tspecies\tgenus\tgenus_tax_id\tfamily", *lines]) + "\n")
    genomes = [write_genome(path / f"{row[0]}_x.fna", gc=gc) for row, gc in zip(TAXA.values(), GC, strict=False)]
    for seed, (name, count) in enumerate({"train.fa": 600, "val.fa": 90, "known.fa": 60, "strange.fq": 40}.items()):
        settings = SimulateSettings(reads=count, length=100, seed=seed)
        simulate(genomes, [path / name], settings=settings, mapping=mapping)
    pairs = SimulateSettings(reads=80, length=60, insert=150, error=0.1, seed=9)
    simulate(genomes, [path / "pairs.fa"], settings=pairs, mapping=mapping)
    with (path / "val.fa").open("a") as file:
        file.write(f">lbl|77|1|50|a/1\n{UNKNOWN}\n")
    with (path / "strange.fq").open("a") as file:
        file.write(
            "".join(
                f"@{name}\n{UNKNOWN}\n+\n{'I' * len(UNKNOWN)}\n" for name in ("lbl|4|1|50|a/1", "lbl|99||50|b", "c")
            )
        )
    (path / "train.fa.gz").write_bytes(gzip.compress((path / "train.fa").read_bytes()))
    return path


def write_genome(path: Path, *, gc: float, length: int = 6000) -> Path:
    frequencies = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
    bases = np.random.default_rng(int(100 * gc)).choice(np.frombuffer(b"ACGT", np.uint8), length, p=frequencies)
    path.write_text(f">{path.stem}\n{bases.tobytes().decode()}\n")
    return path


def settings_for(made: Path, **settings: object) -> dict[str, Any]:
    """Settings of a short run of kmer-linear on `train.fa` and `val.fa`."""
    files = {"train": str(made / "train.fa"), "val": str(made / "val.fa")}
    common = {"data": files, "mapping": str(made / "species.tsv"), "model": "kmer-linear", "memory": "200MB"}
    return {**common, **SMALL, **settings}


def data(made: Path, **files: str) -> dict[str, str]:
    return {name: ",".join(str(made / one) for one in text.split(",")) for name, text in files.items()}


def study(made: Path, **settings: object) -> Classification:
    """The data and models of a run, without training."""
    found = study_of(settings_for(made, **settings))
    assert isinstance(found, Classification)
    return found


@pytest.fixture(scope="module")
def command(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The run folder, stdout and stderr of `millstream train`."""
    out = tmp_path_factory.mktemp("runs") / "run"
    given = settings_for(made, data=data(made, train="train.fa", val="val.fa", test="known.fa,strange.fq"), out=out)
    given["model"] = "kmer-linear,cnn"
    nested = [f"data.{name}={value}" for name, value in given.pop("data").items()]
    code, text, err = run_here("train", CONFIG, *nested, *(f"{name}={value}" for name, value in given.items()))
    assert code == 0, err
    return out, text, err


@pytest.fixture(scope="module")
def run(command: tuple[Path, str, str]) -> Path:
    return command[0]


def same_run(made: Path, run: Path, **settings: object) -> dict[str, Any]:
    """Settings that resume `run`."""
    files = data(made, train="train.fa", val="val.fa", test="known.fa,strange.fq")
    return settings_for(made, data=files, out=str(run), model="kmer-linear,cnn", memory="1GB") | settings


def rows_of(run: Path, split: str, model: str = "kmer-linear") -> list[dict[str, Any]]:
    rows = pq.read_table(run / "predictions.parquet").to_pylist()
    return [row for row in rows if (row["part"], row["model"]) == (split, model)]


def column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows])


def f1_of(rows: list[dict[str, Any]], *, forced: bool = False) -> float:
    """Macro F1 of the classes that occur, by another library; an unclassified read has none, unless `forced`."""
    labels = column(rows, "label")
    found = np.where(forced | (column(rows, "probability") > 0), column(rows, "class"), -1)
    present = sorted(set(labels[labels >= 0].tolist()))
    return float(f1_score(labels[labels >= 0], found[labels >= 0], labels=present, average="macro"))


def labels_in(path: Path) -> list[int]:
    """The labels in the headers of a file: -1 for a class that is not in the mapping, and for none."""
    step, mark = (4, "@") if path.suffix == ".fq" else (2, ">")
    headers = path.read_text().splitlines()[::step]
    assert all(header.startswith(mark) for header in headers)
    return [LABELS.get(int(header.split("|")[1]), -1) if "|" in header else -1 for header in headers]


def card_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "data.json").read_text())


# -- a run


def test_a_run_folder_is_complete(command: tuple[Path, str, str], made: Path):
    run, text, err = command
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["epochs"] == 2 and config["balance"] == "weights" and config["data"]["header_regex"] == HEADERS
    assert config["data"]["train"] == str(made / "train.fa") and config["mapping"] == str(made / "species.tsv")
    epochs, fits = lines_of(run, "epoch"), lines_of(run, "fit")
    assert [(line["model"], line["epoch"]) for line in epochs] == [
        (model, epoch) for model in ("kmer-linear", "cnn") for epoch in (0, 1)
    ]
    assert [line["model"] for line in fits] == ["kmer-linear", "cnn"]
    assert all(line["num_scored"] == 90 + 1 + 60 + 43 for line in fits) and lines_of(run, "memory")
    for job in ("kmer-linear-0", "cnn-0"):
        assert (run / "checkpoints" / job / "detector.safetensors").stat().st_size > 0
    page = (run / "report.html").read_text()
    assert "kmer-linear" in page and "Escherichia fergusonii" in page and list((run / "figures").glob("*.svg"))
    assert text.splitlines()[0].startswith("split, model") and "strange 43 (3 of no known class)" in text
    assert err.splitlines()[-2:] == [
        f"{run}: 2 classifiers compared. Open {run / 'report.html'}",
        f"Next: millstream view {run}",
    ]


@pytest.mark.parametrize("model", ["kmer-linear", "cnn"])
def test_genomes_that_differ_are_classified_correctly(run: Path, model: str):
    for split in ("val", "known", "strange"):
        assert f1_of(rows_of(run, split, model), forced=True) > 0.95


@pytest.mark.parametrize("model", ["kmer-linear", "cnn"])
def test_the_best_epoch_is_chosen_by_macro_f1_over_reads_of_known_classes(run: Path, model: str):
    scores = [line["val_macro_f1"] for line in lines_of(run, "epoch") if line["model"] == model]
    assert f1_of(rows_of(run, "val", model)) == pytest.approx(max(scores), abs=1e-9)
    (chosen,) = [line["chosen"]["epoch"] for line in lines_of(run, "fit") if line["model"] == model]
    assert chosen == scores.index(max(scores))


def test_every_read_of_every_split_is_counted_and_has_a_row(run: Path, made: Path):
    card = card_of(run)
    files = {Path(file).stem: made / file for file in ("train.fa", "val.fa", "known.fa", "strange.fq")}
    assert card["files"] == {name: [str(path)] for name, path in files.items()}
    for name, path in files.items():
        labels = labels_in(path)
        assert card["reads"][name] == len(labels)
        assert card["no_class"][name] == labels.count(-1)
        assert [row["reads"][name] for row in card["classes"]] == [labels.count(label) for label in range(4)]
        for model in ("kmer-linear", "cnn") if name != "train" else ():
            rows = rows_of(run, name, model)
            assert column(rows, "record").tolist() == list(range(len(labels)))
            assert column(rows, "label").tolist() == labels
    assert card["no_class"] == {"train": 0, "val": 1, "known": 0, "strange": 3}
    assert card["formats"]["strange"] == ["fastq"] and card["bases"]["train"] == 60_000
    assert [(row["class_id"], row["name"], row["tax_id"]) for row in card["classes"]] == [
        (class_id, row[1], row[0]) for class_id, row in TAXA.items()
    ]


def test_missing_and_unknown_classes_are_reported_before_training(command: tuple[Path, str, str], made: Path):
    lines = command[2].splitlines()
    assert lines[lines.index("no training reads of 1 classes: Homo sapiens") - 1] == (
        f"{made / 'train.fa'}: 600 training reads of 4 classes"
    )
    assert "val: 91 reads (1 of no known class)" in lines and "known: 60 reads" in lines
    assert "strange: 43 reads (3 of no known class)" in lines
    assert "lbl" not in " ".join(line for line in lines if "do not fit" not in line)


def test_a_rank_predicts_the_taxon_with_the_largest_summed_probability(run: Path):
    card = card_of(run)
    assert [taxon["name"] for taxon in card["ranks"]["genus"]] == ["Escherichia", "Klebsiella"]
    assert [taxon["tax_id"] for taxon in card["ranks"]["genus"]] == [561, 570]
    assert [row["genus"] for row in card["classes"]] == [0, 1, 0, -1]
    rows = rows_of(run, "known", "cnn") + rows_of(run, "strange", "cnn")
    found, probability = column(rows, "class"), column(rows, "probability")
    genus, genus_probability = column(rows, "genus"), column(rows, "genus_probability")
    assert (column(rows, "species") == found).all() and (column(rows, "species_probability") == probability).all()
    alone = genus == 1  # the one species of Klebsiella
    assert alone.any() and (found[alone] == 1).all() and np.allclose(genus_probability[alone], probability[alone])
    both = np.isin(found, (0, 2))
    assert (genus[both] == 0).all() and (genus_probability[both] >= probability[both]).all()
    assert (genus_probability[both] > probability[both] + 1e-6).any()
    family = [taxon["name"] for taxon in card["ranks"]["family"]]
    assert family == ["Enterobacteriaceae", "Hominidae"] and (column(rows, "family") == 0).all()
    assert (column(rows, "family_probability") >= genus_probability - 1e-6).all()
    assert (column(rows, "family_probability") > genus_probability + 1e-6).any()


def test_a_gzipped_file_gives_the_same_weights_and_predictions(run: Path, made: Path, tmp_path: Path):
    files = data(made, train="train.fa.gz", val="val.fa", test="known.fa,strange.fq")
    ms.train(**same_run(made, tmp_path / "run", data=files))
    for job in ("kmer-linear-0", "cnn-0"):
        assert weights_of(tmp_path / "run", job) == weights_of(run, job)
    predictions = [pq.read_table(one / "predictions.parquet") for one in (run, tmp_path / "run")]
    assert predictions[0].equals(predictions[1])


def test_the_same_command_trains_nothing_again_and_models_can_be_added(run: Path, made: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    before = lines_of(run, "epoch"), lines_of(run, "fit")
    files = {file: file.stat().st_mtime_ns for file in run.glob("checkpoints/*/*")}
    done = ms.train(**same_run(made, run))
    assert done.models == ["kmer-linear", "cnn"] and not done.interrupted
    assert {file: file.stat().st_mtime_ns for file in run.glob("checkpoints/*/*")} == files
    assert (lines_of(run, "epoch"), lines_of(run, "fit")) == before
    more = tmp_path / "run"
    done = ms.train(**same_run(made, more, model="lstm,transformer"))
    assert done.models == ["lstm", "transformer"]
    for model in ("kmer-linear", "cnn", "lstm", "transformer"):
        rows = rows_of(more, "known", model)
        assert column(rows, "record").tolist() == list(range(60))
        probability = column(rows, "probability")
        assert ((probability >= 0.25) | (probability == 0)).all() and (probability <= 1).all()
        assert model == "kmer-linear" or probability.all()
    assert len({line["cross_entropy"] for line in lines_of(more, "epoch")}) == 8  # finite: NaN would have ended the run
    assert rows_of(more, "known", "cnn") == rows_of(run, "known", "cnn")


def test_a_different_run_into_the_same_folder_is_refused(run: Path, made: Path, tmp_path: Path):
    with pytest.raises(ConfigMismatch, match=r"width: 8 -> 16"):
        ms.train(**same_run(made, run, width=16))
    for changed in (
        data(made, train="val.fa", val="val.fa", test="known.fa,strange.fq"),
        data(made, train="train.fa", val="val.fa"),
        data(made, train="train.fa", val="val.fa", test="known.fa,strange.fq")
        | {"header_regex": r"^lbl\|(?P<class_id>\d+)"},
    ):
        with pytest.raises((ConfigMismatch, BadSource), match=r"fingerprint: '\w+' -> '\w+'|77"):
            ms.train(**same_run(made, run, data=changed))
    with pytest.raises(ConfigMismatch, match="paired: False -> True, fingerprint"):
        ms.train(**same_run(made, run, paired=True, data=data(made, train="train.fa", val="pairs.fa")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(BadSource, match="full"):
        ms.train(**settings_for(made, out=str(tmp_path / "full")))


def test_a_changed_mapping_is_a_different_run(made: Path, tmp_path: Path):
    mapping = tmp_path / "ids.tsv"
    prints: list[object] = []
    for ids in ((3, 5, 9), (3, 5, 9, 10), (3, 5, 9, 11)):
        mapping.write_text("\n".join(["class_id", *map(str, ids)]) + "\n")
        prints.append(study(made, mapping=str(mapping)).card["fingerprint"])
    assert len(set(prints)) == 3


# -- the splits


def test_without_validation_files_pairs_of_neighbours_are_held_out(made: Path, tmp_path: Path, capsys):
    ms.train(**settings_for(made, data=data(made, train="train.fa"), out=str(tmp_path / "run")))
    assert "data.val is not set" in capsys.readouterr().err
    rows, labels = rows_of(tmp_path / "run", "val"), labels_in(made / "train.fa")
    held_out = column(rows, "record").tolist()
    assert 6 <= len(held_out) <= 30 and held_out == sorted(set(held_out))
    assert held_out[::2] == [number - 1 for number in held_out[1::2]] and not any(n % 2 for n in held_out[::2])
    assert column(rows, "label").tolist() == [labels[number] for number in held_out]
    card = card_of(tmp_path / "run")
    num_train = 600 - len(held_out)
    assert card["reads"] == {"train": num_train, "val": len(held_out)} and card["held_out"] == "reads"
    assert [sum(row["reads"].values()) for row in card["classes"]] == [labels.count(label) for label in range(4)]
    found = study(made, data=data(made, train="train.fa"))
    assert {*found.train.record_numbers(np.arange(num_train)).tolist(), *held_out} == set(range(600))
    assert study(made).card["held_out"] == "files"
    (tmp_path / "two.fa").write_text("".join((made / "train.fa").read_text().splitlines(True)[:4]))
    with pytest.raises(BadSource, match=r"two\.fa: .*data\.val=FILE"):
        study(made, data={"train": str(tmp_path / "two.fa")})


def test_the_validation_sample_is_random_and_limited_by_val_reads(made: Path):
    found = study(made, val_reads=10)
    numbers = found.scored["val"].record_numbers(np.arange(10))
    assert len(found.scored["val"]) == found.card["chosen_by"] == 10
    assert len(set(numbers.tolist())) == 10 and (np.diff(numbers) > 0).all() and numbers[-1] - numbers[0] > 30
    assert (study(made, val_reads=10).scored["val"].record_numbers(np.arange(10)) == numbers).all()
    assert len(study(made, val_reads=91).scored["val"]) == 91


def test_each_test_file_is_a_split_and_names_must_differ(made: Path, tmp_path: Path):
    for folder, name in (("a", "known.fa"), ("b", "known.fa"), ("c", "val.fa"), ("d", "train.fa")):
        (tmp_path / folder).mkdir()
        shutil.copy(made / "known.fa", tmp_path / folder / name)
    files = data(made, train="train.fa", val="val.fa")
    found = study(made, data={**files, "test": f"{tmp_path / 'a' / 'known.fa'}, {made / 'strange.fq'},"})
    assert list(found.scored) == ["val", "known", "strange"] and len(found.scored["known"]) == 60
    for test, name in (("a/known.fa,b/known.fa", "known"), ("c/val.fa", "val"), ("d/train.fa", "train")):
        with pytest.raises(BadSetting, match=f"data.test=.* {name};"):
            study(made, data={**files, **data(tmp_path, test=test)})
    with pytest.raises(BadSetting, match=" val;"):  # made if no file is given
        study(made, data={"train": files["train"], **data(tmp_path, test="c/val.fa")})


def test_training_files_may_be_several_or_a_folder(made: Path, tmp_path: Path):
    lines = (made / "train.fa").read_text().splitlines(True)
    for number in range(3):
        (tmp_path / f"part{number}.fa").write_text("".join(lines[number * 400 : (number + 1) * 400]))
    whole = study(made).card
    for train in (str(tmp_path), f"{tmp_path}/part*.fa", ",".join(str(tmp_path / f"part{n}.fa") for n in range(3))):
        card = study(made, data={"train": train, "val": str(made / "val.fa")}).card
        assert (card["reads"], card["classes"]) == (whole["reads"], whole["classes"])


def test_indexes_are_written_to_index_dir(made: Path, tmp_path: Path):
    (tmp_path / "reads").mkdir()
    shutil.copy(made / "train.fa", tmp_path / "reads")
    files = {"train": str(tmp_path / "reads" / "train.fa"), "index_dir": str(tmp_path / "indexes")}
    assert sum(study(made, data=files).card["reads"].values()) == 600
    assert [path.name for path in (tmp_path / "reads").iterdir()] == ["train.fa"]
    assert list((tmp_path / "indexes").iterdir())


def test_a_training_read_of_an_unknown_class_is_an_error(made: Path, tmp_path: Path):
    with pytest.raises(BadSource, match=r"val\.fa: 1 class_id .*species\.tsv .*: 77\."):
        study(made, data=data(made, train="val.fa", val="known.fa"))
    with pytest.raises(BadSource, match=r"strange\.fq: 1 .* 43 .*header_regex"):
        study(made, data=data(made, train="strange.fq", val="known.fa"))
    code, _, err = run_here("train", f"data.train={made / 'val.fa'}", f"mapping={made / 'species.tsv'}")
    assert code == 1 and err.splitlines()[-1].startswith("millstream: ") and "Traceback" not in err


def test_headers_may_have_another_format(made: Path, tmp_path: Path):
    ids = {label: class_id for class_id, label in LABELS.items()}
    for name in ("train.fa", "val.fa"):
        bases = (made / name).read_text().splitlines()[1::2]
        labels = labels_in(made / name)
        rows = zip(range(len(labels)), labels, bases, strict=True)
        (tmp_path / name).write_text("".join(f">r{n} class={ids.get(own, 77)}\n{text}\n" for n, own, text in rows))
    files = {**data(tmp_path, train="train.fa", val="val.fa"), "header_regex": r"^\S+ class=(?P<class_id>\d+)$"}
    own, usual = study(made, data=files).card, study(made).card
    assert (own["reads"], own["no_class"], own["classes"]) == (usual["reads"], usual["no_class"], usual["classes"])
    with pytest.raises(BadSource, match="header_regex"):
        study(made, data={**files, "header_regex": HEADERS})
    with pytest.raises(BadSource, match="'class_id'"):
        study(made, data={**files, "header_regex": r"^\S+ class=(?P<kind>\d+)$"})


def test_a_pair_gets_one_prediction_of_both_mates(made: Path, tmp_path: Path):
    for name, paired in (("single", False), ("paired", True)):
        files = data(made, train="pairs.fa", val="pairs.fa", test="pairs.fa").copy()
        shutil.copy(made / "pairs.fa", tmp_path / "mates.fa")
        files["test"] = str(tmp_path / "mates.fa")
        ms.train(**settings_for(made, data=files, out=str(tmp_path / name), paired=paired, epochs=1, k="4", lr=0.001))
    single, pairs = rows_of(tmp_path / "single", "mates"), rows_of(tmp_path / "paired", "mates")
    labels = labels_in(made / "pairs.fa")
    assert column(pairs, "record").tolist() == list(range(0, 80, 2))
    assert column(pairs, "label").tolist() == labels[::2] == labels[1::2]
    found, probability = column(single, "class").reshape(-1, 2), column(single, "probability").reshape(-1, 2)
    agree = found[:, 0] == found[:, 1]
    assert agree.sum() > 10
    assert (column(pairs, "class")[agree] == found[agree, 0]).all()
    both, alone = column(pairs, "probability")[agree], probability[agree]  # 0: no evidence
    assert (both >= alone.max(axis=1) - 1e-3).all() and (both > alone.mean(axis=1) + 1e-2).any()
    card = card_of(tmp_path / "paired")
    assert card["mates"] == 2 and card["reads"]["mates"] == 80


def test_an_odd_number_of_mates_is_refused_whatever_the_validation_sample(made: Path):
    for settings in ({}, {"val_reads": 10}):
        with pytest.raises(BadSource, match=r"val\.fa: 91 reads"):
            study(made, paired=True, **settings)
    files = data(made, train="train.fa", val="pairs.fa")
    with pytest.raises(BadSource, match=r"strange\.fq: 43 reads"):
        study(made, paired=True, data={**files, **data(made, test="strange.fq")})
    for most, expected in ((1, 2), (5, 4), (80, 80)):
        val = study(made, paired=True, data=files, val_reads=most).scored["val"]
        numbers = val.record_numbers(np.arange(len(val)))
        assert len(val) == expected and (numbers[1::2] - numbers[::2] == 1).all() and not (numbers[::2] % 2).any()


def test_neighbours_must_be_mates_and_mates_may_be_in_two_files(made: Path, tmp_path: Path):
    with pytest.raises(BadSource, match=r"known\.fa: pair 1 is lbl"):
        study(made, paired=True, data=data(made, train="train.fa", val="known.fa"))
    lines = (made / "pairs.fa").read_text().splitlines(True)
    for mate in (0, 1):
        rows = [line for start in range(2 * mate, len(lines), 4) for line in lines[start : start + 2]]
        (tmp_path / f"val_{mate + 1}.fa").write_text("".join(rows))
    files = {**data(made, train="train.fa"), "val": f"{tmp_path / 'val_1.fa'},{tmp_path / 'val_2.fa'}"}
    val = study(made, paired=True, data=files).scored["val"]
    assert val.record_numbers(np.arange(6)).tolist() == [0, 40, 1, 41, 2, 42]
    two = f"{tmp_path / 'val_1.fa'},{tmp_path / 'val_2.fa'}"
    lanes = f"{two},{made / 'pairs.fa'},{two}"
    val = study(made, paired=True, data={**files, "val": lanes}).scored["val"]
    numbers = val.record_numbers(np.arange(240))
    assert sorted(numbers.tolist()) == list(range(240))
    assert numbers[:4].tolist() == [0, 40, 1, 41] and numbers[78:84].tolist() == [39, 79, 80, 81, 82, 83]
    assert numbers[160:164].tolist() == [160, 200, 161, 201]
    with pytest.raises(BadSource, match="not mates"):
        study(made, paired=True, data={**files, "val": f"{tmp_path / 'val_1.fa'},{made / 'pairs.fa'}"})
    short = tmp_path / "short_2.fa"
    short.write_text("".join((tmp_path / "val_2.fa").read_text().splitlines(True)[:-2]))
    with pytest.raises(BadSource, match=r"has 40 reads, but .*short_2\.fa has 39"):
        study(made, paired=True, data={**files, "val": f"{tmp_path / 'val_1.fa'},{short}"})
    twice = f"{made / 'pairs.fa'},{made / 'pairs.fa'}"  # each with its mates as neighbours
    assert study(made, paired=True, data={**files, "val": twice}).scored["val"].record_numbers(
        np.arange(3)
    ).tolist() == [0, 1, 2]


def test_mates_in_two_files_are_held_out_together(made: Path, tmp_path: Path):
    genomes = sorted(made.glob("*_x.fna"))
    files = [tmp_path / "one.fq", tmp_path / "two.fq"]
    settings = SimulateSettings(reads=1200, length=60, insert=150, profile="illumina")
    simulate(genomes, files, settings=settings, mapping=made / "species.tsv")
    found = study(made, paired=True, data={"train": ",".join(map(str, files))})
    held_out = found.scored["val"].record_numbers(np.arange(len(found.scored["val"])))
    trained = found.train.record_numbers(np.arange(len(found.train)))
    assert len(held_out) > 4 and (held_out[1::2] == held_out[::2] + 600).all()
    assert sorted([*held_out.tolist(), *trained.tolist()]) == list(range(1200))


# -- classes of different sizes


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of the same genome, so that only their sizes differ: 40 reads and 360."""
    path = tmp_path_factory.mktemp("uneven")
    genome = write_genome(path / "1_x.fna", gc=0.5)
    (path / "species.tsv").write_text("class_id\ttax_id\n0\t1\n1\t2\n")
    for name, seed, counts in (("train.fa", 0, (40, 360)), ("val.fa", 2, (20, 20))):
        parts: list[str] = []
        for class_id, count in enumerate(counts):
            reads = SimulateSettings(reads=count, length=60, seed=seed + class_id)
            one = path / f"{name}-{class_id}.fa"
            simulate([genome], [one], settings=reads)
            parts.append(one.read_text().replace("lbl|0|1|", f"lbl|{class_id}|{class_id + 1}|"))
        (path / name).write_text("".join(parts))
    return path


def test_balance_sets_the_weight_of_a_common_class(uneven: Path, tmp_path: Path):
    means: dict[str, float] = {}
    for balance in ("weights", "sampling", "none"):
        out = tmp_path / balance
        ms.train(**settings_for(uneven, balance=balance, out=str(out), epochs=4, k="1", bits=4, lr=0.3))
        reads = ms.open(uneven / "val.fa")
        model, net = find_classifier(out).restore(reads, memory="100MB")
        batch = next(iter(ms.Loader(reads, batch_size=40, features=model.scoring, order="none")))
        with torch.inference_mode():
            means[balance] = float(probabilities(net, batch)[0][:, 1].mean())  # single bases are no evidence
    assert means["none"] > 0.8
    assert 0.3 < means["weights"] < 0.7 and 0.3 < means["sampling"] < 0.7
    assert means["weights"] == means["sampling"]  # k-mers are counted once per read in both


def test_settings_without_effect_on_the_chosen_classifiers_are_named(made: Path):
    lines = study(made, model="kmer-linear", tokenizer="kmer(3)", max_length=50, k="8", dropout=0.3).summary()
    named = [line.partition("=")[0] for line in lines.splitlines() if "has no effect on kmer-linear" in line]
    assert named == ["width", "layers", "tokenizer", "max_length", "dropout"]  # the first two are in SMALL
    lines = study(made, model="cnn,lstm", k="8", bits=9, lora=4, tokenizer="kmer(3)", max_length=50).summary()
    named = [line.partition("=")[0] for line in lines.splitlines() if "has no effect on cnn, lstm" in line]
    assert named == ["k", "bits", "lora"]


def test_training_reads_whose_header_does_not_match_are_an_error_or_left_out(made: Path, tmp_path: Path):
    (tmp_path / "train.fa").write_text((made / "train.fa").read_text() + f">stranger\n{UNKNOWN}\n")
    files = {"train": str(tmp_path / "train.fa"), "val": str(made / "val.fa")}
    with pytest.raises(BadSource, match="stranger"):
        study(made, data=files)
    for action in ("skip", "null"):
        assert len(study(made, data={**files, "on_mismatch": action, "index_dir": str(tmp_path)}).train) == 600
    with pytest.raises(BadSetting, match=r"data\.on_mismatch=ignore"):
        study(made, data={**files, "on_mismatch": "ignore"})


@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_the_time_of_a_long_training_on_the_cpu_is_announced(made: Path, tmp_path: Path, model: str, capfd):
    reads = ms.open(made / "train.fa", header_regex=HEADERS, mapping=made / "species.tsv")
    settings = ReadSettings(**{**SMALL, "model": model, "accelerator": "cpu"})
    classes = load_classes(load_mapping(made / "species.tsv"))
    place = Workplace(settings, SimpleNamespace(device=torch.device("cpu"), global_rank=0))
    built: list[dict[str, torch.Tensor]] = []
    for num_reads, is_announced in ((0, False), (10**12, True)):
        torch.manual_seed(0)
        spec = ClassifierSpec(model, settings, classes, num_reads=num_reads)
        made_model = spec.build(resources=FitResources(), place=place, folder=tmp_path).model
        assert isinstance(made_model, NetModel)
        built.append(dict(made_model.build(reads).state_dict()))
        found = capfd.readouterr().err
        assert (f"{model}: about " in found and "1,000,000,000,000 reads" in found) == is_announced
    assert all(torch.equal(values, built[1][name]) for name, values in built[0].items())  # timing changes no weights


def test_sampling_draws_each_class_equally_often_and_otherwise_each_read_once(uneven: Path):
    for balance, counts in (("sampling", {0: 200, 1: 200}), ("weights", {0: 40, 1: 360}), ("none", {0: 40, 1: 360})):
        found = study(uneven, balance=balance)
        assert Counter(found.train.column("label").to_pylist()) == counts
        numbers = Counter(found.train.record_numbers(np.arange(400)).tolist())
        if balance == "sampling":
            assert {numbers[number] for number in range(40)} == {5}
            assert {numbers[number] for number in range(40, 400)} == {0, 1}
        else:
            assert set(numbers.values()) == {1}
        how = {"sampling": "by sampling", "weights": "by weights", "none": "not balanced"}[balance]
        assert "classes have 40 to 360 reads: " in found.summary() and how in found.summary()
    assert "classes have" not in study(uneven, data=data(uneven, train="val.fa", val="val.fa")).summary()


def test_sampling_needs_memory_for_its_sort(uneven: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millstream.training.LEAST_MEMORY", 1)
    with pytest.raises(BadSetting, match="40 bytes per read for 400 reads"):
        study(uneven, balance="sampling", model="cnn", memory=4 * 40 * 400 - 4)
    assert len(study(uneven, balance="sampling", model="cnn", memory=4 * 40 * 400).train) == 400


# -- NCBI ranks and pretrained models


def test_ranks_come_from_a_taxonomy_dump(made: Path, tmp_path: Path):
    nodes = {
        1: (1, "no rank", "root"),
        2: (1, "superkingdom", "Bacteria"),
        543: (2, "family", "Enterobacteriaceae"),
        561: (543, "genus", "Escherichia"),
        562: (561, "species", "Escherichia coli"),
        564: (561, "species", "Escherichia fergusonii"),
        570: (543, "genus", "Klebsiella"),
        573: (570, "species", "Klebsiella pneumoniae"),
        9606: (1, "species", "Homo sapiens"),
    }
    lines = [f"{own}\t|\t{parent}\t|\t{rank}\t|\t\t|\n" for own, (parent, rank, _) in nodes.items()]
    (tmp_path / "nodes.dmp").write_text("".join(lines))
    names = [f"{own}\t|\t{name}\t|\t\t|\tscientific name\t|\n" for own, (_, _, name) in nodes.items()]
    (tmp_path / "names.dmp").write_text("".join([*names, "562\t|\tB. coli\t|\t\t|\tsynonym\t|\n"]))
    mapping = tmp_path / "ids.tsv"
    mapping.write_text("\n".join(["class_id\ttax_id", *(f"{own}\t{row[0]}" for own, row in TAXA.items())]) + "\n")
    ms.train(**settings_for(made, mapping=str(mapping), taxonomy=str(tmp_path), out=str(tmp_path / "run"), epochs=1))
    card = card_of(tmp_path / "run")
    assert {rank: [(taxon["name"], taxon["tax_id"]) for taxon in taxa] for rank, taxa in card["ranks"].items()} == {
        "species": [(nodes[row[0]][2], row[0]) for row in TAXA.values()],
        "genus": [("Escherichia", 561), ("Klebsiella", 570)],
        "family": [("Enterobacteriaceae", 543)],
        "domain": [("Bacteria", 2)],
    }
    rows = rows_of(tmp_path / "run", "val")
    sure = column(rows, "probability") > 0.5
    assert sure.sum() > 60 and set(column(rows, "class")[sure]) >= {0, 1, 2}
    genera = {0: {0}, 1: {1}, 2: {0}, 3: {0, 1}}  # the last has none
    assert all(row["genus"] in genera[row["class"]] for row in rows if row["probability"] > 0.5)
    bacteria = column(rows, "class") != 3
    assert (column(rows, "domain_probability") >= column(rows, "genus_probability") - 1e-6)[bacteria].all()
    assert (column(rows, "domain") == 0).all()
    with pytest.raises(BadSource, match=r"nodes\.dmp"):
        study(made, taxonomy=str(made))


def test_a_pretrained_model_is_frozen_and_its_head_learns(made: Path, tmp_path: Path):
    folder = make_pretrained(tmp_path / "bert")
    before = (folder / "model.safetensors").read_bytes()
    ms.train(**settings_for(made, model="hf", hf=str(folder), out=str(tmp_path / "run"), lr=0.05, epochs=3))
    assert f1_of(rows_of(tmp_path / "run", "val", "hf")) > 0.9
    from millstream.training.folder import load

    weights, _ = load(tmp_path / "run" / "checkpoints" / "hf-0" / "detector.safetensors")
    assert {name.split(".")[0] for name in weights} == {"head"}
    (fit,) = lines_of(tmp_path / "run", "fit")
    assert fit["parameters"] == 8 + 8 + 8 * 4 + 4
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(BadSetting, match="hf=FOLDER"):
        study(made, model="hf")


def make_pretrained(folder: Path) -> Path:
    """A random model of one layer with single bases as tokens."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", *"ACGTN"])}
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **small)).save_pretrained(folder)
    return folder


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data.train": ""}, "data.train="),
        ({"mapping": ""}, "mapping="),
        ({"data.tran": "x.fa"}, "data.tran=x.fa"),
        ({"model": "cnn,cnm"}, "model=cnm"),
        ({"model": ","}, "model=,"),
        ({"balance": "even"}, "balance=even: "),
        ({"val_reads": 0}, "val_reads=0: "),
        ({"width": 0}, "width=0: "),
        ({"max_length": 0}, "max_length=0: "),
        ({"lora": -1}, "lora=-1: "),
        ({"epochs": 0}, "epochs=0: "),
        ({"epochs": "many"}, "epochs=many"),
        ({"paired": "perhaps"}, "paired=perhaps"),
        ({"batch_size": 63, "devices": 2}, "batch_size=63: "),
        ({"memory": "much"}, "'much'"),
        ({"k": "x"}, "k=x"),
        ({"k": "99"}, "k=99"),
        ({"bits": 40}, "bits=40: "),
        ({"model": "lstm", "tokenizer": "foo(3)"}, "tokenizer 'foo(3)'"),
        ({"accelerator": "abacus"}, "accelerator=abacus"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2_and_nothing_is_written(
    made: Path, tmp_path: Path, settings: Mapping[str, object], named: str
):
    given = settings_for(made, out=str(tmp_path / "run"))
    given |= {f"data.{name}": value for name, value in given.pop("data").items()} | dict(settings)
    code, text, err = run_here("train", *(f"{name}={value}" for name, value in given.items()))
    assert code == 2 and not text
    assert err.splitlines()[-1].startswith("millstream: ") and named in err.splitlines()[-1]
    assert "Traceback" not in err and not (tmp_path / "run").exists()
    with pytest.raises(BadSetting):
        ms.train(**given)


def test_a_last_batch_of_one_read_is_trained_on(made: Path, tmp_path: Path):
    out = tmp_path / "run"
    lines = (made / "train.fa").read_text().splitlines(True)
    (tmp_path / "odd.fa").write_text("".join(lines[: 2 * 65]))
    files = {"train": str(tmp_path / "odd.fa"), "val": str(made / "val.fa")}
    ms.train(**settings_for(made, data=files, model="kmer-linear,cnn", epochs=1, out=str(out)))
    assert [line["step"] for line in lines_of(out, "epoch")] == [2, 2]


def test_missing_files_are_named(made: Path, tmp_path: Path):
    nowhere = str(tmp_path / "no.fa")
    for settings, named in (
        ({"data": {"train": nowhere}}, "no.fa"),
        ({"data": {**data(made, train="train.fa"), "test": nowhere}}, "no.fa"),
        ({"mapping": nowhere}, "no.fa"),
    ):
        with pytest.raises(BadSource, match=named):
            ms.train(**settings_for(made, out=str(tmp_path / "run"), **settings))
    assert not (tmp_path / "run").exists()
