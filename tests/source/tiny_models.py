"""Random language models of three layers in a folder, one of each architecture, and questions to ask them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from millstream.source.llm.model import LoadedModel, ModelSettings, describe_model, load_model
from millstream.source.llm.question import Question

EOS, PAD = 0, 1
TEXT = "the quick brown fox jumps over the lazy dog; what is the capital of France? Paris is the capital of France"
KINDS = ("llama", "qwen", "gpt2", "neox", "mistral", "gemma2", "gptoss")
QUESTIONS = [
    Question("q0", "who?"),
    Question("q1", "what is the capital of France and why is it so"),
    Question("q2", "fox", "Paris", ("Paris", "Lutetia"), "city", "often"),
    Question("q3", "Zoë jumps over the quick dog; where"),
    Question("q4", "is it the"),
]


def make_tokenizer(**options: Any) -> Any:
    """Byte-level BPE of 300 tokens, as GPT-2's. `options` go to the tokenizer, for example `pad_token=None`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, **{"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": None, **options}
    )


def make_model(kind: str, folder: Path) -> Path:
    """A model of that architecture with its tokenizer, saved in `folder / kind`."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    grouped = {**common, "num_key_value_heads": 2}
    wide = {**grouped, "head_dim": 8}
    gpt2 = {name: value for name, value in common.items() if name != "intermediate_size"}
    configs = {
        "llama": lambda: hf.LlamaConfig(**grouped),
        "qwen": lambda: hf.Qwen3Config(**wide),
        "gpt2": lambda: hf.GPT2Config(**gpt2),
        "neox": lambda: hf.GPTNeoXConfig(**common),
        "mistral": lambda: hf.MistralConfig(**grouped, sliding_window=8),
        "gemma2": lambda: hf.Gemma2Config(**wide, sliding_window=16, attn_logit_softcapping=0.5, query_pre_attn_scalar=8),
        "gptoss": lambda: hf.GptOssConfig(**wide, sliding_window=16, num_local_experts=2, num_experts_per_tok=1),
    }
    # The weights of an untrained model are so small that all attention is even: these are larger, and no bias is zero.
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    model: Any = hf.AutoModelForCausalLM.from_config(configs[kind]())
    for values in model.parameters():
        with torch.no_grad():
            values.add_(torch.randn(values.shape, generator=generator), alpha=0.15)
    model.save_pretrained(folder / kind)
    make_tokenizer().save_pretrained(folder / kind)
    return folder / kind


def load(folder: Path) -> LoadedModel:
    """As the library loads it, new: what is looked into or changed is nobody else's."""
    settings = ModelSettings(str(folder), device="cpu")
    return load_model(settings, describe_model(settings, notify=print))


def load_eager(folder: Path) -> Any:
    """As transformers alone loads it, with attention by its definition."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    return model.eval()


class TinyModels:
    """The models of a test session: each made and loaded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = cache(self._make)
        self.loaded = cache(lambda kind: load(self.folder(kind)))
        self.eager = cache(lambda kind: load_eager(self.folder(kind)))

    def _make(self, kind: str) -> Path:
        return make_model(kind, self._folder)
