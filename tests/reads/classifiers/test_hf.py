"""Pretrained models: what is trained and saved of them, that they learn, and which are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millstream.errors import BadSetting, BadSource
from millstream.training.study import Kit
from support.small_classifiers import (
    batch_of,
    easy_reads,
    learn,
    make_kit,
    probabilities,
    random_reads,
    reverse_complement,
)

LENGTHS = (37, 90, 12, 61, 5, 150)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a tokenizer of single bases and a few pairs."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("pretrained")
    words = ["[PAD]", "[UNK]", *"ACGTN", "AC", "GT", "CG"]
    model = tokenizers.models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=[("A", "C"), ("G", "T"), ("C", "G")],
        unk_token="[UNK]",
    )
    tokenizers.Tokenizer(model).save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=256,
        hidden_dropout_prob=0.5,
    )
    transformers.BertModel(config).save_pretrained(path)
    return path


def pretrained_net(path: Path, *, lora: int = 0, **changes: Any) -> tuple[Kit, Any]:
    kit = make_kit("hf", hf=str(path), lora=lora, **changes)
    torch.manual_seed(1)
    return kit, kit.build(batch_of(kit, ["ACGT"]))


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_predictions_of_a_pretrained_model_depend_on_neither_padding_nor_strand(pretrained: Path):
    kit, net = pretrained_net(pretrained)
    net.eval()
    reads = [*random_reads(LENGTHS), ""]
    together = probabilities(kit, net, reads)
    assert together.sum(axis=1) == pytest.approx(1, abs=1e-5) and np.ptp(together[:-1, 0]) > 1e-3
    for number, read in enumerate(reads):
        assert probabilities(kit, net, [read])[0] == pytest.approx(together[number], abs=1e-5)
    assert probabilities(kit, net, [reverse_complement(read) for read in reads]) == pytest.approx(together, abs=1e-5)


def test_a_frozen_model_is_neither_trained_nor_saved(pretrained: Path):
    kit, net = pretrained_net(pretrained, num_classes=2)
    (model,) = net._held
    before = weights_of(model)
    assert all(name.startswith("head.") for name, _ in net.named_parameters())
    assert all(name.startswith("head.") for name in net.state_dict())
    reads, labels = easy_reads(8, seed=0)
    batch = batch_of(kit, reads, train=True)
    net.train()
    assert net.training and not model.training  # dropout in a frozen model would be noise
    assert torch.equal(net.logits(batch)[0], net.logits(batch)[0])
    net(batch, torch.from_numpy(labels), torch.ones(8))[0].backward()
    assert all(weight.grad is None and not weight.requires_grad for weight in model.parameters())
    assert all(weight.grad is not None and weight.grad.any() for weight in net.parameters())
    net.optimizer(0.1, 0.1).step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_frozen_model_is_enough_to_separate_classes_that_differ(pretrained: Path):
    kit, net = pretrained_net(pretrained, num_classes=2)
    before, after = learn(kit, net, 60)
    assert after < 0.5 and after < before / 1.3


def test_adapters_are_trained_and_the_model_is_not(pretrained: Path):
    pytest.importorskip("peft", reason="lora= needs peft, which is not installed")
    kit, net = pretrained_net(pretrained, lora=2, num_classes=2)
    (model,) = net._held
    before = weights_of(model)
    adapters = {name for name in before if "lora_" in name}
    assert adapters and len(net.adapters) == len(adapters)
    assert {name.partition(".")[0] for name in net.state_dict()} == {"adapters", "head"}
    net.train()
    assert model.training
    reads, labels = easy_reads(16, seed=0)
    optimizer = net.optimizer(0.05, 0.0)
    for _ in range(2):  # one half of an adapter starts at zero, so the other has no gradient in the first step
        net(batch_of(kit, reads, train=True), torch.from_numpy(labels), torch.ones(16))[0].backward()
        optimizer.step()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in adapters if "pooler" not in name}  # the output of the pooler is not used
    assert all(weight.requires_grad == (name in adapters) for name, weight in model.named_parameters())


def test_adapters_are_restored_from_a_checkpoint(pretrained: Path):
    pytest.importorskip("peft", reason="lora= needs peft, which is not installed")
    kit, net = pretrained_net(pretrained, lora=2, num_classes=2)
    learn(kit, net, 3, num=16)
    again = pretrained_net(pretrained, lora=2, num_classes=2)[1].eval()
    reads = random_reads((30, 50))
    expected = probabilities(kit, net.eval(), reads)
    assert np.abs(probabilities(kit, again, reads) - expected).max() > 1e-4
    again.load_state_dict(net.state_dict())
    assert probabilities(kit, again, reads) == pytest.approx(expected, abs=1e-6)


def test_the_model_moves_with_the_head(pretrained: Path):
    _, net = pretrained_net(pretrained)
    net.to(torch.float64)
    assert {weight.dtype for weight in net._held[0].parameters()} == {torch.float64}


def test_models_that_cannot_be_loaded_are_refused(pretrained: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="hf=FOLDER"):
        make_kit("hf")
    missing = tmp_path / "missing"
    with pytest.raises(BadSource, match=str(missing)):
        make_kit("hf", hf=str(missing))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadSource, match=str(empty)):
        make_kit("hf", hf=str(empty))
    (empty / "tokenizer.json").write_bytes((pretrained / "tokenizer.json").read_bytes())
    with pytest.raises(BadSetting, match=rf"hf={empty}"):
        pretrained_net(empty)
    (empty / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    (empty / "model.safetensors").write_bytes((pretrained / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(BadSetting, match=rf"hf={empty}"):
        pretrained_net(empty)


def test_weights_that_are_not_safetensors_are_refused(pretrained: Path, tmp_path: Path):
    """A pickle could run code."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((pretrained / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadSetting, match=rf"hf={tmp_path}.*safetensors") as error:
        pretrained_net(tmp_path)
    assert "\n" not in str(error.value)


def test_a_pretrained_model_may_use_another_tokenizer(pretrained: Path):
    kit, _ = pretrained_net(pretrained, tokenizer="base")
    assert batch_of(kit, ["ACGT"])["input_ids"].tolist() == [[1, 2, 3, 4]]
    kit, _ = pretrained_net(pretrained)
    assert batch_of(kit, ["ACGT"])["input_ids"].tolist() == [[7, 8]]
