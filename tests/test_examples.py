"""The examples run, in order and alone, and print what they wrote; the notebook has its output and runs again."""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.extras import need

pytestmark = pytest.mark.usefixtures("roughly_measured_memory", "quick_fits")

need("transformers", "tokenizers", "lightning_fabric", "sklearn", "jinja2", "numba", "matplotlib")

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = ("1_traces.py", "2_loader.py", "3_detectors.py", "4_reads.py")
NOTEBOOK: Any = json.loads((EXAMPLES / "explore.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all tests run in; the examples write to its subfolder `out`."""
    import torch

    place, threads, paths = tmp_path_factory.mktemp("examples"), torch.get_num_threads(), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield place
    torch.set_num_threads(threads)
    sys.path[:] = paths


def run(name: str, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a script prints."""
    patch.setattr(sys, "argv", [name, str(folder)])
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def written(line: str) -> Path:
    """The file or folder that the last line of a script reports."""
    found = re.fullmatch(r"Wrote (\S+?)(:.*|\.) Next: .*", line)
    assert found, line
    return Path(found[1])


def test_the_second_script_creates_its_input_and_sees_every_record_once(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = run("2_loader.py", Path("out"), capsys, monkeypatch)  # alone: it runs the first one
    assert re.search(r"480 traces, .* MB: \d+ answers right, \d+ wrong", lines[0])
    losses = [float(line.split()[-1]) for line in lines if "epoch" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert "each exactly once" in lines[-2]
    assert json.loads(written(lines[-1]).read_text())["samples"] == 192


def test_the_first_script_resumes(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert Path("out/traces").exists(), "runs after the test of the second script"
    shards = {file: file.stat().st_mtime_ns for file in Path("out/traces").glob("shard-*")}
    lines = run("1_traces.py", Path("out"), capsys, monkeypatch)
    right, wrong = map(int, re.findall(r"(\d+) (?:answers right|wrong)", lines[0]))
    assert right + wrong == 480 and min(right, wrong) > 100
    assert written(lines[-1]) == Path("out/traces")
    assert {file: file.stat().st_mtime_ns for file in Path("out/traces").glob("shard-*")} == shards != {}


def test_the_third_script_compares_detectors_including_its_own(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = run("3_detectors.py", Path("out"), capsys, monkeypatch)
    found = {line.split()[0]: float(line.split()[1]) for line in lines if re.match(r"\S+ +[01]\.\d+ \[", line)}
    assert set(found) == {"lstm", "length", "mean_logprob", "probe_last_answer", "3_detectors:Doubt"}
    assert min(found["lstm"], found["3_detectors:Doubt"]) > 0.6 and found["length"] == 0.5
    assert written(lines[-1]).stat().st_size > 10_000
    assert Path("out/run/evaluated/test/predictions.parquet").exists()


def test_the_notebook_runs_on_the_output_of_the_scripts(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert Path("out/run/predictions.parquet").exists(), "runs after the test of the third script"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[int] = []

    def show() -> None:
        drawn.extend(pyplot.get_fignums())
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    names: dict[str, object] = {}
    for cell in CELLS:
        exec(compile(cell, "explore.ipynb", "exec"), names)
    kept = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", []) if "data" in output]
    assert len(drawn) == 4 and len(kept) == 7
    assert "Where does" in capsys.readouterr().out


def test_the_fourth_script_classifies_reads(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("out/reads").mkdir(parents=True, exist_ok=True)
    Path("out/reads/test.tsv").write_text("from an earlier run\n")
    lines = run("4_reads.py", Path("out"), capsys, monkeypatch)
    score = next(line for line in lines if line.startswith("test  kmer-linear"))
    assert float(score.split()[2]) > 0.9
    assert len(written(lines[-1]).read_text().splitlines()) == 1 + 1000


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_begins_with_its_purpose(name: str):
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < 60 and lines[0].startswith('"""')


def test_there_are_four_scripts_and_a_notebook():
    assert sorted(file.name for file in EXAMPLES.glob("*.*")) == [*SCRIPTS, "explore.ipynb"]


def test_the_notebook_was_run_without_errors_and_shows_no_absolute_path():
    counts = [cell["execution_count"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(CELLS) + 1))
    for cell in NOTEBOOK["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            texts = [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
            assert not re.search(r"(?<![\w.])/\w+/|[A-Z]:\\|site-packages|Warning", "".join(map(str, texts)))
