"""The demo, on a tiny model that knows nothing: killed half way it loses nothing."""

import json
import sys
from pathlib import Path

import pytest

import millstream as ms

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "source"))


def test_the_demo_is_killed_half_way_and_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from tiny_models import make_model

    from millstream import demo

    questions = tmp_path / "questions.jsonl"
    exposures = ["often", "sometimes", "rarely", "never"]
    rows = [
        {"id": i, "question": f"{i} times the fox?", "answer": "x", "exposure": exposures[i % 4]} for i in range(80)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    model = make_model("llama", tmp_path / "model")
    monkeypatch.setattr(demo, "SETTINGS", ["tier=probe", "max_new_tokens=4", "shard_records=8", "memory=1MB"])
    demo.run(tmp_path / "demo", model=str(model), questions=str(questions))
    shown = capfd.readouterr()
    assert "80 traces" in shown.out and "0 damages, 80 different questions" in shown.out
    assert "0 right, 80 wrong" in shown.out and "told never 0%" in shown.out
    done = int(shown.err.split(" of 80 done already")[0].split()[-1])
    assert 40 <= done <= 80
    traces = ms.open(tmp_path / "demo" / "traces")
    assert sorted(traces.column("question_id").to_pylist()) == sorted(str(i) for i in range(80))
