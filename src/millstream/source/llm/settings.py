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
    revision: str | None = None
    tier: str = "graph"  # stats, graph, probe, full
    fields: str | None = None  # instead of a tier: hidden[8,16,24],edges
    dtype: str = "auto"  # of the model: float32, float16, bfloat16
    stored: str = "float16"  # of what is kept: float16, bfloat16, float32
    device: str = "auto"
    device_map: str | None = None
    quantize: str | None = None  # 8bit, 4bit
    max_new_tokens: int = 32
    num_beams: int = 1
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0  # of sampling
    prompt: str = "auto"  # plain, few-shot, chat, a text with {question}, a .txt file
    stop: str | None = None  # strings that end an answer, | between them
    p_true: bool = False
    columns: str | None = None  # what the file calls things: id=qid,question=text
    num_samples: int | None = None
    shard_records: int | None = None
    shard_bytes: int | str | None = None
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
