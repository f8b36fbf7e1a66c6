"""A causal language model by name or path, with its tokenizer, and how it decodes: greedy, sampling or beam search."""

import hashlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from millstream.core.registry import extensions
from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.traces.llm import transformers
from millstream.traces.llm.capture import register_attention
from millstream.traces.llm.fields import Size


class Tokenizer(Protocol):
    """Texts -> token ids and back."""

    chat_template: str | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool = False) -> list[str]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


class MakeModel(Protocol):
    """Returns the folder of a model; the first call makes it."""

    def __call__(self, *, notify: Callable[[str], None]) -> Path: ...


def built_in_models() -> Mapping[str, MakeModel]:
    """The built-in models by name."""
    return ChainMap(*(module.MODELS for module in extensions("built_ins")))


@dataclass(frozen=True)
class ModelSettings:
    """Which model to load, in which number format, on which device."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    quantize: str | None = None  # 8bit or 4bit, by bitsandbytes
    trust_remote_code: bool = False

    @property
    def source(self) -> dict[str, Any]:
        """What every `from_pretrained` gets. Without an explicit False, transformers may ask to run a model's code."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class ModelCard:
    """A model without its weights."""

    name_or_path: str
    tokenizer: Tokenizer
    size: Size
    context: int | None  # maximum number of tokens
    revision: str
    dtype: str


@dataclass(frozen=True)
class LoadedModel:
    """Model, tokenizer, and the layers inside the model."""

    model: Any  # a transformers model: its types are partly unknown
    card: ModelCard
    base: nn.Module  # its output is the state after the last norm
    layers: list[nn.Module]
    eos: frozenset[int]
    pad: int

    @property
    def tokenizer(self) -> Tokenizer:
        return self.card.tokenizer

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device


def describe_model(settings: ModelSettings, *, notify: Callable[[str], None]) -> ModelCard:
    """The card of a model: a Hugging Face name, a folder, or a built-in model, which is made if missing."""
    hf = transformers()
    transformers("utils.logging").disable_progress_bar()
    _quantized(settings.quantize)  # reports a bad setting before anything is loaded
    name_or_path = find_model(settings.model, notify=notify)
    dtype = _dtype(settings)
    try:
        config = hf.AutoConfig.from_pretrained(name_or_path, **settings.source)
        tokenizer = hf.AutoTokenizer.from_pretrained(name_or_path, **settings.source)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(settings, error) from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    size = Size(
        layers=text.num_hidden_layers,
        heads=heads,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        item=4 if dtype == "float32" else 2,
    )
    context = getattr(text, "max_position_embeddings", None)
    return ModelCard(name_or_path, tokenizer, size, context, _revision(name_or_path, config), dtype)


def load_model(settings: ModelSettings, card: ModelCard) -> LoadedModel:
    """The model itself, on its device."""
    from safetensors import SafetensorError

    hf = transformers()
    device = _device(settings.device)
    options: dict[str, Any] = {"dtype": card.dtype, **settings.source, **_quantized(settings.quantize)}
    device_map = settings.device_map or (device if settings.quantize else None)
    try:
        model = hf.AutoModelForCausalLM.from_pretrained(
            card.name_or_path, attn_implementation=register_attention(), device_map=device_map, **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # the last: cut off or damaged
        raise _not_loaded(settings, error) from None
    if device_map is None:
        model.to(device)
    model.eval()
    eos = _ids(model.generation_config.eos_token_id) | _ids(card.tokenizer.eos_token_id)
    model.generation_config = hf.GenerationConfig()  # generate() would take what we leave out from the model's own
    layers = _decoder_layers(model, card.size.layers, settings.model)
    pad = card.tokenizer.pad_token_id
    pad = pad if pad is not None else min(eos, default=0)
    return LoadedModel(model, card, model.base_model, layers, frozenset(eos), pad)


def find_model(name: str, *, notify: Callable[[str], None]) -> str:
    """The folder of a built-in model, made if missing; any other name unchanged."""
    make = built_in_models().get(name)
    return name if make is None else str(make(notify=notify))


def _not_loaded(settings: ModelSettings, error: Exception) -> BadSource:
    if "trust_remote_code" in str(error):
        return BadSource(
            f"model={settings.model}: comes with Python code of its own, which is not run. If you have read and trust "
            "it: trust_remote_code=true"
        )
    reason = " ".join(str(error).split())[:300]
    return BadSource(
        f"model={settings.model}: cannot be loaded ({reason}). Give the folder of a causal language model, its name on "
        f"the Hugging Face hub when online, or one of {', '.join(built_in_models())}"
    )


def _dtype(settings: ModelSettings) -> str:
    names = ("float32", "float16", "bfloat16")
    if settings.dtype not in ("auto", *names):
        raise BadSetting(f"dtype={settings.dtype}: must be one of auto, {', '.join(names)}")
    on_cpu = settings.dtype == "auto" and _device(settings.device) == "cpu" and settings.device_map is None
    return "float32" if on_cpu else settings.dtype  # 16-bit numbers are slower on a CPU


def _device(name: str) -> str:
    if name != "auto":
        try:
            kind = torch.device(name).type
        except RuntimeError:
            raise BadSetting(f"device={name}: must be one of auto, cpu, cuda, cuda:1, mps") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise BadSetting(f"device={name}: torch finds no CUDA device here; use device=cpu")
        return name
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _quantized(bits: str | None) -> dict[str, Any]:
    if bits is None:
        return {}
    if bits not in ("8bit", "4bit"):
        raise BadSetting(f"quantize={bits}: must be one of 8bit, 4bit")
    if find_spec("bitsandbytes") is None:
        raise MissingExtra(f"quantize={bits} needs bitsandbytes: pip install bitsandbytes")
    config = transformers().BitsAndBytesConfig(load_in_8bit=bits == "8bit", load_in_4bit=bits == "4bit")
    return {"quantization_config": config}


def _ids(value: object) -> set[int]:
    return {value} if isinstance(value, int) else set(cast("Iterable[int]", value or ()))


def _decoder_layers(model: nn.Module, count: int, name: str) -> list[nn.Module]:
    """The decoder layers: the outermost module list of that length."""
    lists: list[tuple[int, Iterable[nn.Module]]] = [
        (path.count("."), cast("Iterable[nn.Module]", module))
        for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise BadSource(f"model={name}: found no list of {count} layers to trace")
    return list(min(lists, key=lambda found: found[0])[1])


def _revision(folder: str, config: object) -> str:
    """The commit on the hub; for a folder, a fingerprint of its files."""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(folder).glob("*")):
        if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(1 << 20))
                stream.seek(max(0, file.stat().st_size - (1 << 20)))
                digest.update(stream.read())
    return digest.hexdigest()


# B batch, P prompt with padding, N generated, V vocabulary


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. `temperature` 0 is greedy, or beam search with more than one beam."""

    max_new_tokens: int = 32
    num_beams: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.num_beams < 1 or self.temperature < 0:
            raise BadSetting(
                f"max_new_tokens={self.max_new_tokens} num_beams={self.num_beams} temperature={self.temperature}: "
                "must be at least 1, 1 and 0"
            )
        if self.num_beams > 1 and self.temperature > 0:
            raise BadSetting("num_beams and temperature exclude each other: beam search does not sample")
        if (self.top_k is not None and self.top_k < 1) or not 0 < (self.top_p or 1.0) <= 1:
            raise BadSetting(
                f"top_k={self.top_k} top_p={self.top_p}: top_k must be at least 1, top_p above 0 and at most 1"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise BadSetting("top_k and top_p need temperature=, for example temperature=1")

    def config(self, *, eos: Sequence[int] | None, pad: int) -> Any:
        """A complete configuration: the generation_config.json of the model is ignored."""
        return transformers().GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.num_beams,
            early_stopping=self.num_beams > 1,
            do_sample=False,  # sampling is done by Draw
            eos_token_id=eos,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=self.num_beams == 1,  # beams change their order between steps
            use_cache=True,
        )

    def processors(self, ids: Sequence[str], device: torch.device) -> Any:
        """Logits processors of each step; none without sampling."""
        hf, steps = transformers(), list[Any]()
        if self.temperature > 0:
            steps.append(hf.TemperatureLogitsWarper(self.temperature))
            steps += [hf.TopKLogitsWarper(self.top_k)] if self.top_k is not None else []
            steps += [hf.TopPLogitsWarper(self.top_p)] if self.top_p is not None else []
            steps.append(Draw(self.seed, ids, device))
        return hf.LogitsProcessorList(steps)

    def stopping(self, tokenizer: Tokenizer, prompt: int) -> Any:
        """Stopping criteria in addition to the end-of-text token; `prompt` is the number of prompt tokens."""
        stops = [StopAt(tokenizer, self.stop, prompt)] if self.stop else []
        return transformers().StoppingCriteriaList(stops)


class Draw:
    """Sampling by the Gumbel-max trick, with noise that depends only on (seed, question id, step).

    A question therefore gets the same answer in any batch, and after an interruption.
    """

    def __init__(self, seed: int, ids: Sequence[str], device: torch.device) -> None:
        self._generators = [
            torch.Generator(device).manual_seed(
                int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest())
            )
            for name in ids
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log_().to(scores.dtype)


class StopAt:
    """Stops a row as soon as its generated text contains one of the strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], prompt: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt = prompt
        # A token has at least one byte; a few more for characters that are cut.
        self._tail = max(len(mark.encode()) for mark in stop) + 4

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        tails = input_ids[:, max(self._prompt, input_ids.shape[1] - self._tail) :]
        texts = self._tokenizer.batch_decode(as_lists(tails), skip_special_tokens=True)
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=input_ids.device)


@dataclass(frozen=True)
class Answer:
    """The generated answer to one prompt: `ids` up to the token that ended it; the first `length` are the answer."""

    ids: list[int]
    length: int
    text: str  # of the answer
    whole_text: str  # all generated text
    finish: str  # eos, stop or length


def cut_answer(tokenizer: Tokenizer, generated: Sequence[int], *, eos: set[int], stop: Sequence[str]) -> Answer:
    """Cut at the end of the answer: the end-of-text token, a stop string, or the maximum length."""
    ids = list(generated)  # padding only follows an end-of-text token or a stop string, and is cut with it
    end = next((index for index, token in enumerate(ids) if token in eos), None)
    length, finish = (len(ids), "length") if end is None else (end, "eos")
    ids = ids[: length + (end is not None)]
    text = _text(tokenizer, ids[:length])
    if any(mark in text for mark in stop):
        texts = [_text(tokenizer, ids[: count + 1]) for count in range(length)]
        whole = next(count for count, begin in enumerate(texts, 1) if any(mark in begin for mark in stop))
        text = texts[whole - 1]
        cut = min(found for found in map(text.find, stop) if found >= 0)
        length = sum(len(begin) <= cut for begin in texts[:whole])
        return Answer(ids[:whole], length, text[:cut].strip(), text, "stop")
    return Answer(ids, length, text.strip(), text, finish)


def as_lists(ids: torch.Tensor) -> list[list[int]]:
    return ids.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)
