"""The command of the old streaming guide runs on small data, with the old YAML keys, and writes a report."""

import gzip
import io
import json
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from millstream.classic.train_streaming import KEYS, LEAST_MEMORY, main
from millstream.reads.kind import HEADERS, ReadSettings
from millstream.reads.simulate import SimulateSettings, simulate
from support.extras import need

need("lightning_fabric")
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")

TRAIN, VAL = (f"full_labeled_species_{part}_reads_shuffled/{part}_reads_shuffled_fixed.fa" for part in ("train", "val"))
GUIDE = f"""
python train_streaming.py \
  --config configs/rtx4090_optimized.yaml \
  --train_fasta {TRAIN} \
  --val_fasta {VAL} \
  --mapping_tsv species_mapping_converted.tsv \
  --output_dir outputs/full_dataset_streaming \
  --batch_size 1 \
  --max_epochs 10 \
  --cache_size 10000
"""
OLD = {
    "data": {"header_regex": HEADERS, "num_workers": 4},
    "tokenizer": {"max_length": 128, "use_hf_tokenizer": True},
    "training": {"batch_size": 16, "learning_rate": 0.003, "seed": 3},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the guide names, small: genomes differ enough for `cnn` to learn from few reads."""
    path = tmp_path_factory.mktemp("guide")
    rng = np.random.default_rng(1)
    genomes: list[Path] = []
    for tax_id, gc in ((562, 0.1), (573, 0.9)):
        genomes.append(path / f"{tax_id}_x.fna")
        frequencies = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
        genome = rng.choice(np.frombuffer(b"ACGT", np.uint8), 5000, p=frequencies)
        genomes[-1].write_text(f">{tax_id}\n{genome.tobytes().decode()}\n")
    for seed, (name, count) in enumerate({TRAIN: 48, VAL: 20}.items()):
        (path / name).parent.mkdir()
        settings = SimulateSettings(reads=count, length=100, seed=seed)
        simulate(genomes, [path / name], settings=settings, mapping=path / "species_mapping_converted.tsv")
    (path / "configs").mkdir()
    (path / "configs" / "rtx4090_optimized.yaml").write_text(yaml.safe_dump(OLD))
    return path


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files of the guide."""
    for file in made.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the drawing of reports, which takes seconds."""
    import millstream.report as reported

    def report_of(run: Path) -> SimpleNamespace:
        return SimpleNamespace(lines=lambda: f"report of {run}", compared="1 classifier", write=lambda page: page)

    monkeypatch.setattr(reported, "report_of", report_of)


def run(command: str) -> None:
    """A command of the guide, with one model: kmer-linear would write a file as large as the memory limit."""
    words = shlex.split(command)
    assert words[:2] == ["python", "train_streaming.py"]
    main([*words[2:], "--model", "cnn"])


def flags(**others: object) -> list[str]:
    """The required flags, and others."""
    needed = {"train_fasta": TRAIN, "val_fasta": VAL, "mapping_tsv": "species_mapping_converted.tsv"}
    quick = {"model": "cnn", "max_epochs": 1, "batch_size": 16, "output_dir": "out"}
    given = {**needed, **quick, **others}
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


def config_of(run: str) -> dict[str, Any]:
    return yaml.safe_load(Path(run, "config.yaml").read_text())


@pytest.fixture(scope="module")
def guided(made: Path) -> tuple[Path, str, str]:
    """The run folder of the guide's command, its stdout and its stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(made)
        run(GUIDE)
    return made / "outputs" / "full_dataset_streaming", out.getvalue(), err.getvalue()


def test_004_the_command_of_the_guide_ends_in_a_run_folder_with_a_report(guided: tuple[Path, str, str]):
    folder, out, err = guided
    config = config_of(str(folder))
    assert (config["batch_size"], config["epochs"], config["memory"]) == (1, 10, 1_000_000_000)
    assert (config["max_length"], config["lr"], config["seed"]) == (None, 0.003, 3)  # 128 tokens are not 128 bases
    assert "tokenizer.max_length=128 has no effect on cnn" in err
    assert config["data"]["train"] == TRAIN and config["data"]["val"] == VAL
    assert "--cache_size 10000: memory=1.0 GB" in err
    assert "rtx4090_optimized.yaml: data.num_workers, tokenizer.use_hf_tokenizer have" in err
    rows = pq.read_table(folder / "predictions.parquet").to_pylist()
    assert [row["record"] for row in rows] == list(range(20)) and {row["part"] for row in rows} == {"val"}
    assert "macro F1" in out and "cnn" in out
    assert (folder / "report.html").stat().st_size > 10_000 and (folder / "metrics.jsonl").stat().st_size > 0
    assert "Open outputs/full_dataset_streaming/report.html" in err
    assert json.loads((folder / "data.json").read_text())["reads"] == {"train": 48, "val": 20}


def test_004_batches_of_one_read_are_enough_to_learn(guided: tuple[Path, str, str]):
    rows = pq.read_table(guided[0] / "predictions.parquet").to_pylist()
    assert sum(row["class"] == row["label"] for row in rows) >= 19


@pytest.mark.usefixtures("without_report")
def test_the_same_command_trains_nothing_again_and_gzipped_files_give_the_same_weights(here: Path, capsys):
    main(flags())
    assert "report of out" in capsys.readouterr().out
    before = {file: file.stat().st_mtime_ns for file in Path("out/checkpoints").glob("*/*")}
    assert before
    main(flags(cache_size=50_000))  # memory is not one of the settings of a run
    assert "--cache_size 50000: memory=5.0 GB" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in Path("out/checkpoints").glob("*/*")} == before
    Path("train.fa.gz").write_bytes(gzip.compress(Path(TRAIN).read_bytes()))
    main(flags(train_fasta="train.fa.gz", output_dir="gz"))
    weights = [Path(folder, "checkpoints/cnn-0/detector.safetensors").read_bytes() for folder in ("out", "gz")]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("without_report")
def test_flags_override_the_configuration_and_a_small_cache_still_gets_enough_memory(here: Path, capsys):
    Path("own.yaml").write_text(yaml.safe_dump({"training": {"batch_size": 24, "max_epochs": 1, "optimizer": "adam"}}))
    main(flags(config="own.yaml", batch_size=None, max_epochs=None, cache_size=5, model=None))
    printed = capsys.readouterr().err
    assert f"--cache_size 5: memory={LEAST_MEMORY / 1e6:.1f} MB" in printed
    assert "own.yaml: training.optimizer has" in printed
    config = config_of("out")
    assert (config["batch_size"], config["epochs"], config["memory"]) == (24, 1, LEAST_MEMORY)
    assert config["data"]["header_regex"] == HEADERS and config["max_length"] is None
    assert config["model"] == "kmer-linear,cnn" and (Path("out") / "checkpoints" / "kmer-linear-0").is_dir()
    main(flags(config="own.yaml", batch_size=12, max_epochs=None, output_dir="other"))
    assert config_of("other")["batch_size"] == 12 and config_of("other")["memory"] == 1_000_000_000


@pytest.mark.usefixtures("without_report")
def test_the_old_header_regex_and_tokenizer_are_used(here: Path, capsys):
    for name in (TRAIN, VAL):
        text = Path(name).read_text().replace("lbl|", "species|")
        Path(Path(name).name).write_text(text)
    own = {"data": {"header_regex": r"^species\|(?P<class_id>\d+)\|"}, "tokenizer": {"tokenizer_path": "nowhere"}}
    Path("own.yaml").write_text(yaml.safe_dump(own))
    files = {"train_fasta": Path(TRAIN).name, "val_fasta": Path(VAL).name}
    main(flags(config="own.yaml", **files))
    assert "tokenizer.tokenizer_path=hf(nowhere) has no effect on cnn" in capsys.readouterr().err
    assert json.loads(Path("out/data.json").read_text())["no_class"] == {"train": 0, "val": 0}
    assert config_of("out")["tokenizer"] == "auto"
    with pytest.raises(SystemExit) as ended:
        main(flags(config="own.yaml", **files, model="lstm", output_dir="lstm"))
    assert ended.value.code == 1 and "nowhere: no such file" in capsys.readouterr().err


def test_every_old_key_sets_an_existing_setting():
    known = {"data.header_regex", *ReadSettings.__dataclass_fields__}
    assert set(KEYS.values()) <= known
    assert {"data.header_regex", "tokenizer.max_length", "training.batch_size"} <= set(KEYS)


@pytest.mark.parametrize(
    ("others", "code", "message"),
    [
        ({"batch_size": 0}, 2, "batch_size=0: "),
        ({"max_epochs": 0}, 2, "epochs=0: "),
        ({"model": "cnm"}, 2, "model=cnm: "),
        ({"config": "nowhere.yaml"}, 2, "nowhere.yaml: "),
        ({"config": "broken.yaml"}, 2, "broken.yaml: "),
        ({"config": "wrong.yaml"}, 2, "batch_size=many: "),
        ({"model": "cnn,lstm", "config": "configs/rtx4090_optimized.yaml"}, 2, "tokenizer.max_length=128 "),
        ({"train_fasta": "nowhere.fa"}, 1, "nowhere.fa: "),
        ({"mapping_tsv": "nowhere.tsv"}, 1, "nowhere.tsv: "),
        ({"mapping_tsv": "one.tsv"}, 1, "one.tsv"),
        ({"output_dir": "one.tsv"}, 1, "one.tsv"),
        ({"output_dir": "configs"}, 1, "configs: "),
    ],
)
def test_a_usage_error_is_one_line(here: Path, capsys, others: dict[str, object], code: int, message: str):
    Path("one.tsv").write_text("class_id\tspecies\n0\tx\n")
    Path("broken.yaml").write_text("a: [")
    Path("wrong.yaml").write_text("training: {batch_size: many}")
    without = {"batch_size": None} if others.get("config") == "wrong.yaml" else {}
    with pytest.raises(SystemExit) as ended:
        main(flags(**{**without, **others}))
    printed = capsys.readouterr().err
    assert ended.value.code == code, printed
    last = printed[printed.index("train_streaming: ") :]
    assert message in last and "Traceback" not in printed and not Path("out").exists()


def test_a_missing_report_package_is_one_line_too(here: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "millstream.reads.report", raising=False)
    monkeypatch.delitem(sys.modules, "millstream.report.page", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(flags())
    printed = capsys.readouterr().err
    assert ended.value.code == 1 and "train_streaming: " in printed and "pip install" in printed
    assert Path("out/predictions.parquet").exists()


@pytest.mark.parametrize("others", [{"config": "rtx4090.json"}, {"cache_size": "many"}, {"train_fasta": None}])
def test_an_invalid_flag_prints_the_usage(here: Path, capsys, others: dict[str, object]):
    with pytest.raises(SystemExit) as ended:
        main(flags(**others))
    assert ended.value.code == 2
    assert f"--{next(iter(others))}" in capsys.readouterr().err.splitlines()[-1]


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: python -m millstream.classic.train_streaming")
    for flag in [word for word in shlex.split(GUIDE) if word.startswith("--")]:
        assert flag in text
    assert "run the same command to resume" in text and "100 kB of memory" in text
