"""Classifying: one row per read, in order, and the same bytes after any interruption."""

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import millstream as ms
from millstream.core.loader import Loader
from millstream.core.outputs import PartialOutput, done_file
from millstream.errors import BadSetting, BadSource, ConfigMismatch, StoreExists
from millstream.features import fields
from millstream.reads import sample_reports
from millstream.reads.classifiers.nets import LEAST_VOTE, ReadNet, ReadPredictions, probabilities
from millstream.reads.classify import THRESHOLD, classify, find_classifier
from millstream.reads.kind import HEADERS
from millstream.reads.kraken import Assignments
from millstream.reads.mapping import load_classes, load_mapping
from millstream.reads.simulate import SimulateSettings, simulate
from support.commands import run_here
from support.nursery import Nursery

pytestmark = pytest.mark.usefixtures("roughly_measured_memory")

TAXA = {  # class id: tax id, species, genus and its tax id
    3: (562, "Escherichia coli", "Escherichia", 561),
    5: (564, "Escherichia fergusonii", "Escherichia", 561),
    9: (573, "Klebsiella pneumoniae", "Klebsiella", 570),
}
HEAD = ["read", "class", "tax_id", "taxon", "rank", "probability"]
Rows = list[list[str]]
SMALL: Any = {"batch_size": 64, "save_s": 0.0}  # many small batches, with progress saved after each


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single reads, read pairs and a run. The second genome shares half of the first, so many reads are ambiguous."""
    path = tmp_path_factory.mktemp("classify")
    rng = np.random.default_rng(7)
    bases = rng.choice(np.frombuffer(b"ACGT", np.uint8), (3, 20_000))
    bases[1, :10_000] = bases[0, :10_000]
    genomes: list[Path] = []
    for row, (tax_id, *_) in zip(bases, TAXA.values(), strict=True):
        genomes.append(path / f"{tax_id}_genome.fna")
        genomes[-1].write_text(f">{tax_id}\n{row.tobytes().decode()}\n")
    lines = [f"{own}\t{a}\t{b}\t{c}\t{d}\tEnterobacteriaceae" for own, (a, b, c, d) in TAXA.items()]
    mapping = path / "species.tsv"
    mapping.write_text("\n".join(["class_id\ttax_id\tspecies\tgenus\tgenus_tax_id\tfamily", *lines]) + "\n")
    for name, count, seed in (("train", 6000, 0), ("val", 900, 1)):
        simulate(genomes, [path / f"{name}.fa"], settings=SimulateSettings(reads=count, seed=seed), mapping=mapping)
    pairs = SimulateSettings(reads=400, insert=300, seed=2)
    simulate(genomes, [path / "both.fq.gz"], settings=pairs, mapping=mapping)
    simulate(genomes, [path / "one.fq.gz", path / "two.fq"], settings=pairs, mapping=mapping)
    settings = {"model": "kmer-linear", "epochs": 1, "batch_size": 64, "bits": 16, "out": str(path / "run")}
    ms.train({"train": str(path / "train.fa"), "val": str(path / "val.fa")}, mapping=str(mapping), **settings)
    return path


def rows_of(path: Path) -> Rows:
    text = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    head, *rows = [line.split("\t") for line in text.decode().splitlines()]
    assert head == HEAD and all(len(row) == len(HEAD) for row in rows)
    return rows


def names_in(path: Path) -> list[str]:
    return [line[1:].split()[0] for line in path.read_text().splitlines() if line.startswith(">")]


def left_in(folder: Path) -> list[str]:
    """All files, without the records of how they were written."""
    return sorted(path.name for path in folder.iterdir() if path != done_file(folder / path.name[1:-5]))


def stopping_after(batches: int) -> Callable[[], bool]:
    num_calls = 0

    def stop() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls >= batches

    return stop


def test_every_read_has_a_row_in_order_with_the_prediction_made_after_training(made: Path, tmp_path: Path):
    done = classify(made / "run", made / "val.fa", tmp_path / "out.tsv", threshold=0)
    rows = rows_of(tmp_path / "out.tsv")
    assert [row[0] for row in rows] == names_in(made / "val.fa")
    stored = pq.read_table(made / "run" / "predictions.parquet").to_pylist()
    predicted = {row["record"]: row for row in stored if row["part"] == "val"}
    ids = list(TAXA)
    for number, row in enumerate(rows):
        own = ids[predicted[number]["class"]]
        tax_id, species, *_ = TAXA[own]
        assert row[1:5] == [str(own), str(tax_id), species, "species"]
        assert float(row[5]) == pytest.approx(predicted[number]["probability"], abs=1e-4)
    assert (done.num_reads, done.num_classified, done.num_unclassified) == (900, 900, 0)
    assert done.model == "kmer-linear-0" and not done.interrupted
    assert left_in(tmp_path) == ["out.tsv"]


def test_below_the_threshold_reads_are_assigned_to_a_higher_rank(made: Path, tmp_path: Path):
    classify(made / "run", made / "val.fa", tmp_path / "all.tsv")
    done = classify(made / "run", made / "val.fa", tmp_path / "sure.tsv", threshold=0.95)
    sure = rows_of(tmp_path / "sure.tsv")
    assert len(sure) == 900
    seen: set[str] = set()
    for before, row in zip(rows_of(tmp_path / "all.tsv"), sure, strict=True):
        seen.add(row[4])
        if float(before[5]) > 0.95:
            assert row == before
        elif float(before[5]) < 0.95:
            assert row[0] == before[0] and row[1] == "" and row[4] in ("genus", "family")
            assert float(row[5]) >= 0.95
    assert {"species", "genus"} <= seen
    assert ["", "561", "Escherichia", "genus"] in [row[1:5] for row in sure]
    assert done.num_unclassified == 0  # all are of one family


def test_without_a_threshold_a_read_may_be_unclassified():
    columns = {"class_id": [4, 6, 8], "name": ["a", "b", "c"], "genus": ["G", "G", "H"]}
    assignments = Assignments(classes := load_classes(load_mapping(columns)))
    net = ReadNet(3, 3)
    given = torch.tensor([[0.6, 0.2, 0.2], [0.4, 0.2, 0.4], [0.24, 0.25, 0.51], [0.2, 0.29, 0.51]]).log()
    net.logits = lambda batch: (given, {})  # type: ignore[method-assign]
    predictions = ReadPredictions(classes.taxa_by_rank)(net, {})
    numbers, _ = assignments.choose(predictions, THRESHOLD)
    assert [assignments.taxa[number].name for number in numbers] == ["a", "G", "c", "c"]
    no_genus = Assignments(load_classes(load_mapping({"class_id": [4, 6, 8], "name": ["a", "b", "c"]})))
    numbers, _ = no_genus.choose(predictions, THRESHOLD)
    assert [no_genus.taxa[number].name for number in numbers] == ["a", "unclassified", "c", "c"]
    numbers, _ = no_genus.choose(predictions | {"probability": torch.zeros(4)}, 0.0)
    assert (numbers == no_genus.unclassified).all()


def test_ranks_are_tried_from_the_lowest_and_one_may_be_named_class():
    columns = {"class_id": [4, 6, 8], "name": ["a", "b", "c"], "genus": ["G", "G", None], "class": ["K", "K", "L"]}
    classes = load_classes(load_mapping(columns))
    assignments, predict = Assignments(classes), ReadPredictions(classes.taxa_by_rank)
    probability = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.35, 0.25], [0.25, 0.25, 0.5], [0.3, 0.3, 0.4]])
    net = ReadNet(3, 3)
    net.logits = lambda batch: (probability.log(), {})  # type: ignore[method-assign]
    numbers, found = assignments.choose(predict(net, {}), 0.6)
    assert [assignments.taxa[number].name for number in numbers] == ["a", "G", "unclassified", "G"]
    assert [assignments.class_ids[number] for number in numbers] == ["4", "", "", ""]
    assert found == pytest.approx([0.9, 0.75, 0.5, 0.6])
    numbers, _ = assignments.choose(predict(net, {}), 0.5)
    assert [assignments.ranks[number] for number in numbers] == ["no rank", "genus", "no rank", "genus"]


def test_a_pair_has_one_answer_whether_its_mates_are_neighbours_or_in_two_files(made: Path, tmp_path: Path):
    classify(made / "run", made / "both.fq.gz", tmp_path / "neighbours.tsv", paired=True)
    done = classify(made / "run", made / "one.fq.gz", tmp_path / "files.tsv", mates=made / "two.fq", memory="100MB")
    assert (tmp_path / "neighbours.tsv").read_bytes() == (tmp_path / "files.tsv").read_bytes()
    assert (done.num_reads, done.num_rows) == (400, 200)
    rows = rows_of(tmp_path / "files.tsv")
    reads = ms.open(made / "both.fq.gz")
    model, net = find_classifier(made / "run").restore(reads, memory="100MB")
    batch = next(iter(Loader(reads, batch_size=400, features=[*model.scoring, fields("name")], order="none")))
    assert [row[0] for row in rows] == [name[:-2] for name in batch["name"][::2]]  # type: ignore[index]
    assert not any(row[0].endswith(("/1", "/2")) for row in rows)
    with torch.inference_mode():
        likely = probabilities(net, batch)[0].clamp(min=LEAST_VOTE)  # type: ignore[arg-type]
    both = likely.reshape(200, 2, 3).prod(dim=1)
    both /= both.sum(dim=1, keepdim=True)
    assert [int(row[1]) for row in rows] == [list(TAXA)[label] for label in both.argmax(dim=1).tolist()]
    assert [float(row[5]) for row in rows] == pytest.approx(both.max(dim=1).values.tolist(), abs=1e-4)


def test_reads_that_are_not_mates_are_refused_by_name(made: Path, tmp_path: Path):
    run, out = made / "run", tmp_path / "out.tsv"
    with pytest.raises(BadSource, match=r"val\.fa: pair 1 .*lbl\|.*lbl\|"):
        classify(run, made / "val.fa", out, paired=True)
    with pytest.raises(BadSource, match=r"one\.fq\.gz has 200 reads, .*val\.fa has 900"):
        classify(run, made / "one.fq.gz", out, mates=made / "val.fa")
    with pytest.raises(BadSource, match=r"one\.fq\.gz"):
        classify(run, made / "one.fq.gz", out, mates=made / "one.fq.gz")
    lines = (made / "two.fq").read_text().splitlines(keepends=True)
    (tmp_path / "swapped.fq").write_text("".join([*lines[:40], *lines[44:48], *lines[40:44], *lines[48:]]))
    with pytest.raises(BadSource, match="pair 11 "):
        classify(run, made / "one.fq.gz", out, mates=tmp_path / "swapped.fq")
    (tmp_path / "odd.fq").write_text("".join(lines[:12]))
    with pytest.raises(BadSource, match=r"odd\.fq"):
        classify(run, tmp_path / "odd.fq", out, paired=True)
    assert not [name for name in left_in(tmp_path) if "out.tsv" in name]


def test_several_files_are_concatenated(made: Path, tmp_path: Path):
    classify(made / "run", [made / "two.fq", made / "val.fa"], tmp_path / "both.tsv")
    classify(made / "run", made / "two.fq", tmp_path / "first.tsv")
    classify(made / "run", made / "val.fa", tmp_path / "second.tsv")
    assert rows_of(tmp_path / "both.tsv") == rows_of(tmp_path / "first.tsv") + rows_of(tmp_path / "second.tsv")


def test_rows_have_the_names_in_the_headers_even_if_an_index_has_a_column_name(made: Path, tmp_path: Path):
    shutil.copy(made / "val.fa", tmp_path / "val.fa")
    ms.open(tmp_path / "val.fa", header_regex=HEADERS)  # its group `name` is only a part of the header
    classify(made / "run", tmp_path / "val.fa", tmp_path / "out.tsv")
    assert [row[0] for row in rows_of(tmp_path / "out.tsv")] == names_in(made / "val.fa")


def test_neither_gzip_nor_memory_changes_the_rows(made: Path, tmp_path: Path):
    classify(made / "run", made / "val.fa", tmp_path / "out.tsv")
    classify(made / "run", made / "val.fa", tmp_path / "out.tsv.gz")
    assert rows_of(tmp_path / "out.tsv.gz") == rows_of(tmp_path / "out.tsv")
    classify(made / "run", made / "val.fa", tmp_path / "small.tsv.gz", memory="4MB")
    assert (tmp_path / "small.tsv.gz").read_bytes() == (tmp_path / "out.tsv.gz").read_bytes()
    with gzip.open(tmp_path / "out.tsv.gz") as file:
        assert file.read().count(b"\n") == 901


@pytest.mark.parametrize("name", ["out.tsv", "out.tsv.gz"])
def test_stopped_after_any_batch_it_resumes_to_the_same_bytes(made: Path, tmp_path: Path, name: str):
    (tmp_path / "whole").mkdir()
    whole, out = tmp_path / "whole" / name, tmp_path / name
    classify(made / "run", made / "val.fa", whole, report=tmp_path / "whole.rep", **SMALL)
    resumed: list[int] = []
    while not out.exists():
        stopping = {"report": tmp_path / "out.rep", "stop": stopping_after(4), **SMALL}
        done = classify(made / "run", made / "val.fa", out, **stopping)
        resumed.append(done.num_resumed)
        assert done.interrupted == (not out.exists())
    assert resumed == [0, 256, 512, 768]
    assert out.read_bytes() == whole.read_bytes()
    assert (tmp_path / "out.rep").read_bytes() == (tmp_path / "whole.rep").read_bytes()
    assert left_in(tmp_path) == sorted(
        ["out.abundance.tsv", "out.rep", name, "whole", "whole.abundance.tsv", "whole.rep"]
    )


# Imports once; then, in each round, a child process classifies and is killed after a few more rows are saved.
KILLING = """
import json, os, signal, sys, time
from pathlib import Path
from millstream.reads.classify import classify

run, reads, out, state = sys.argv[1:]

def saved():
    return sum(json.loads(Path(state).read_text())["state"]["saved"]["counts"]) if Path(state).exists() else 0

for number in range(5):
    before, child = saved(), os.fork()
    if not child:
        classify(run, reads, out, stop=lambda: time.sleep(0.005), batch_size=32, save_s=0.0)
        os._exit(1)
    while saved() < before + 80:
        time.sleep(0.001)
    time.sleep(0.0013 * number)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it finished before it could be killed"
print(saved())
"""


def test_killed_at_any_instant_it_resumes_to_the_same_bytes(made: Path, nursery: Nursery, tmp_path: Path):
    classify(made / "run", made / "val.fa", tmp_path / "whole.tsv.gz")
    out = tmp_path / "out.tsv.gz"
    journal = tmp_path / "out.tsv.gz.partial" / "journal.json"
    killed = nursery.run(KILLING, made / "run", made / "val.fa", out, journal)
    assert killed.code == 0, killed.err
    assert not out.exists()
    done = classify(made / "run", made / "val.fa", out)
    assert done.num_resumed == int(killed.out) >= 400
    assert out.read_bytes() == (tmp_path / "whole.tsv.gz").read_bytes()
    assert left_in(tmp_path) == ["out.tsv.gz", "whole.tsv.gz"]


@pytest.mark.parametrize("at", ["report", "rename", "journal"])
def test_killed_while_finishing_it_completes_on_the_next_run(made: Path, tmp_path: Path, at: str, monkeypatch):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    out, report = tmp_path / "out.tsv", tmp_path / "out.rep"
    with monkeypatch.context() as patch:
        if at == "rename":  # publishing the journal renames too
            rename = os.rename
            patch.setattr(os, "rename", lambda a, b: die() if Path(b) == out else rename(a, b))
        elif at == "report":
            patch.setattr(sample_reports, "publish", die)
        else:
            patch.setattr(PartialOutput, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            classify(made / "run", made / "val.fa", out, report=report)
    done = classify(made / "run", made / "val.fa", out, kraken_output=report)  # the old name
    assert (done.num_rows, done.num_resumed) == (900, 900)
    assert len(rows_of(out)) == 900 and "\troot\n" in report.read_text()
    assert left_in(tmp_path) == ["out.abundance.tsv", "out.rep", "out.tsv"]
    assert classify(made / "run", made / "val.fa", out).num_resumed == 900
    with pytest.raises(StoreExists, match=r"out\.tsv: .*threshold: 0\.5 -> 0\.7"):
        classify(made / "run", made / "val.fa", out, threshold=0.7)


def test_resuming_with_another_threshold_is_refused_and_keeps_the_progress(made: Path, tmp_path: Path):
    out = tmp_path / "out.tsv"
    assert classify(made / "run", made / "val.fa", out, stop=stopping_after(3), **SMALL).interrupted
    with pytest.raises(ConfigMismatch, match=r"out\.tsv\.partial: .*threshold: 0\.5 -> 0\.7"):
        classify(made / "run", made / "val.fa", out, threshold=0.7)
    assert classify(made / "run", made / "val.fa", out, **SMALL).num_resumed == 192
    assert len(rows_of(out)) == 900


def test_two_processes_cannot_write_the_same_file(made: Path, tmp_path: Path):
    out = tmp_path / "out.tsv"

    def stop() -> bool:
        with pytest.raises(StoreExists, match=r"out\.tsv"):
            classify(made / "run", made / "val.fa", out)
        return False

    classify(made / "run", made / "val.fa", out, stop=stop, **SMALL)
    assert len(rows_of(out)) == 900


def test_a_run_needs_neither_its_mapping_nor_its_reads(made: Path, tmp_path: Path):
    classify(made / "run", made / "val.fa", tmp_path / "before.tsv")
    shutil.copytree(made / "run", tmp_path / "elsewhere")
    shutil.copy(made / "val.fa", tmp_path / "reads.fa")
    config = tmp_path / "elsewhere" / "config.yaml"
    config.write_text(config.read_text().replace(str(made), "/nowhere"))
    classify(tmp_path / "elsewhere", tmp_path / "reads.fa", tmp_path / "after.tsv", index_dir=tmp_path)
    assert (tmp_path / "after.tsv").read_bytes() == (tmp_path / "before.tsv").read_bytes()


def test_the_model_that_was_best_on_validation_is_used(made: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    for name in ("other-1", "other-4"):
        shutil.copytree(run / "checkpoints" / "kmer-linear-0", run / "checkpoints" / name)
    log = run / "metrics.jsonl"
    for seed, score in ((1, 0.1), (4, 1.0)):  # the first seed is used
        line = {"kind": "epoch", "time_s": 1.0, "model": "other", "seed": seed, "val_macro_f1": score}
        log.write_text(log.read_text() + json.dumps(line) + "\n")
    assert find_classifier(run).name == "kmer-linear"
    log.write_text(log.read_text() + json.dumps({**line, "seed": 1, "val_macro_f1": 1.0}) + "\n")
    assert (find_classifier(run).name, find_classifier(run).seed) == ("other", 1)
    assert find_classifier(run, "kmer-linear").name == "kmer-linear"


def test_reads_may_be_longer_or_shorter_than_the_training_reads(made: Path, tmp_path: Path):
    """A transformer has positions for twice the tokens of its training reads."""
    settings = {"model": "transformer", "epochs": 1, "width": 16, "layers": 1, "out": str(tmp_path / "run")}
    files = {"train": str(made / "val.fa"), "val": str(made / "two.fq")}
    ms.train(files, mapping=str(made / "species.tsv"), **settings)
    genome = (made / "573_genome.fna").read_text().splitlines()[1]
    for length in (1, 40, 1500):
        reads, out = tmp_path / f"{length}.fa", tmp_path / f"{length}.tsv"
        reads.write_text("".join(f">r{at}\n{genome[at : at + length]}\n" for at in range(20)))
        classify(tmp_path / "run", reads, out)
        assert [row[0] for row in rows_of(out)] == [f"r{at}" for at in range(20)]


def test_evaluate_on_a_run_of_classifiers_points_to_classify(made: Path):
    code, _, err = run_here("evaluate", made / "run")
    assert code == 1 and f"Next: millstream classify {made / 'run'} READS" in err


def test_the_command_writes_rows_and_a_report_and_prints_a_summary(made: Path, tmp_path: Path):
    out, report = tmp_path / "out.tsv", tmp_path / "out.kreport"
    code, text, err = run_here(
        "classify", made / "run", made / "val.fa", "-o", out, "--report", report, "--threshold", 0.9, "--json"
    )
    assert code == 0, err
    assert json.loads(text)["num_rows"] == 900
    assert "kmer-linear seed 0, the best on validation, macro F1 0." in err
    summary, following = err.splitlines()[-2:]
    assert summary.startswith(f"{out}: 900 reads, 900 classified, 0 unclassified; ")
    assert following == f"Next: millstream view {out}"
    lines = [line.split("\t") for line in report.read_text().splitlines()]
    assert lines[0] == ["100.00", "900", "0", "R", "1", "root"] or lines[0][1] == "900"
    rows = rows_of(out)
    assert {line[4]: int(line[2]) for line in lines}["561"] == sum(row[2] == "561" for row in rows)
    code, text, err = run_here("classify", made / "run", made / "both.fq.gz", "-o", tmp_path / "p.tsv", "--paired")
    assert code == 0 and "200 read pairs, 200 classified" in err and not text
    code, _, err = run_here(
        "classify", made / "run", made / "one.fq.gz", "--mates", made / "two.fq", "--output", tmp_path / "m.tsv"
    )
    assert code == 0 and (tmp_path / "m.tsv").read_bytes() == (tmp_path / "p.tsv").read_bytes(), err


def test_after_ctrl_c_the_same_command_resumes(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    choose = Assignments.choose
    command = ["classify", made / "run", made / "train.fa", "-o", tmp_path / "out.tsv"]
    with monkeypatch.context() as patch:
        patch.setattr(Assignments, "choose", lambda *given: (os.kill(os.getpid(), signal.SIGINT), choose(*given))[1])
        code, _, err = run_here(*command)
    assert code == 130 and "4,096 reads, 4,096 classified" in err and not (tmp_path / "out.tsv").exists()
    code, _, err = run_here(*command)
    assert code == 0 and "6,000 reads" in err and len(rows_of(tmp_path / "out.tsv")) == 6000


GENOMES = Path(__file__).parents[2] / ".." / "shared" / "data" / "genomes"
SPECIES = ("10710_*", "727_*", "210_*_G27*", "1314_*", "666_*_N16961*")  # phage lambda is a hundredth of the others


@pytest.mark.skipif(not GENOMES.exists(), reason=f"needs genomes in {GENOMES}")
def test_random_dna_is_unclassified_and_long_noisy_reads_keep_their_class(tmp_path: Path):
    genomes = [next(GENOMES.glob(name)) for name in SPECIES]
    mapping, rng = tmp_path / "species.tsv", np.random.default_rng(0)
    short, long = SimulateSettings(reads=200_000), {"abundance": "equal", "error": 0.05, "indel": 0.05}
    files = {
        "train.fa": short,
        "val.fa": SimulateSettings(reads=2000, abundance="equal", seed=1),
        "noisy.fa": SimulateSettings(reads=100, length=10_000, seed=2, **long),  # type: ignore[arg-type]
    }
    for name, settings in files.items():
        simulate(genomes, [tmp_path / name], settings=settings, mapping=mapping, index_dir=tmp_path)
    for name, count, length in (("random.fa", 500, 150), ("random_long.fa", 100, 10_000)):
        bases = rng.choice(np.frombuffer(b"ACGT", np.uint8), (count, length))
        text = "".join(f">r{number}\n{row.tobytes().decode()}\n" for number, row in enumerate(bases))
        (tmp_path / name).write_text(text)
    (tmp_path / "empty.fa").write_text(f">empty\n\n>unknown\n{'N' * 150}\n>short\nACGTACGT\n")
    splits = {"train": str(tmp_path / "train.fa"), "val": str(tmp_path / "val.fa")}
    ms.train(splits, mapping=str(mapping), model="kmer-linear", memory="500MB", out=str(tmp_path / "run"))

    def classes_of(name: str) -> list[str]:
        classify(tmp_path / "run", tmp_path / name, tmp_path / f"{name}.tsv")
        return [row[1] for row in rows_of(tmp_path / f"{name}.tsv")]

    for name, least in (("val.fa", 0.9), ("noisy.fa", 0.95)):
        truth = [header.split("|")[1] for header in names_in(tmp_path / name)]
        assert np.mean(np.array(truth) == classes_of(name)) > least, name
    for name in ("random.fa", "random_long.fa"):
        found = classes_of(name)
        assert found.count("") > 0.93 * len(found) and found.count("0") < 0.02 * len(found), name
    assert classes_of("empty.fa") == [""] * 3


def test_errors_are_one_line_and_nothing_is_written(made: Path, tmp_path: Path):
    run, reads, out = made / "run", made / "val.fa", tmp_path / "out.tsv"
    (tmp_path / "there.tsv").write_text("mine")
    shutil.copytree(run, tmp_path / "no_ids")
    card = json.loads((run / "data.json").read_text())
    card["classes"] = [{**row, "tax_id": 0} for row in card["classes"]]
    (tmp_path / "no_ids" / "data.json").write_text(json.dumps(card))
    shutil.copytree(run, tmp_path / "traces")
    (tmp_path / "traces" / "data.json").write_text('{"kind": "traces"}')
    shutil.copytree(run, tmp_path / "young")
    shutil.rmtree(tmp_path / "young" / "checkpoints")
    shutil.copytree(run, tmp_path / "altered")
    config = tmp_path / "altered" / "config.yaml"
    config.write_text(config.read_text().replace("k: auto", "k: 9,11"))
    before = left_in(tmp_path)
    for arguments, code, named in (
        ([tmp_path / "nowhere", reads, "-o", out], 1, "nowhere"),
        ([tmp_path / "traces", reads, "-o", out], 1, "detectors, not read classifiers"),
        ([tmp_path / "young", reads, "-o", out], 1, "young"),
        ([tmp_path / "altered", reads, "-o", out], 1, "checkpoints/kmer-linear-0"),
        ([run, tmp_path / "none.fq", "-o", out], 1, "none.fq"),
        ([run, reads, "-o", tmp_path / "there.tsv"], 1, "there.tsv"),
        ([run, reads, "-o", out, "--report", tmp_path / "there.tsv"], 1, "there.tsv"),
        ([run, reads, "-o", out, "--report", out], 2, "report="),
        ([run, reads, "-o", tmp_path / "no" / "out.tsv"], 2, f"mkdir -p {tmp_path / 'no'}"),
        ([run, reads, "-o", out, "--model", "cnn"], 2, "--model cnn"),
        ([run, reads, "-o", out, "--threshold", "95"], 2, "threshold=95.0"),
        ([run, reads, "-o", out, "--paired", "--mates", reads], 2, "not both"),
        ([run, reads, "-o", out, "--memory", "much"], 2, "'much'"),
        ([tmp_path / "no_ids", reads, "-o", out, "--kraken-output", tmp_path / "r"], 1, "3 of 3 classes have none"),
    ):
        found, _, err = run_here("classify", *arguments)
        assert found == code and named in err, err
        assert err.splitlines()[-1].startswith("millstream: ")
        assert left_in(tmp_path) == before
    with pytest.raises(BadSetting):
        classify(run, reads, out, threshold=-0.1)
