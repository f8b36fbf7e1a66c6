"""The settings of an extraction, and which of them a store remembers."""

from dataclasses import dataclass

from millstream.errors import BadSetting
from millstream.source.llm.decode import Decoding
from millstream.source.llm.fields import Fields, parse_fields
from millstream.source.llm.model import ModelCard, ModelSettings
from millstream.source.llm.prompts import Prompt


@dataclass(frozen=True)
class ExtractSettings:
    """What `millstream extract` takes as `key=value`."""

    model: str = ""  # a name on the Hugging Face hub, a folder, facts or smollm2
    revision: str | None = None  # of the model on the hub: a branch, tag or commit
    tier: str = "graph"  # stats, graph, probe, full
    fields: str | None = None  # instead of a tier: hidden[8,16,24],edges
    dtype: str = "auto"  # of the model: float32, float16, bfloat16
    stored: str = "float16"  # of what is kept: float16, bfloat16, float32
    device: str = "auto"  # cpu, cuda, cuda:1, mps, or what there is
    device_map: str | None = None  # auto spreads a model over all GPUs, as accelerate does
    quantize: str | None = None  # 8bit, 4bit
    max_new_tokens: int = 32  # after which an answer is cut off
    num_beams: int = 1  # beam search; the best beam is the answer
    temperature: float = 0.0  # of sampling; 0 is greedy
    top_k: int | None = None  # sample from so many of the likeliest tokens
    top_p: float | None = None  # sample from the likeliest tokens that have this much of the probability
    seed: int = 0  # of sampling
    prompt: str = "auto"  # plain, few-shot, chat, a text with {question}, a .txt file
    stop: str | None = None  # strings that end an answer, | between them
    p_true: bool = False  # ask the model whether its answer is true: two more forward passes
    columns: str | None = None  # what the file calls things: id=qid,question=text
    num_samples: int | None = None  # only the first so many questions
    shard_records: int | None = None  # traces of a shard, at most
    shard_bytes: int | str | None = None  # of a shard, about; 512MB if not given
    memory: int | str = "2GB"  # of a batch, beside the model

    def of_model(self) -> ModelSettings:
        if not self.model:
            raise BadSetting("model= is missing: a name on the Hugging Face hub, a folder, facts or smollm2")
        return ModelSettings(self.model, self.revision, self.dtype, self.device, self.device_map, self.quantize)

    def kept(self) -> Fields:
        return parse_fields(self.tier, self.fields, stored=self.stored)

    def decoding(self, prompt: Prompt) -> Decoding:
        return Decoding(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=prompt.stop,
        )

    def remembered(self, card: ModelCard, prompt: Prompt) -> dict[str, object]:
        """What decides the content of a trace; a store refuses to go on with any of it changed."""
        kept = self.kept()
        fields = [
            f"{name}[{','.join(map(str, layers))}]" if (layers := kept.layers.get(name)) else name
            for name in kept.names
        ]
        return {
            "model": self.model,
            "revision": card.revision,
            "dtype": card.dtype,
            "quantize": self.quantize,
            "fields": ",".join(fields),
            "stored": self.stored,
            "max_new_tokens": self.max_new_tokens,
            "num_beams": self.num_beams,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed if self.temperature else None,
            "prompt": prompt.text,
            "stop": list(prompt.stop),
            "p_true": self.p_true,
        }
