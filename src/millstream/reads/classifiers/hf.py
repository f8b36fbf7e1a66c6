"""`hf`: a pretrained Hugging Face model, frozen or with LoRA adapters, as a read classifier."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from millstream.core.config import first_few, parse_bytes
from millstream.core.console import format_bytes
from millstream.errors import BadSetting, MissingExtra
from millstream.reads.classifiers.nets import TokenNet, mean_over_tokens, seen_tokens
from millstream.reads.kind import ReadSettings
from millstream.training.task import Batch

# B batch, T tokens, W width

LIBRARIES = ("transformers", "peft")
UNUSED = ("pooler", "contact_head")  # parts of encoders that the last hidden states do not depend on


class Pretrained(TokenNet):
    """A Hugging Face model, frozen or with LoRA adapters, and a linear head over the mean of its last hidden states.

    Only trained weights are parameters of this net, so checkpoints contain the head and the adapters, not the model.
    """

    lr = 1e-3
    at_most = 64

    def __init__(self, name: str, *, num_classes: int, lora: int, dropout: float, dtype: torch.dtype | None) -> None:
        model = _load(name, lora, dtype)
        super().__init__(int(model.config.hidden_size), num_classes)
        self._held = (model,)  # not a submodule
        self._most_tokens = _most_tokens(model)
        self.adapters = nn.ParameterList([weight for weight in model.parameters() if weight.requires_grad])
        self.is_frozen = not len(self.adapters)
        self.head = nn.Sequential(nn.LayerNorm(self.width), nn.Dropout(dropout), nn.Linear(self.width, num_classes))

    def logits(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        (model,) = self._held
        ids_BT, seen_BT = (found[:, : self._most_tokens] for found in seen_tokens(batch))  # longer reads are truncated
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            found = model(input_ids=ids_BT, attention_mask=seen_BT.long())
        return self.head(mean_over_tokens(cast(Tensor, found.last_hidden_state).float(), seen_BT)), {}

    def num_rows(self, batch: Batch) -> int:
        return 8 * batch["input_ids"].numel()

    def train(self, mode: bool = True) -> Self:
        self._held[0].train(mode and not self.is_frozen)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._held[0]._apply(fn)  # moves the model along with this net
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]


def pretrained(settings: ReadSettings, num_classes: int) -> Pretrained:
    """The net of these settings."""
    assert settings.hf is not None
    return Pretrained(
        settings.hf, num_classes=num_classes, lora=settings.lora, dropout=settings.dropout, dtype=_dtype(settings)
    )


def check_memory(settings: ReadSettings) -> None:
    """Raise BadSetting if the weights take more than half of the memory budget. On a GPU they take none of it."""
    if not _is_on_cpu(settings):
        return
    assert settings.hf is not None
    with _loading(settings.hf) as hf:
        config = hf.AutoConfig.from_pretrained(settings.hf, trust_remote_code=False)
        with torch.device("meta"):
            model = hf.AutoModel.from_config(config, dtype=_dtype(settings))
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    if 2 * num_bytes > parse_bytes(settings.memory):
        raise BadSetting(
            f"hf={settings.hf}: its weights take {format_bytes(num_bytes)}. Set at least "
            f"memory={format_bytes(2 * num_bytes).replace(' ', '')}, or train on a GPU"
        )


def _is_on_cpu(settings: ReadSettings) -> bool:
    return settings.accelerator == "cpu" or not torch.cuda.is_available()


def _dtype(settings: ReadSettings) -> torch.dtype | None:
    """float32 on a CPU, where 16-bit numbers are slower; None, as stored, on a GPU."""
    return torch.float32 if _is_on_cpu(settings) else None


@contextmanager
def _loading(name: str) -> Generator[Any]:
    """The library transformers; what it raises becomes one line."""
    try:
        import transformers
        from safetensors import SafetensorError
    except ImportError:
        raise MissingExtra("model=hf needs transformers: pip install 'millstream[llm]'") from None
    logging = cast(Any, transformers).utils.logging
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of weights that `_load` checks
    try:
        yield cast(Any, transformers)
    except (OSError, ValueError, SafetensorError) as error:  # the last: cut off or damaged
        if "trust_remote_code" in str(error):
            raise _needs_code(name, "its config.json says so") from None
        reason = str(error).strip().partition("\n")[0]
        raise BadSetting(f"hf={name}: transformers cannot load it with safetensors ({reason})") from None
    finally:
        logging.set_verbosity(level)


def _needs_code(name: str, reason: str) -> BadSetting:
    return BadSetting(
        f"hf={name}: comes with Python code of its own ({reason}), which is not run. Use a model that transformers has"
    )


def _load(name: str, lora: int, dtype: torch.dtype | None) -> Any:
    with _loading(name) as hf:
        model, found = hf.AutoModel.from_pretrained(
            name,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # A checkpoint of other code with the name of a known architecture: transformers would start with random weights.
    missing = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    missing = sorted(key for key in missing if not _is_unused(key))
    if missing:
        raise _needs_code(name, f"it lacks weights of {type(model).__name__}: {first_few(missing)}")
    for weight in model.parameters():
        weight.requires_grad = False
    if not lora:
        return model
    try:
        from peft import (
            LoraConfig,  # pyright: ignore
            get_peft_model,  # pyright: ignore
        )
    except ImportError:
        raise MissingExtra("lora= needs peft: pip install 'millstream[lora]'") from None
    named = cast("list[tuple[str, nn.Module]]", list(model.named_modules()))
    unused = [path for path, module in named if isinstance(module, nn.Linear) and _is_unused(path)]
    adapted = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", exclude_modules=unused or None)
    return get_peft_model(model, adapted)


def _is_unused(key: str) -> bool:
    return any(part in UNUSED for part in key.split("."))


def _most_tokens(model: Any) -> int | None:
    """The most tokens that it has positions for: some models count positions from after that of padding."""
    for path, module in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return getattr(model.config, "max_position_embeddings", None)
