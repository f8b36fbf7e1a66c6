"""A loaded language model is in memory as a whole."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from millstream.core.memory import file_bytes
from millstream.traces.llm.model import read_weights


def test_mapped_weights_count_as_memory_in_use_before_the_first_batch(tmp_path: Path):
    save_file({"weight": torch.ones(4096, 2048)}, tmp_path / "model.safetensors")  # 32 MB
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        mapped = nn.Linear(2048, 4096, bias=False)
        mapped.weight = nn.Parameter(file.get_tensor("weight"))
    before = file_bytes()
    read_weights(mapped)
    assert file_bytes() - before > 30_000_000
