"""A causal language model by name or path, ready to be looked into."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from millstream.errors import BadSetting, BadSource, MissingExtra
from millstream.source.llm.fields import Size
from millstream.source.llm.library import transformers
from millstream.source.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn

BUILT_IN = ("facts", "smollm2")


@dataclass(frozen=True)
class ModelSettings:
    """Which model, in which numbers, where."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    quantize: str | None = None  # 8bit or 4bit, by bitsandbytes


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model without its weights."""

    place: str
    tokenizer: Tokenizer
    size: Size
    context: int | None  # tokens it can take
    revision: str
    dtype: str


@dataclass(frozen=True)
class LoadedModel:
    """Model and tokenizer, and where in the model its layers are."""

    model: Any  # a transformers model: its types are partly unknown
    card: ModelCard
    base: "nn.Module"  # gives the state after the last norm
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
    """A model by Hugging Face name or path, or one of the built-in ones (made when it is not there yet)."""
    hf = transformers()
    transformers("utils.logging").disable_progress_bar()
    _quantized(settings.quantize)  # a wrong setting is said before anything is loaded
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
    from millstream.source.llm import attention

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
    model.generation_config = hf.GenerationConfig()  # generate() would fill in what ours leaves open
    layers = _decoder_layers(model, card.size.layers, settings.model)
    pad = card.tokenizer.pad_token_id
    pad = pad if pad is not None else min(eos, default=0)
    return LoadedModel(model, card, model.base_model, layers, frozenset(eos), pad)


def find_model(name: str, *, notify: Callable[[str], None]) -> str:
    """The folder of a built-in model, made when it is not there yet; any other name as it is."""
    if name == "facts":
        from millstream.source.llm.facts import facts_model

        return str(facts_model(notify=notify))
    if name == "smollm2":
        from millstream.source.llm.smollm2 import smollm2_model

        return str(smollm2_model(notify=notify))
    return name


def _not_loaded(settings: ModelSettings, error: Exception) -> BadSource:
    reason = " ".join(str(error).split())[:300]
    return BadSource(
        f"model={settings.model}: cannot be loaded ({reason}). Give the folder of a causal language model, its name on "
        f"the Hugging Face hub when online, or {' or '.join(BUILT_IN)}"
    )


def _dtype(settings: ModelSettings) -> str:
    names = ("float32", "float16", "bfloat16")
    if settings.dtype not in ("auto", *names):
        raise BadSetting(f"dtype={settings.dtype}: there is auto, {', '.join(names)}")
    on_cpu = settings.dtype == "auto" and _device(settings.device) == "cpu" and settings.device_map is None
    return "float32" if on_cpu else settings.dtype  # a CPU is slower in halves


def _device(name: str) -> str:
    import torch

    if name != "auto":
        try:
            kind = torch.device(name).type
        except RuntimeError:
            raise BadSetting(f"device={name}: there is auto, cpu, cuda, cuda:1, mps") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise BadSetting(f"device={name}: torch finds no CUDA device here; use device=cpu")
        return name
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _quantized(bits: str | None) -> dict[str, Any]:
    if bits is None:
        return {}
    if bits not in ("8bit", "4bit"):
        raise BadSetting(f"quantize={bits}: there is 8bit and 4bit")
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
    """The list of layers, which is the outermost one of that length."""
    from torch import nn

    lists: list[tuple[int, Iterable[nn.Module]]] = [
        (path.count("."), cast("Iterable[nn.Module]", module))
        for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise BadSource(f"model={name}: no list of {count} layers was found in it, so they cannot be looked into")
    return list(min(lists, key=lambda found: found[0])[1])


def _revision(place: str, config: object) -> str:
    """The hub's commit; for a folder, a fingerprint of what it holds."""
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
