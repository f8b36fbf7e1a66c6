"""The demo on a tiny model: killed halfway, it loses nothing."""

import json
import sys
from pathlib import Path

import pytest

import millstream as ms
from support.commands import run_here
from support.extras import need

need("transformers")
pytestmark = pytest.mark.usefixtures("unrendered_figures", "roughly_measured_memory")


def run_in_this_process(command: list[str]) -> None:
    """Only the command that is killed halfway has a process of its own."""
    assert command[:3] == [sys.executable, "-m", "millstream"]
    code, out, err = run_here(*command[3:])
    assert code == 0, err
    print(out, end="", flush=True)
    print(err, end="", file=sys.stderr, flush=True)


def test_the_demo_is_killed_halfway_loses_nothing_and_ends_in_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    from millstream.demo import stories
    from support.tiny_models import make_model

    questions = tmp_path / "questions.jsonl"
    exposures = ["often", "sometimes", "rarely", "never"]
    rows = [
        {"id": i, "question": f"{i} times the fox?", "answer": "x", "exposure": exposures[i % 4]} for i in range(80)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    model = make_model("llama", tmp_path / "model")
    ms.extract(questions, tmp_path / "first", model=str(model), tier="stats", max_new_tokens=4)
    answered = ms.open(tmp_path / "first").table.to_pylist()
    right = {row["question_id"]: row["generated_answer"] for row in answered[::3]}  # make every third answer right
    rows = [{**row, "answer": right.get(str(row["id"]), "x")} for row in rows]
    questions.write_text("\n".join(map(json.dumps, rows)))
    story = stories.Story(
        intro="A model that knows a third.",
        model=str(model),
        questions=str(questions),
        extract=("tier=stats", "max_new_tokens=4", "shard_records=8", "memory=1MB"),
        rule="em",
        train=("model=length,mean_logprob",),
    )
    capfd.readouterr()
    stories.run_traces(tmp_path / "demo", story, run=run_in_this_process)
    shown = capfd.readouterr()
    assert "80 traces" in shown.out and "80 different questions, 0 damaged" in shown.out
    assert f"{len(right)} right, {80 - len(right)} wrong" in shown.out and "never " in shown.out
    assert "mean_logprob" in shown.out and "report.html" in shown.out
    assert (tmp_path / "demo" / "run" / "report.html").stat().st_size > 10_000
    done = int(shown.err.split(" of 80 done already")[0].split()[-1])
    assert 40 <= done <= 80
    traces = ms.open(tmp_path / "demo" / "traces")
    assert sorted(traces.column("question_id").to_pylist()) == sorted(str(i) for i in range(80))


def test_the_reads_half_trains_classifies_and_ends_in_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    from millstream.demo import stories

    train = ("model=kmer-linear", "memory=100MB", "epochs=1", "batch_size=64")
    story = stories.ReadStory(genome_bases=4000, reads=4000, scored=200, train=train)
    stories.run_reads(tmp_path / "reads", story, run=run_in_this_process)
    shown = capfd.readouterr()
    assert "12 species in 6 genera, 3 strains of each" in shown.out and "unclassified" in shown.out
    assert "200 reads" in shown.err and "its index was made with other settings" not in shown.err
    assert (tmp_path / "reads" / "run" / "report.html").stat().st_size > 10_000
    rows = (tmp_path / "reads" / "strains.tsv").read_text().splitlines()
    assert len(rows) == 201
    card = json.loads((tmp_path / "reads" / "run" / "data.json").read_text())
    assert card["reads"] == {"train": 4000, "val": 200, "known": 200, "strains": 200}


def test_strains_differ_as_much_as_documented(tmp_path: Path):
    import numpy as np

    from millstream.demo.stories import GENERA, SPECIES, STRAINS, make_genomes

    assert make_genomes(tmp_path, 20_000, seed=1) == len(GENERA) * len(SPECIES) * len(STRAINS)
    first, second = (
        {
            path.name: np.frombuffer("".join(path.read_text().splitlines()[1:]).encode(), np.uint8)
            for path in sorted((tmp_path / strain).iterdir())
        }
        for strain in ("train", "strains")
    )
    shared = np.arange(20_000) % 10_000 >= 1000  # the rest is unique to a strain
    for name, genome in first.items():
        assert 0.02 < (genome != second[name])[shared].mean() < 0.06
        assert (genome != second[name])[~shared].mean() > 0.5
    minor, major = (first[name] for name in first if "Alba" in name)
    assert 0.15 < (minor != major)[shared].mean() < 0.35


def test_an_unknown_half_of_the_demo_is_refused():
    code, _, err = run_here("demo", "--only", "films")
    assert code == 2 and "films" in err
