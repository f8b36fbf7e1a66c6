"""Two processes on the CPU train like one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millstream as ms
from support.commands import lean_environment
from support.training import SHORT, losses_of, scores_of


def test_two_processes_have_the_same_losses_and_scores_as_one(store: Path, tmp_path: Path):
    asked = {**SHORT, "epochs": 2, "model": "gnn,length", "dropout": 0.0, "accelerator": "cpu"}
    settings = [f"{name}={value}" for name, value in asked.items()]
    command = [
        sys.executable,
        "-m",
        "millstream",
        "train",
        f"data={store}",
        f"out={tmp_path / 'two'}",
        "devices=2",
        *settings,
    ]
    lean = lean_environment("torchmetrics", "transformers")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **lean})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("AUROC [") == 1  # only one process prints it
    ms.train(store, out=str(tmp_path / "one"), **asked)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-3)
    one, two = scores_of(tmp_path / "one"), scores_of(tmp_path / "two")
    assert set(one) == set(two)
    for job in one:
        assert two[job] == pytest.approx(one[job], abs=0.01)
