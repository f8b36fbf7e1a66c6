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


def test_weights_of_any_type_and_size_are_read():
    odd = [torch.ones(3, 5000).to(torch.float8_e4m3fn), torch.ones(0, 4), torch.ones(8, 4).t(), torch.tensor(1.0)]
    net = nn.ParameterList([nn.Parameter(weight, requires_grad=False) for weight in odd])
    read_weights(net)
    assert [weight.shape for weight in net] == [weight.shape for weight in odd]
