"""Random language models of three layers, one per architecture, and questions for them."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from millstream.traces.llm.answers import ALL, Part
from millstream.traces.llm.decoding import Decoding
from millstream.traces.llm.fields import parse_fields
from millstream.traces.llm.model import LoadedModel, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import Prompt
from millstream.traces.llm.questions import Question
from millstream.traces.llm.tracer import Record, Tracer
from support.slow_reference import Seen, generate_beams, generate_greedily, look

EOS, PAD, NEW = 0, 1, 6
EVERYTHING = "hidden,answer_hidden,post_norm,attention,edges,edge_heads,heads,laplacian,topology,nodes,states"
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


def make_model(kind: str, folder: Path, *, seed: int = 0, context: int = 128) -> Path:
    """A model of that architecture with its tokenizer, saved in `folder / kind`."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    grouped = {**common, "num_key_value_heads": 2}
    wide = {**grouped, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    gpt2 = {name: value for name, value in common.items() if name != "intermediate_size"}
    configs = {
        "llama": lambda: hf.LlamaConfig(**grouped),
        "qwen": lambda: hf.Qwen3Config(**wide),
        "gpt2": lambda: hf.GPT2Config(**gpt2),
        "lfm2": lambda: hf.Lfm2Config(**grouped, layer_types=["conv", "full_attention", "conv"]),
        "neox": lambda: hf.GPTNeoXConfig(**common),
        "mistral": lambda: hf.MistralConfig(**grouped, sliding_window=8),
        "gemma2": lambda: hf.Gemma2Config(
            **wide, sliding_window=16, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
        ),
        "gptoss": lambda: hf.GptOssConfig(
            **wide, sliding_window=16, num_local_experts=2, num_experts_per_tok=1, rope_parameters=rope
        ),
    }
    # The initial weights of a model are so small that attention is uniform: make them larger, and no bias zero.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = hf.AutoModelForCausalLM.from_config(configs[kind]())
        for values in model.parameters():
            values.add_(torch.randn(values.shape), alpha=0.1 if kind == "gemma2" else 0.15)
    model.save_pretrained(folder / kind)
    make_tokenizer().save_pretrained(folder / kind)
    return folder / kind


def load(folder: Path) -> LoadedModel:
    """A new model, loaded by the library: a test may change it."""
    settings = ModelSettings(str(folder), device="cpu")
    return load_model(settings, describe_model(settings, notify=print))


def load_eager(folder: Path) -> Any:
    """The model as transformers loads it, with eager attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    return model.eval()


def make_tracer(
    loaded: LoadedModel,
    *,
    fields: str = EVERYTHING,
    stored: str = "float32",
    text: str = "{question}",
    p_true: bool = False,
    trace_samples: bool = False,
    part: Part = ALL,
    memory: int = 1 << 30,
    max_new_tokens: int = NEW,
    **decoding: Any,
) -> Tracer:
    return Tracer(
        loaded,
        fields=parse_fields("full", fields, stored=stored, thinking=part.after is not None),
        decoding=Decoding(max_new_tokens=max_new_tokens, **decoding),
        prompt=Prompt("own", text, (), special=True, part=part),
        memory=memory,
        p_true=p_true,
        trace_samples=trace_samples,
    )


def reciting(loaded: LoadedModel, ids: list[int]) -> LoadedModel:
    """A llama that generates these ids, up to 32 different ones, each after the one before."""
    assert len(set(ids)) == len(ids) <= 32
    model: Any = loaded.model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for place, (token, after) in enumerate(pairwise(ids)):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.lm_head.weight[after, place] = 5.0
    return loaded


def generated(record: Any) -> list[int]:
    """The ids after the prompt."""
    assert record["status"] == "ok", record["error"]
    return record["tokens"][record["prompt_len"] :].tolist()


class TinyModels:
    """The models of a test session, their records of QUESTIONS and the expected ones, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = cache(lambda kind: make_model(kind, folder))
        self.loaded = cache(lambda kind: load(self.folder(kind)))
        self.eager = cache(lambda kind: load_eager(self.folder(kind)))
        self.traced = cache(self._traced)
        self.expected = cache(self._expected)

    def prompts(self) -> list[list[int]]:
        return make_tokenizer()([question.question for question in QUESTIONS])["input_ids"]

    def _traced(self, kind: str, beams: int, batch_size: int) -> list[Record]:
        """Records of QUESTIONS by the library."""
        tracer = make_tracer(self.loaded(kind), num_beams=beams)
        encoded = tracer.encode(QUESTIONS)
        return [
            record
            for start in range(0, len(encoded), batch_size)
            for record in tracer.trace(encoded[start : start + batch_size])
        ]

    def _expected(self, kind: str, beams: int) -> list[tuple[list[int], Seen]]:
        """Generated ids of QUESTIONS, and the activations over prompt and answer, by the slow reference."""
        model = self.eager(kind)
        answers = [
            generate_greedily(model, prompt, count=NEW, eos=EOS)
            if beams == 1
            else generate_beams(model, prompt, count=NEW, beams=beams, eos=EOS, pad=PAD)
            for prompt in self.prompts()
        ]
        return [(ids, look(model, prompt + ids)) for prompt, ids in zip(self.prompts(), answers, strict=True)]
