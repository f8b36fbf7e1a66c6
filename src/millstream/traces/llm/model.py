"""A causal language model by name or path, with its tokenizer, ready to be traced."""

import hashlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from millstream.core.registry import extensions
from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.traces.llm.fields import Size

if TYPE_CHECKING:
    import torch
    from torch import nn

    from millstream.traces.llm.questions import Question


def transformers(part: str = "") -> Any:
    """The transformers library, or one of its modules."""
    try:
        return import_module(f"transformers.{part}" if part else "transformers")
    except ImportError:
        raise MissingExtra("language models need transformers: pip install 'millstream[llm]'") from None


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
    """Returns the folder of a model, which is made first if it does not exist."""

    def __call__(self, *, notify: Callable[[str], None]) -> Path: ...


def built_in_questions() -> Mapping[str, "Callable[[], Sequence[Question]] | Path"]:
    """Question sets by name: a function that returns the questions, or a file of them."""
    return ChainMap(*(module.QUESTIONS for module in extensions("built_ins")))


def built_in_models() -> Mapping[str, MakeModel]:
    return ChainMap(*(module.MODELS for module in extensions("built_ins")))


def built_in_prompts() -> Mapping[str, str]:
    """Prompts by name, each with a `{question}`; the default of the model of the same name."""
    return ChainMap(*(module.PROMPTS for module in extensions("built_ins")))


@dataclass(frozen=True)
class ModelSettings:
    """Which model to load, in which number format, on which device."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    quantize: str | None = None  # 8bit or 4bit, by bitsandbytes


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model without loading its weights."""

    place: str
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
    base: "nn.Module"  # its output is the state after the last norm
    layers: "list[nn.Module]"
    eos: frozenset[int]
    pad: int

    @property
    def tokenizer(self) -> Tokenizer:
        return self.card.tokenizer

    @property
    def device(self) -> "torch.device":
        return self.model.get_input_embeddings().weight.device


def describe_model(settings: ModelSettings, *, notify: Callable[[str], None]) -> ModelCard:
    """A model by Hugging Face name or path, or one of the built-in ones (made if missing)."""
    hf = transformers()
    transformers("utils.logging").disable_progress_bar()
    _quantized(settings.quantize)  # reports a bad setting before anything is loaded
    place = find_model(settings.model, notify=notify)
    dtype = _dtype(settings)
    try:
        config = hf.AutoConfig.from_pretrained(place, revision=settings.revision)
        tokenizer = hf.AutoTokenizer.from_pretrained(place, revision=settings.revision)
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
    return ModelCard(place, tokenizer, size, context, _revision(place, config), dtype)


def load_model(settings: ModelSettings, card: ModelCard) -> LoadedModel:
    """The model itself, on its device."""
    from millstream.traces.llm import capture as attention

    hf = transformers()
    device = _device(settings.device)
    options: dict[str, Any] = {"dtype": card.dtype, "revision": settings.revision, **_quantized(settings.quantize)}
    device_map = settings.device_map or (device if settings.quantize else None)
    try:
        model = hf.AutoModelForCausalLM.from_pretrained(
            card.place, attn_implementation=attention.register(), device_map=device_map, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(settings, error) from None
    if device_map is None:
        model.to(device)
    model.eval()
    eos = _ids(model.generation_config.eos_token_id) | _ids(card.tokenizer.eos_token_id)
    model.generation_config = (
        hf.GenerationConfig()
    )  # generate() would use the defaults of the model for what we leave out
    layers = _decoder_layers(model, card.size.layers, settings.model)
    pad = card.tokenizer.pad_token_id
    pad = pad if pad is not None else min(eos, default=0)
    return LoadedModel(model, card, model.base_model, layers, frozenset(eos), pad)


def find_model(name: str, *, notify: Callable[[str], None]) -> str:
    """The folder of a built-in model, made if missing; any other name unchanged."""
    make = built_in_models().get(name)
    return name if make is None else str(make(notify=notify))


def _not_loaded(settings: ModelSettings, error: Exception) -> BadSource:
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
    import torch

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
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is None:
        raise MissingExtra(f"quantize={bits} needs bitsandbytes: pip install bitsandbytes")
    return {
        "quantization_config": transformers().BitsAndBytesConfig(
            load_in_8bit=bits == "8bit", load_in_4bit=bits == "4bit"
        )
    }


def _ids(value: object) -> set[int]:
    return {value} if isinstance(value, int) else set(cast("Iterable[int]", value or ()))


def _decoder_layers(model: "nn.Module", count: int, name: str) -> "list[nn.Module]":
    """The list of layers: the outermost module list of that length."""
    from torch import nn

    lists: list[tuple[int, Iterable[nn.Module]]] = [
        (path.count("."), cast("Iterable[nn.Module]", module))
        for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise BadSource(f"model={name}: found no list of {count} layers, so they cannot be traced")
    return list(min(lists, key=lambda found: found[0])[1])


def _revision(place: str, config: object) -> str:
    """The commit on the hub; for a folder, a fingerprint of its files."""
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(place).glob("*")):
        if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(1 << 20))
                stream.seek(max(0, file.stat().st_size - (1 << 20)))
                digest.update(stream.read())
    return digest.hexdigest()
