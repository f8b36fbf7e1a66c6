"""Tiny models of DNA with random weights, in folders as those that published models come in."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

KINDS = ("llama", "bert", "esm")  # as METAGENE-1; as DNABERT-2, but with the code that transformers has; as NT
SPECIAL = {"llama": ("[BOS]", "[EOS]"), "bert": ("[CLS]", "[SEP]")}


def make_pretrained(folder: Path, kind: str = "bert", **changes: Any) -> Path:
    """A language model of this kind, of two layers, with its tokenizer."""
    hf = pytest.importorskip("transformers")
    folder.mkdir(parents=True)
    num_tokens = write_vocabulary(folder) if kind == "esm" else write_bpe(folder, *SPECIAL[kind])
    common: dict[str, Any] = {
        "vocab_size": num_tokens,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # with 0.02, adapters would have little to adapt
    }
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    mask = {"pad_token_id": 1, "mask_token_id": 2, "token_dropout": True}
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common | changes))
    elif kind == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**common | dropout | changes))
    else:
        model = hf.EsmForMaskedLM(hf.EsmConfig(**common | mask | changes))
    model.save_pretrained(folder)
    return folder


def write_bpe(folder: Path, first: str, last: str) -> int:
    """A tokenizer of single bases and a few pairs, between two special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", first, last, *"ACGTN", "AC", "GT", "CG"]
    model = tokenizers.models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=[("A", "C"), ("G", "T"), ("C", "G")],
        unk_token="[UNK]",
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["[PAD]", first, last])
    ids = [(word, words.index(word)) for word in (first, last)]
    made.post_processor = tokenizers.processors.TemplateProcessing(f"{first} $A {last}", special_tokens=ids)
    made.save(str(folder / "tokenizer.json"))
    return len(words)


def write_vocabulary(folder: Path, k: int = 3) -> int:
    """The vocab.txt of a Nucleotide Transformer, which has k = 6."""
    words = ["<unk>", "<pad>", "<mask>", "<cls>", *map("".join, product("ATCG", repeat=k)), *"ATCGN"]
    (folder / "vocab.txt").write_text("\n".join(words))
    settings = {"eos_token": None, "model_max_length": 1000, "tokenizer_class": "EsmTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(words)
