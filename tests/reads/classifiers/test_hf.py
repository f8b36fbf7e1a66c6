"""Pretrained models: what is trained and saved of them, that they learn, and which are refused."""

import json
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import millstream as ms
from millstream.errors import BadSetting, BadSource, ConfigMismatch
from millstream.reads.tokenizers import hf
from millstream.training.run import Run
from millstream.training.study import Kit
from support.pretrained_models import KINDS, make_pretrained
from support.small_classifiers import (
    LENGTHS,
    batch_of,
    easy_reads,
    learn,
    make_kit,
    probabilities,
    random_reads,
    reverse_complement,
    together_as_alone,
)
from support.training import lines_of, weights_of


@pytest.fixture(scope="module", params=KINDS)
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of each kind."""
    return make_pretrained(tmp_path_factory.mktemp("pretrained") / request.param, request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pretrained(tmp_path_factory.mktemp("pretrained") / "bert")


def pretrained_net(path: Path, *, lora: int = 0, **changes: Any) -> tuple[Kit, Any]:
    kit = make_kit("hf", hf=str(path), lora=lora, **changes)
    torch.manual_seed(1)
    return kit, kit.build(batch_of(kit, ["ACGT"]))


def copied(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_predictions_of_a_pretrained_model_depend_on_neither_padding_nor_strand(pretrained: Path):
    kit, net = pretrained_net(pretrained)
    net.eval()
    reads = [*random_reads(LENGTHS), ""]
    together = together_as_alone(kit, net, reads)
    assert probabilities(kit, net, [reverse_complement(read) for read in reads]) == pytest.approx(together, abs=1e-5)


def test_a_frozen_model_is_neither_trained_nor_saved(pretrained: Path):
    kit, net = pretrained_net(pretrained, num_classes=2)
    (model,) = net._held
    before = copied(model)
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


def test_a_frozen_model_is_enough_to_separate_classes_that_differ(bert: Path):
    kit, net = pretrained_net(bert, num_classes=2)
    before, after = learn(kit, net, 60, num=48)
    assert after < 0.5 and after < before / 1.3


def test_adapters_learn_faster_than_the_head_alone(pretrained: Path):
    pytest.importorskip("peft", reason="lora= needs peft, which is not installed")
    reads, labels = easy_reads(32, seed=0)
    losses: list[float] = []
    for lora in (0, 4):
        kit, net = pretrained_net(pretrained, lora=lora, num_classes=2)
        batch, optimizer = batch_of(kit, reads), net.optimizer(0.02, 0.0)
        for _ in range(12):
            optimizer.zero_grad()
            loss = net(batch, torch.from_numpy(labels), torch.ones(len(reads)))[0]
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] / 2


def test_reads_with_more_tokens_than_a_model_has_positions_for_are_truncated(pretrained: Path):
    """ESM counts positions from 2 on, so that 64 are enough for 62 tokens."""
    kit, net = pretrained_net(pretrained)
    most = net._most_tokens
    assert most == (254 if pretrained.name == "esm" else 256)
    (read,) = random_reads([2000])
    batch = dict(batch_of(kit, [read]))
    assert batch["input_ids"].shape[1] > most
    with torch.inference_mode():
        expected = net.eval().logits({name: batch[name][:, :most] for name in ("input_ids", "attention_mask")})[0]
        assert torch.equal(net.logits(batch)[0], expected)


def test_adapters_are_trained_and_the_model_is_not(pretrained: Path):
    pytest.importorskip("peft", reason="lora= needs peft, which is not installed")
    kit, net = pretrained_net(pretrained, lora=2, num_classes=2)
    (model,) = net._held
    before = copied(model)
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
    assert changed == adapters
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


def test_the_model_moves_with_the_head(bert: Path):
    _, net = pretrained_net(bert)
    net.to(torch.float64)
    assert {weight.dtype for weight in net._held[0].parameters()} == {torch.float64}


def test_models_that_cannot_be_loaded_are_refused(bert: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="hf=FOLDER"):
        make_kit("hf")
    missing = tmp_path / "missing"
    with pytest.raises(BadSource, match=str(missing)):
        make_kit("hf", hf=str(missing))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadSource, match=str(empty)):
        make_kit("hf", hf=str(empty))
    (empty / "tokenizer.json").write_bytes((bert / "tokenizer.json").read_bytes())
    with pytest.raises(BadSetting, match=rf"hf={empty}"):
        pretrained_net(empty)
    (empty / "config.json").write_bytes((bert / "config.json").read_bytes())
    (empty / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(BadSetting, match=rf"hf={empty}"):
        pretrained_net(empty)


def test_weights_that_are_not_safetensors_are_refused(bert: Path, tmp_path: Path):
    """A pickle could run code."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadSetting, match=rf"hf={tmp_path}.*safetensors") as error:
        pretrained_net(tmp_path)
    assert "\n" not in str(error.value)


def test_a_pretrained_model_may_use_another_tokenizer(bert: Path):
    kit, _ = pretrained_net(bert, tokenizer="base")
    assert batch_of(kit, ["ACGT"])["input_ids"].tolist() == [[1, 2, 3, 4]]
    kit, _ = pretrained_net(bert)
    assert batch_of(kit, ["ACGT"])["input_ids"].tolist() == [[2, 9, 10, 3]]


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("bert", "attention.self.query", "attention.self.Wqkv"), ("esm", "intermediate.dense", "intermediate.glu")],
)
def test_weights_of_other_code_than_that_of_transformers_are_refused(tmp_path: Path, kind: str, old: str, new: str):
    """DNABERT-2 and the second Nucleotide Transformer have the names of BERT and ESM, and code of their own.

    transformers loads them, with a warning, and random weights in place of those that have other names.
    """
    from safetensors.torch import save_file

    path = make_pretrained(tmp_path / kind, kind)
    weights = load_file(path / "model.safetensors")
    renamed = {name.replace(old, new): weight for name, weight in weights.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadSetting, match=rf"hf={path}: .*{old}"):
        pretrained_net(path)
    larger = {name: torch.cat([weight, weight]) if old in name else weight for name, weight in weights.items()}
    save_file(larger, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadSetting, match=rf"hf={path}: .*{old}"):
        pretrained_net(path)


def test_a_model_that_needs_code_of_its_own_is_refused(tmp_path: Path):
    path = make_pretrained(tmp_path / "bert")
    config = json.loads((path / "config.json").read_text())
    del config["model_type"]
    code = {"AutoConfig": "configuration_bert.BertConfig", "AutoModel": "bert_layers.BertModel"}
    (path / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    (path / "bert_layers.py").write_text("raise SystemExit")
    with pytest.raises(BadSetting, match=rf"hf={path}: .*code"):
        pretrained_net(path)


def test_weights_take_at_most_half_of_the_memory(bert: Path):
    num_bytes = sum(weight.nbytes for weight in pretrained_net(bert)[1]._held[0].parameters())
    assert make_kit("hf", hf=str(bert), memory=2 * num_bytes)
    with pytest.raises(BadSetting, match=rf"hf={bert}: .*memory="):
        make_kit("hf", hf=str(bert), memory=2 * num_bytes - 1)


def test_the_tokenizer_of_a_nucleotide_transformer_gives_the_tokens_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    expected = transformers.EsmTokenizer.from_pretrained(make_pretrained(tmp_path / "esm", "esm"))
    found = hf(tmp_path / "esm")
    rng = np.random.default_rng(0)
    reads = ["", *("".join(rng.choice(list("ACGTN"), size, p=[0.24] * 4 + [0.04])) for size in range(60))]
    flat = np.frombuffer("".join(reads).encode(), np.uint8)
    ids, mask = found.tokenize(flat, np.cumsum([0, *map(len, reads)]))
    assert [row[kept > 0].tolist() for row, kept in zip(ids, mask, strict=True)] == expected(reads)["input_ids"]
    assert ids[0, 0] == expected.cls_token_id and ids[0, 1] == found.pad_id == expected.pad_token_id
    assert {expected.convert_tokens_to_ids(token) for token in ("N", "<cls>", "<pad>")} <= set(found.blank_ids)
    (tmp_path / "esm" / "tokenizer_config.json").unlink()
    with (tmp_path / "esm" / "vocab.txt").open("a") as file:
        file.write("\n<eos>")
    assert hf(tmp_path / "esm").tokenize(flat[:3], np.array([0, 3])).input_ids[0, -1] == found.vocab_size


def test_other_vocabularies_are_refused(tmp_path: Path):
    """Such as that of DNABERT, whose k-mers overlap: it has no single bases."""
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", *map("".join, product("ACGT", repeat=3))])
    )
    with pytest.raises(BadSource, match=rf"{tmp_path}/vocab.txt: "):
        hf(tmp_path)


# -- runs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled reads of two classes to train and validate on, and the mapping."""
    path = tmp_path_factory.mktemp("reads")
    for seed, (name, num) in enumerate({"train.fa": 96, "val.fa": 40}.items()):
        reads = zip(*easy_reads(num, seed), strict=True)
        (path / name).write_text(
            "".join(f">lbl|{label}|||{number}/1\n{read}\n" for number, (read, label) in enumerate(reads))
        )
    (path / "classes.tsv").write_text("class_id\tname\n0\tAT-rich\n1\tGC-rich\n")
    return path


def train(files: Path, **settings: Any) -> Run:
    given = {"epochs": 2, "batch_size": 12, "lr": 0.03, "warmup": 0.0, "memory": "200MB", "lora": 4, **settings}
    data = {"train": str(files / "train.fa"), "val": str(files / "val.fa")}
    return ms.train(data, mapping=str(files / "classes.tsv"), **{"model": "hf", **given})


@pytest.mark.usefixtures("roughly_measured_memory")
def test_a_stopped_run_with_adapters_resumes_and_its_model_classifies(
    pretrained: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("peft", reason="lora= needs peft, which is not installed")
    settings: dict[str, Any] = {"hf": str(pretrained), "out": str(tmp_path / "run")}
    asked = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr("millstream.training.run.interruptible", lambda: nullcontext(lambda: next(asked) == 11))
        assert train(files, **settings).interrupted  # within the second epoch
    assert not train(files, **settings).interrupted
    train(files, **settings | {"out": str(tmp_path / "whole")})
    assert weights_of(tmp_path / "run", "hf-0") == weights_of(tmp_path / "whole", "hf-0")

    weights = load_file(tmp_path / "run" / "checkpoints" / "hf-0" / "detector.safetensors")
    assert {name.partition(".")[0] for name in weights} == {"adapters", "head"}
    assert sum(weight.nbytes for weight in weights.values()) < (pretrained / "model.safetensors").stat().st_size
    ms.classify(tmp_path / "run", files / "val.fa", out=tmp_path / "val.tsv")
    rows = [line.split("\t") for line in (tmp_path / "val.tsv").read_text().splitlines()[1:]]
    right = sum(row[0].startswith(f"lbl|{row[1]}|") for row in rows)
    assert len(rows) == 40 and right >= 30


@pytest.mark.usefixtures("roughly_measured_memory")
def test_mixed_precision_learns_the_same_on_the_cpu_and_a_run_keeps_its_precision(
    bert: Path, files: Path, tmp_path: Path
):
    settings: dict[str, Any] = {"model": "cnn,lstm,transformer,hf", "hf": str(bert), "lora": 0, "epochs": 1}
    settings |= {"width": 16, "layers": 1, "dropout": 0.0, "lr": 0.003}
    losses: dict[str, dict[str, float]] = {}
    for precision in ("auto", "bf16-mixed"):
        out = tmp_path / precision
        train(files, **settings, precision=precision, out=str(out))
        losses[precision] = {line["model"]: line["loss"] for line in lines_of(out, "epoch")}
    assert losses["bf16-mixed"] == pytest.approx(losses["auto"], rel=0.05)
    differs = {model for model, loss in losses["auto"].items() if loss != losses["bf16-mixed"][model]}
    assert differs == {"cnn", "lstm", "transformer", "hf"}
    with pytest.raises(ConfigMismatch, match="precision"):  # auto is 32-true here
        train(files, **settings, out=str(tmp_path / "bf16-mixed"))
    assert not train(files, **settings, precision="32-true", out=str(tmp_path / "auto")).interrupted
