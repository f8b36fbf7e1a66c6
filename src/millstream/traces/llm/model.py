"""A causal language model by name or path, with its tokenizer."""

import hashlib
import mmap
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
from millstream.traces.llm.capture import Padded, register_attention
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

    def padded(self, prompts: Sequence[Sequence[int]]) -> Padded:
        """Prompts padded on the left, on the device of the model."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad)
        mask = torch.zeros((len(prompts), width), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        return Padded(ids.to(self.device), mask.to(self.device), width)


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
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise BadSource(f"model={settings.model}: has no attention heads. Use a model with layers of attention")
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
    read_weights(model)
    eos = _ids(model.generation_config.eos_token_id) | _ids(card.tokenizer.eos_token_id)
    model.generation_config = hf.GenerationConfig()  # generate() would take what we leave out from the model's own
    layers = _decoder_layers(model, card.size.layers, settings.model)
    pad = card.tokenizer.pad_token_id
    pad = pad if pad is not None else min(eos, default=0)
    return LoadedModel(model, card, model.base_model, layers, frozenset(eos), pad)


def read_weights(model: nn.Module) -> None:
    """Have all weights in memory. They are mapped files: until they are used, they do not count as memory in use.

    A budget on top of the model was 0.5 GB too small for one of 0.5 GB.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu":
            weight.detach().flatten().view(torch.uint8)[:: mmap.PAGESIZE].sum()  # not every type has a sum


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
