"""Hugging Face tokenizer files: the same tokens as the Rust library, with our own encoder or with the Rust one."""

import json
import pickle
import string
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import BadSource, MissingExtra
from millstream.reads.tokenizers import HfTokenizer, hf, tokenizer
from millstream.reads.tokenizers.bpe import plain_rules
from support.batches import METAGENE, genome_reads, needs_data, pack, random_reads
from support.effort import num_examples

tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["[PAD]", "[UNK]", "[BOS]", "[EOS]"]
odd_reads = st.lists(
    st.one_of(
        st.text(alphabet="AC", max_size=60),
        st.text(alphabet="ACGT", max_size=60),
        st.text(alphabet="ACGTNacgtnRYXU", max_size=30),
        st.text(alphabet=string.ascii_letters, max_size=20),
        st.builds(
            lambda unit, times: unit * times, st.text(alphabet="ACGTN", min_size=1, max_size=5), st.integers(0, 30)
        ),
    ),
    max_size=5,
)


@cache
def trained(vocab_size: int, *, template: bool = True, unk: bool = True, fuse: bool = False) -> str:
    """The tokenizer.json of a small tokenizer trained on random DNA."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE(unk_token="[UNK]" if unk else None, fuse_unk=fuse))
    model.pre_tokenizer = pre_tokenizers.Whitespace() if template else None
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False)
    model.train_from_iterator(random_reads(60, length=120, seed=vocab_size, letters="ACGTN"), trainer)
    if template:
        specials = [(name, SPECIAL.index(name)) for name in ("[BOS]", "[EOS]")]
        model.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=specials)
    return model.to_str()


def changed(text: str, **parts: Any) -> str:
    """The file with other parts; `model` is merged into the existing one."""
    file = json.loads(text)
    parts["model"] = file["model"] | parts.get("model", {})
    return json.dumps(file | parts)


def check(text: str, reads: Sequence[str], *, fast: bool = True, max_length: int | None = None, **options: Any) -> None:
    """Ids, mask and padding are those of the Rust library."""
    ours = HfTokenizer(text, name="hf(test)", **options)
    assert bool(ours.why) != fast, ours.why
    rust = tokenizers.Tokenizer.from_str(text)
    if max_length is not None:
        rust.enable_truncation(max_length)
    expected = [encoding.ids for encoding in rust.encode_batch(list(reads))]
    ids, mask = ours.tokenize(*pack(reads), max_length=max_length)
    assert ids.shape == (len(reads), max(map(len, expected), default=0))
    assert [row[keep == 1].tolist() for row, keep in zip(ids, mask, strict=True)] == expected
    assert (ids[mask == 0] == ours.pad_id).all() and (np.diff(mask, axis=1) <= 0).all()


# -- the same tokens as the Rust library


@given(st.sampled_from([8, 12, 20, 40, 100, 400]), odd_reads, st.sampled_from([None, 2, 3, 7, 40]))
@settings(max_examples=num_examples(300))
def test_trained_tokenizers_give_the_tokens_of_the_rust_library(size: int, reads: list[str], max_length: int | None):
    check(trained(size), reads, max_length=max_length)


@given(st.sampled_from([20, 100]), odd_reads, st.booleans(), st.booleans())
def test_unknown_bases_are_dropped_kept_or_fused_as_in_the_rust_library(
    size: int, reads: list[str], unk: bool, fuse: bool
):
    check(trained(size, template=False, unk=unk, fuse=fuse), reads)


@given(st.data(), st.lists(st.text(alphabet="AC", max_size=40), min_size=1, max_size=4))
@settings(max_examples=num_examples(300))
def test_any_list_of_merges_in_any_order_gives_the_tokens_of_the_rust_library(data: st.DataObject, reads: list[str]):
    """Training gives tidy lists; these form a token in two ways, too late, or from parts that never occur."""
    words = [
        "".join(word) for size in range(1, 6) for word in np.ndindex(*(2,) * size) for word in [["AC"[i] for i in word]]
    ]
    splits = [(word[:cut], word[cut:]) for word in words for cut in range(1, len(word))]
    merges = data.draw(st.lists(st.sampled_from(splits), max_size=25))
    vocab = {word: number for number, word in enumerate(words)}
    check(
        changed(trained(8, template=False, unk=False), added_tokens=[], model={"vocab": vocab, "merges": merges}), reads
    )


@given(odd_reads, st.sampled_from(["_", "A", "X", "é", "7"]), st.booleans(), st.sampled_from([None, 2, 5]))
def test_a_prefix_is_merged_as_in_the_rust_library(
    reads: list[str], prefix: str, by_regex: bool, max_length: int | None
):
    if by_regex:
        normalizer = {"type": "Replace", "pattern": {"Regex": "^"}, "content": prefix}
    else:
        normalizer = {"type": "Prepend", "prepend": prefix}
    model = json.loads(trained(40))["model"]
    vocab = model["vocab"] | {"_": 40, "_A": 41, "_AC": 42}
    merges = [["_", "A"], *model["merges"], ["_A", "C"]]
    text = changed(trained(40), normalizer=normalizer, model={"vocab": vocab, "merges": merges})
    check(text, reads, fast=prefix != "é", max_length=max_length)


@given(st.lists(st.text(alphabet=string.printable + "\x00\x1c\x1f\x7f", max_size=20), max_size=4))
def test_any_ascii_text_gives_the_tokens_of_the_rust_library(reads: list[str]):
    check(trained(40), reads)
    check(trained(40), [read + "[EOS]AC GT[MASK]" for read in reads])


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "C"}, "behavior": "Isolated", "invert": False}},
        {"model": {"ignore_merges": True}},
        {"model": {"byte_fallback": True}},
        {"model": {"unk_token": "N"}},
        {"model": {"continuing_subword_prefix": "T"}},
        {"post_processor": {"type": "BertProcessing", "sep": ["[EOS]", 3], "cls": ["[BOS]", 2]}},
        {
            "added_tokens": [
                {"id": 99, "content": "GAC", "special": False, "normalized": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            ]
        },
    ],
    ids=lambda parts: json.dumps(parts)[:40],
)
def test_files_with_more_than_plain_merges_use_the_rust_encoder(parts: dict[str, Any]):
    text = changed(trained(40), **parts)
    if "continuing_subword_prefix" in json.dumps(parts):
        text = changed(text, model={"merges": []})
    check(text, random_reads(20, length=50, seed=1, letters="ACGTNa"), fast=False, max_length=20)


def test_a_vocabulary_too_large_for_the_table_of_pairs_uses_the_rust_encoder():
    check(trained(40), ["ACGTACGT"], fast=False, most_tokens=20)


def test_models_other_than_bpe_use_the_rust_encoder():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"ACGT": 0, "[UNK]": 1}, unk_token="[UNK]"))
    check(words.to_str(), ["ACGT", "A", ""], fast=False)


def test_a_vocabulary_that_does_not_fit_dna_is_reported_with_the_share_of_unknown_tokens(tmp_path: Path, capfd):
    models = tokenizers.models
    kmers = {"".join(kmer): number for number, kmer in enumerate(product("ACGT", repeat=3), 1)}
    for name, model in (
        ("words", models.WordPiece({"[UNK]": 0, **kmers}, unk_token="[UNK]")),
        ("lower", models.BPE({"[UNK]": 0, "a": 1, "c": 2, "g": 3, "t": 4}, [], unk_token="[UNK]")),
        ("dropped", models.BPE({"a": 1}, [])),
    ):
        tokenizers.Tokenizer(model).save(str(tmp_path / f"{name}.json"))
        assert hf(tmp_path / f"{name}.json").unknown_share() == 1
        assert f"{tmp_path / name}.json: warning: 100%" in capfd.readouterr().err
    (tmp_path / "fits.json").write_text(trained(40))
    assert hf(tmp_path / "fits.json").unknown_share() == 0
    assert not capfd.readouterr().err


def test_truncation_and_padding_of_the_file_are_ignored():
    padding = {"strategy": {"Fixed": 50}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 3}
    padding |= {"pad_type_id": 0, "pad_token": "[EOS]"}
    truncation = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    for parts in ({}, {"model": {"ignore_merges": True}}):
        ours = HfTokenizer(changed(trained(40), padding=padding, truncation=truncation, **parts), name="hf(test)")
        same = HfTokenizer(trained(40), name="hf(test)")
        batch = pack(["ACGTACGGTTACG", "A"])
        assert ours.pad_id == 3 and same.pad_id == 0
        a, b = ours.tokenize(*batch), same.tokenize(*batch)
        assert (a.attention_mask == b.attention_mask).all()
        assert (np.where(a.attention_mask, a.input_ids, 0) == b.input_ids).all()


def test_rows_have_the_given_length_and_dtype():
    ours = HfTokenizer(trained(40), name="hf(test)")
    tokens = ours.tokenize(*pack(["ACGT", ""]), max_length=30, pad="max_length", dtype=np.int64)
    assert tokens.input_ids.shape == (2, 30) and tokens.input_ids.dtype == tokens.attention_mask.dtype == np.int64
    assert ours.tokenize(*pack([])).input_ids.shape == (0, 0)
    with pytest.raises(ValueError, match=r"max_length=1: .* 2 "):
        ours.tokenize(*pack(["ACGT"]), max_length=1)


def test_offsets_may_start_in_the_middle_of_a_larger_batch():
    flat, offsets = pack(random_reads(5, length=40, seed=0))
    for text in (trained(40), changed(trained(40), model={"ignore_merges": True})):
        ours = HfTokenizer(text, name="hf(test)")
        whole, part = ours.tokenize(flat, offsets), ours.tokenize(flat, offsets[2:5])
        assert (part.input_ids == whole.input_ids[2:4, : part.input_ids.shape[1]]).all()


# -- METAGENE-1


@needs_data
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_serve.json"])
@pytest.mark.parametrize("max_length", [None, 20, 512])
def test_metagene_gives_the_tokens_of_the_rust_library(file: str, max_length: int | None):
    rng = np.random.default_rng(0)
    reads = (METAGENE / "sample_reads.csv").read_text().split()
    assert len(reads) == 32
    reads += genome_reads(1500, length=125) + genome_reads(3, length=20_000)
    reads += [read[:50] + "N" * (i % 40) + read[50:] for i, read in enumerate(reads[:200])]
    reads += [read.lower() if i % 2 else read.capitalize() for i, read in enumerate(reads[:100])]
    reads += ["".join(rng.choice(list("ACGTRYSWKMBDHVNU"), 80)) for _ in range(100)]
    reads += ["", *string.ascii_letters, "N" * 200, *(unit * 300 for unit in ("A", "C", "G", "T", "AC", "TTA"))]
    check((METAGENE / file).read_text(), reads, max_length=max_length)
    printable = ["".join(rng.choice(list(string.printable), 60)) for _ in range(200)]
    check((METAGENE / file).read_text(), ["", " ", "_", "A[EOS]C", "[MASK]", *printable], max_length=max_length)


@needs_data
def test_the_older_minbpe_model_is_not_a_tokenizer_json():
    with pytest.raises(BadSource, match=r"large-mgfm-1024\.model"):
        hf(METAGENE / "large-mgfm-1024.model")


@needs_data
def test_metagene_has_the_ids_its_model_expects():
    ours = hf(METAGENE)
    assert (ours.vocab_size, ours.pad_id, ours.num_special) == (1024, 0, 2)


# -- threads and pickles


def test_threads_can_share_a_tokenizer_with_an_empty_cache():
    batches = [pack(random_reads(40, length=80, seed=seed)) for seed in range(12)]
    expected = [HfTokenizer(trained(100), name="hf(test)").tokenize(*batch).input_ids for batch in batches]
    shared = HfTokenizer(trained(100), name="hf(test)")
    with ThreadPoolExecutor(4) as pool:
        for ids, tokens in zip(expected, pool.map(lambda batch: shared.tokenize(*batch), batches), strict=True):
            assert (ids == tokens.input_ids).all()


def test_a_pickled_tokenizer_contains_its_file(tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    file.write_text(trained(40))
    ours = hf(file)
    batch = pack(random_reads(9, length=70, seed=5))
    before = ours.tokenize(*batch).input_ids
    packed = pickle.dumps(ours)
    assert len(packed) < len(trained(40)) + 500
    file.unlink()
    again = pickle.loads(packed)
    assert again.name == ours.name and (again.tokenize(*batch).input_ids == before).all()


# -- finding the file


def test_a_file_a_folder_and_a_name_are_the_same_tokenizer(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(trained(40))
    batch = pack(["ACGTACGTTT"])
    expected = hf(tmp_path / "tokenizer.json").tokenize(*batch).input_ids
    for ours in (hf(tmp_path), tokenizer(f"hf({tmp_path})"), tokenizer(f"hf('{tmp_path}/tokenizer.json')")):
        assert (ours.tokenize(*batch).input_ids == expected).all()
        assert tokenizer(ours.name).name == ours.name


def test_a_hub_name_is_looked_up_in_the_local_cache_only(tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    model, commit = tmp_path / "models--a--b", "0123abcd"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "tokenizer.json").write_text(trained(40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert hf("a/b", cache_dir=tmp_path).vocab_size == 40
    with pytest.raises(BadSource, match="a/c"):
        hf("a/c", cache_dir=tmp_path)


def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(BadSource, match=str(tmp_path)):
        hf(tmp_path)
    with pytest.raises(BadSource, match="absent"):
        hf(tmp_path / "absent")
    for content in ("", "{}", "[1]", '{"model": 3}', "\xff"):
        (tmp_path / "x.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(BadSource, match=r"x\.json"):
            hf(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(changed(trained(8), model={"type": "Odd"}))
    with pytest.raises(BadSource, match=r"x\.json.*'tokenizers'"):
        hf(tmp_path / "x.json")


def test_bytes_that_are_not_text_are_refused():
    with pytest.raises(BadSource, match="0xff"):
        HfTokenizer(trained(40), name="hf(test)").tokenize(*pack(["ACG\xff"]))


def test_a_missing_package_names_its_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[reads\]'"):
        HfTokenizer(trained(8), name="hf(test)")


def test_the_rules_of_a_plain_file_are_found():
    rules = plain_rules(json.loads(trained(40)))
    assert (rules.head, rules.tail, rules.unk, rules.prefix) == ((2,), (3,), "[UNK]", "")
