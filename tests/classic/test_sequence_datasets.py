"""The datasets and the tokenizer of the old streaming guide: its scripts run, and what it promises holds."""

import copy
import gzip
import os
import pickle
import random
import re
import types
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import millstream as ms
from millstream.classic import CachedStreamingDataset, MetaGeneTokenizer, SequenceDataset, StreamingSequenceDataset
from millstream.classic.read_items import Item
from millstream.classic.sequence_datasets import ReadDataset
from millstream.errors import BadSetting, BadSource, StaleIndex

METAGENE = Path(__file__).parents[2] / ".." / "shared" / "data" / "metagene"
needs_metagene = pytest.mark.skipif(not METAGENE.is_dir(), reason=f"the METAGENE-1 tokenizer is not at {METAGENE}")

# The guide's.
REGEX = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
CLASSES = {7: "Escherichia coli", 11: "Homo sapiens", 300: "Bacillus subtilis"}
NUM_READS, MAX_LENGTH, NO_TAX = 60, 32, 13
ALL = [SequenceDataset, StreamingSequenceDataset, CachedStreamingDataset]

# Warnings of torch about more workers than cores and pinned memory without a GPU, and of Python 3.12 about any fork.
quiet_loader = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.*pin_memory", "ignore:This process .* is multi-threaded"
)


@cache
def reads() -> list[tuple[int, int | None, str]]:
    """Class id, tax id (which tells reads apart) and sequence."""
    rng = random.Random(0)
    lengths = [0, 1, 5, *(rng.randrange(10, 90) for _ in range(NUM_READS - 3))]
    return [
        (
            rng.choice(list(CLASSES)),
            None if number == NO_TAX else 1000 + number,
            "".join(rng.choices("ACGTN", k=length)),
        )
        for number, length in enumerate(lengths)
    ]


def fasta(extra: str = "") -> str:
    records = [
        f">lbl|{class_id}|{'' if tax_id is None else tax_id}|{len(sequence)}|r{number}/1\n{sequence}\n"
        for number, (class_id, tax_id, sequence) in enumerate(reads())
    ]
    return "".join(records) + extra


@cache
def trained() -> str:
    """The tokenizer.json of a small byte-pair encoding."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package 'tokenizers' is in millstream[reads]")
    from tokenizers import models, pre_tokenizers, processors, trainers

    model = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    model.train_from_iterator([sequence for _, _, sequence in reads()], trainer)
    model.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    return model.to_str()


class Frame:
    """The part of a pandas.DataFrame that is used: these tests run without pandas."""

    def __init__(self, path: str | Path, sep: str) -> None:
        head, *rows = [line.split(sep) for line in Path(path).read_text().splitlines()]
        self.columns: Sequence[str] = head
        self.data = {name: [row[place] for row in rows] for place, name in enumerate(head)}
        self.data["class_id"] = [int(value) for value in self.data["class_id"]]  # type: ignore[assignment]

    def to_dict(self, orient: str) -> Mapping[str, Sequence[object]]:
        assert orient == "list"
        return self.data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with reads, mapping, configuration and tokenizer, as the guide's scripts expect."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.fa", "val.fa"):
        Path(name).write_text(fasta())
        Path(f"{name}.gz").write_bytes(gzip.compress(fasta().encode()))
    rows = [f"{name}\t{class_id}\n" for class_id, name in reversed(CLASSES.items())]
    Path("species_mapping_converted.tsv").write_text("species\tclass_id\n" + "".join(rows))
    Path("configs").mkdir()
    Path("configs/rtx4090_optimized.yaml").write_text(
        f"data:\n  header_regex: '{REGEX}'\ntokenizer:\n  max_length: {MAX_LENGTH}\ntraining:\n  batch_size: 7\n"
    )
    Path("METAGENE-1").mkdir()
    Path("METAGENE-1/tokenizer.json").write_text(trained())
    return tmp_path


def make(kind: type[ReadDataset] = StreamingSequenceDataset, path: str = "train.fa", **changed: object) -> ReadDataset:
    settings: dict[str, object] = {
        "mapping_df": "species_mapping_converted.tsv",
        "tokenizer": "base",
        "header_regex": REGEX,
        "max_length": MAX_LENGTH,
    }
    return kind(fasta_path=path, **(settings | changed))  # type: ignore[arg-type]


def plain(item: Mapping[str, torch.Tensor | int]) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in item.items()}


def expected(number: int, tokenizer: MetaGeneTokenizer) -> dict[str, object]:
    class_id, tax_id, sequence = reads()[number]
    tokens = tokenizer(sequence, max_length=MAX_LENGTH, padding="max_length", truncation=True)
    labels = sorted(CLASSES).index(class_id)
    return {**tokens, "labels": labels, "class_id": class_id, "tax_id": -1 if tax_id is None else tax_id}


# -- the scripts of the guide; only imports and paths differ

QUICK_START = """
from millstream.classic import CachedStreamingDataset

# Create streaming dataset
train_dataset = CachedStreamingDataset(
    fasta_path="train.fa",
    mapping_df=mapping_df,
    tokenizer=tokenizer,
    header_regex=header_regex,
    max_length=128,
    cache_index=True,          # Cache index for reuse
    cache_size=10000           # Cache 10K sequences in RAM
)

# Use with DataLoader (same as before)
train_loader = DataLoader(
    train_dataset,
    batch_size=1,
    shuffle=True,              # Works with streaming!
    num_workers=2              # Parallel loading
)
"""

OPTION_1 = r"""
from millstream.classic import StreamingSequenceDataset

dataset = StreamingSequenceDataset(
    fasta_path="train.fa",
    mapping_df=mapping_df,
    tokenizer=tokenizer,
    header_regex=r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$",
    max_length=128,
    cache_index=True          # Index cached to .index.pkl file
)
"""

OPTION_2 = r"""
from millstream.classic import CachedStreamingDataset

dataset = CachedStreamingDataset(
    fasta_path="train.fa",
    mapping_df=mapping_df,
    tokenizer=tokenizer,
    header_regex=r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$",
    max_length=128,
    cache_index=True,
    cache_size=10000          # Adjust based on available RAM
)
"""

FULL_SCRIPT = """
import yaml
import pandas as pd
from millstream.classic import CachedStreamingDataset
from millstream.classic import MetaGeneTokenizer
from torch.utils.data import DataLoader, default_collate

# Load config
with open("configs/rtx4090_optimized.yaml") as f:
    config = yaml.safe_load(f)

# Load mapping
mapping_df = pd.read_csv("species_mapping_converted.tsv", sep="\\t")

# Create tokenizer
tokenizer = MetaGeneTokenizer(
    tokenizer_path="METAGENE-1",
    use_hf_tokenizer=True
)

# Create streaming datasets
train_dataset = CachedStreamingDataset(
    fasta_path="train.fa",
    mapping_df=mapping_df,
    tokenizer=tokenizer,
    header_regex=config['data']['header_regex'],
    max_length=config['tokenizer']['max_length'],
    cache_index=True,
    cache_size=10000
)

val_dataset = CachedStreamingDataset(
    fasta_path="val.fa",
    mapping_df=mapping_df,
    tokenizer=tokenizer,
    header_regex=config['data']['header_regex'],
    max_length=config['tokenizer']['max_length'],
    cache_index=True,
    cache_size=2500
)

# Create data loaders
train_loader = DataLoader(
    train_dataset,
    batch_size=config['training']['batch_size'],
    shuffle=True,
    num_workers=4,
    prefetch_factor=2,
    pin_memory=True
)

val_loader = DataLoader(
    val_dataset,
    batch_size=config['training']['batch_size'],
    shuffle=False,
    num_workers=2,
    pin_memory=True
)
"""


def run(script: str, **names: object) -> dict[str, object]:
    scope: dict[str, object] = {"pd": types.SimpleNamespace(read_csv=Frame), **names}
    if find_spec("pandas") is None:
        script = script.replace("import pandas as pd\n", "")
    exec(compile(script, "guide", "exec"), scope)
    return scope


def tax_ids(loader: object) -> list[int]:
    return [number for batch in loader for number in batch["tax_id"].tolist()]  # type: ignore[attr-defined]


EVERY_TAX_ID = sorted(-1 if number == NO_TAX else 1000 + number for number in range(NUM_READS))


@quiet_loader
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_the_full_training_script_of_the_guide_runs(here: Path, ending: str):
    scope = run(FULL_SCRIPT.replace('.fa"', f'.fa{ending}"'))
    assert sorted(tax_ids(scope["train_loader"])) == EVERY_TAX_ID
    val = list(scope["val_loader"])  # type: ignore[call-overload]
    assert tax_ids(val) == [-1 if number == NO_TAX else 1000 + number for number in range(NUM_READS)]
    assert val[0]["input_ids"].shape == (7, MAX_LENGTH) and val[0]["labels"].shape == (7,)
    assert Path(f"train.fa{ending}.millstream").exists()


@quiet_loader
def test_the_quick_start_and_both_options_of_the_guide_run(here: Path):
    names = {
        "mapping_df": Frame("species_mapping_converted.tsv", sep="\t"),
        "tokenizer": MetaGeneTokenizer("METAGENE-1"),
        "header_regex": REGEX,
        "DataLoader": DataLoader,
    }
    assert sorted(tax_ids(run(QUICK_START, **names)["train_loader"])) == EVERY_TAX_ID
    one, two = (run(option, **names)["dataset"] for option in (OPTION_1, OPTION_2))
    assert isinstance(one, StreamingSequenceDataset) and isinstance(two, CachedStreamingDataset)
    assert list(map(plain, one)) == list(map(plain, two))  # type: ignore[arg-type]
    assert one[0]["input_ids"].shape == (128,)  # type: ignore[union-attr]


# -- items


@pytest.mark.parametrize("path", ["train.fa", "train.fa.gz"])
@pytest.mark.parametrize("kind", ALL)
def test_every_dataset_gives_the_tokens_of_the_sequence_and_the_label_of_the_class(
    here: Path, kind: type[ReadDataset], path: str
):
    tokenizer = MetaGeneTokenizer("METAGENE-1")
    dataset = make(kind, path, tokenizer=tokenizer)
    assert len(dataset) == NUM_READS and dataset.num_classes == len(CLASSES)
    wanted = [expected(number, tokenizer) for number in range(NUM_READS)]
    assert [plain(dataset[number]) for number in range(NUM_READS)] == wanted
    some = [5, NO_TAX, 0, 59, 5, -1]
    for _ in range(2):  # the second time from the cache, if there is one
        assert [plain(item) for item in dataset.__getitems__(some)] == [wanted[number] for number in some]


@pytest.mark.parametrize("kind", ALL)
def test_an_item_is_int64_tensors_and_plain_ids_that_the_default_collate_takes(here: Path, kind: type[ReadDataset]):
    item = make(kind)[3]
    assert list(item) == ["input_ids", "attention_mask", "labels", "class_id", "tax_id"]
    kinds = [value.dtype if isinstance(value, torch.Tensor) else type(value) for value in item.values()]
    assert kinds == [torch.int64, torch.int64, torch.int64, int, int]
    batch = next(iter(DataLoader(make(kind), batch_size=4)))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (4, MAX_LENGTH),
        "attention_mask": (4, MAX_LENGTH),
        "labels": (4,),
        "class_id": (4,),
        "tax_id": (4,),
    }


def test_the_items_that_a_collate_fn_gets_are_like_dicts(here: Path):
    dataset = make(StreamingSequenceDataset)
    (item,) = dataset.__getitems__([3])
    wanted = plain(dataset[3])
    for made in (item, {**item}, copy.copy(item), item.copy(), pickle.loads(pickle.dumps(item)), item | {}):
        assert list(made) == list(wanted) and plain(made) == wanted
    assert item.get("tax_id") == wanted["tax_id"] and (item | {"tax_id": 5})["tax_id"] == 5
    lists = DataLoader(dataset, batch_size=2, collate_fn=list)
    assert [plain(made) for made in next(iter(lists))] == [plain(dataset[0]), plain(dataset[1])]
    batch = default_collate(dataset.__getitems__([0, 1])[:])
    assert batch["labels"].tolist() == [int(dataset[number]["labels"]) for number in (0, 1)]


@pytest.mark.parametrize("kind", ALL)
def test_changing_an_item_in_place_changes_no_other(here: Path, kind: type[ReadDataset]):
    dataset = make(kind)
    before = plain(dataset[20])
    item = dataset[20]
    item["input_ids"].fill_(-5)  # type: ignore[union-attr]
    item["labels"].fill_(-5)  # type: ignore[union-attr]
    assert plain(dataset[20]) == before


@pytest.mark.parametrize("kind", ALL)
def test_an_index_out_of_range_is_an_index_error(here: Path, kind: type[ReadDataset]):
    dataset = make(kind)
    for wrong in (NUM_READS, -NUM_READS - 1):
        with pytest.raises(IndexError, match=f" {wrong} of {NUM_READS}"):
            dataset[wrong]
    assert len(list(dataset)) == NUM_READS  # type: ignore[call-overload]


@pytest.mark.parametrize("spec", ["base", "kmer(3)", "kmer(20)", "hf(METAGENE-1)"])
def test_a_tokenizer_can_be_given_by_name_and_all_datasets_agree(here: Path, spec: str):
    one, *others = ([plain(item) for item in make(kind, tokenizer=spec)] for kind in ALL)  # type: ignore[attr-defined]
    assert len(one) == NUM_READS and all(other == one for other in others)


def test_without_a_mapping_the_label_is_the_class_id(here: Path):
    dataset = make(mapping_df=None)
    assert dataset.num_classes is None
    assert [item["labels"].item() for item in dataset] == [class_id for class_id, _, _ in reads()]  # type: ignore


def test_items_have_only_the_ids_that_the_regex_captures(here: Path):
    assert list(make(header_regex=r"^lbl\|(?P<class_id>\d+)\|")[0]) == [
        "input_ids",
        "attention_mask",
        "labels",
        "class_id",
    ]


def test_a_mapping_can_be_a_path_a_data_frame_or_a_dict_and_later_changes_have_no_effect(here: Path):
    frame = Frame("species_mapping_converted.tsv", sep="\t")
    datasets = [make(mapping_df=source) for source in ("species_mapping_converted.tsv", frame, dict(CLASSES))]
    frame.data["class_id"] = []
    first, *others = ([plain(item) for item in pickle.loads(pickle.dumps(dataset))] for dataset in datasets)
    assert all(other == first for other in others)


# -- loaders


def batches(dataset: ReadDataset, **settings: object) -> list[dict[str, object]]:
    shuffled = torch.Generator().manual_seed(3)
    loader: DataLoader[Item] = DataLoader(dataset, batch_size=4, shuffle=True, generator=shuffled, **settings)  # type: ignore
    return [plain(batch) for batch in loader]


@quiet_loader
@pytest.mark.parametrize("kind", ALL)
def test_two_forked_workers_give_the_same_batches_as_one_process(here: Path, kind: type[ReadDataset]):
    dataset = make(kind, "train.fa.gz")
    alone = batches(dataset)
    assert sorted(number for batch in alone for number in batch["tax_id"]) == EVERY_TAX_ID  # type: ignore
    assert batches(dataset, num_workers=2, prefetch_factor=2, multiprocessing_context="fork") == alone


def test_a_spawned_worker_gives_the_same_batches_as_one_process(here: Path):
    """One loader for all three datasets, as a worker takes seconds to start."""
    dataset = torch.utils.data.ConcatDataset([make(kind, cache_index=False) for kind in ALL])  # type: ignore
    alone = batches(dataset)  # type: ignore[arg-type]
    assert sorted(number for batch in alone for number in batch["tax_id"]) == sorted(3 * EVERY_TAX_ID)  # type: ignore
    assert batches(dataset, num_workers=1, multiprocessing_context="spawn") == alone  # type: ignore


@quiet_loader
def test_persistent_workers_give_every_read_once_in_every_epoch(here: Path):
    dataset = make(CachedStreamingDataset, cache_size=10)
    loader: DataLoader[Item] = DataLoader(dataset, batch_size=1, shuffle=True, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert sorted(tax_ids(loader)) == EVERY_TAX_ID


@pytest.mark.parametrize("cache_index", [True, False])
@pytest.mark.parametrize("kind", ALL)
def test_a_pickled_dataset_gives_the_same_items(here: Path, kind: type[ReadDataset], cache_index: bool):
    dataset = make(kind, cache_index=cache_index)
    assert [plain(item) for item in pickle.loads(pickle.dumps(dataset))] == [plain(item) for item in dataset]  # type: ignore


# -- the cache of reads


def cached(**changed: object) -> CachedStreamingDataset:
    dataset = make(CachedStreamingDataset, **changed)  # type: ignore[arg-type]
    assert isinstance(dataset, CachedStreamingDataset)
    return dataset


@pytest.mark.parametrize("size", [0, 1, 7, 10_000])
def test_the_cache_never_holds_more_reads_than_its_size(here: Path, size: int):
    dataset, wanted = cached(cache_size=size), [plain(item) for item in make()]  # type: ignore[attr-defined]
    rng = random.Random(1)
    most = 0
    for _ in range(60):
        numbers = rng.choices(range(NUM_READS), k=rng.randrange(1, 20))  # some twice, some more than the cache holds
        assert [plain(item) for item in dataset.__getitems__(numbers)] == [wanted[number] for number in numbers]
        most = max(most, dataset.num_cached)
    assert most == min(size, NUM_READS)
    assert dataset.held_bytes == most * (2 * MAX_LENGTH + 8 + 3 * 8)


def test_the_least_recently_used_read_is_evicted_and_cached_reads_need_no_file(here: Path):
    dataset = cached(cache_size=3)
    wanted = [plain(item) for item in dataset.__getitems__([0, 1, 2])]
    _ = dataset[0], dataset[3]  # 1 is now the oldest
    Path("train.fa").unlink()
    assert [plain(dataset[number]) for number in (2, 0)] == [wanted[2], wanted[0]]
    with pytest.raises(StaleIndex):
        _ = dataset[1]


def test_a_pickled_cache_starts_empty(here: Path):
    dataset = cached(cache_size=10)
    dataset.__getitems__(range(8))
    assert (dataset.num_cached, pickle.loads(pickle.dumps(dataset)).num_cached) == (8, 0)


def test_a_negative_cache_size_is_refused(here: Path):
    with pytest.raises(ValueError, match="cache_size=-1"):
        cached(cache_size=-1)


def test_a_dataset_in_memory_no_longer_needs_the_file_and_stores_no_padding(here: Path):
    dataset = make(SequenceDataset)
    assert isinstance(dataset, SequenceDataset)
    Path("train.fa").unlink()
    assert plain(dataset[8]) == expected(8, MetaGeneTokenizer(use_hf_tokenizer=False))
    num_tokens = sum(min(len(sequence), MAX_LENGTH) for _, _, sequence in reads())
    assert dataset.held_bytes == 2 * num_tokens + NUM_READS * (8 + 3 * 8)


# -- the index


@pytest.mark.parametrize("kind", ALL)
def test_the_index_is_kept_next_to_the_file_and_reused(here: Path, kind: type[ReadDataset]):
    make(kind)
    index = Path("train.fa.millstream")
    written = index.stat()
    make(kind)
    assert index.stat().st_mtime_ns == written.st_mtime_ns and index.stat().st_ino == written.st_ino


@pytest.mark.parametrize("kind", ALL)
def test_a_temporary_index_is_removed_with_the_dataset(
    here: Path, kind: type[ReadDataset], monkeypatch: pytest.MonkeyPatch
):
    Path("temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here / "temporary"))
    before = sorted(here.iterdir())
    dataset = make(kind, cache_index=False)
    num_folders = 0 if kind is SequenceDataset else 1
    assert len(list(Path("temporary").iterdir())) == num_folders
    child = os.fork()
    if child == 0:  # a worker that drops its copy
        del dataset
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(Path("temporary").iterdir())) == num_folders
    assert len(list(dataset)) == NUM_READS  # type: ignore[call-overload]
    copy = pickle.dumps(dataset)
    del dataset
    assert list(Path("temporary").iterdir()) == []
    later = pickle.loads(copy)  # makes its own
    assert len(list(later)) == NUM_READS
    del later
    assert list(Path("temporary").iterdir()) == [] and sorted(here.iterdir()) == before


@pytest.mark.parametrize("kind", ALL)
def test_an_old_index_is_never_unpickled_and_is_named_in_one_line(
    here: Path, kind: type[ReadDataset], capfd: pytest.CaptureFixture[str]
):
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path("sprung").touch, ()

    old = Path("train.fa.index.pkl")
    old.write_bytes(pickle.dumps(Trap()))
    make(kind)
    assert not Path("sprung").exists() and old.exists()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("train.fa.index.pkl: ") and "train.fa.millstream" in line


# -- errors


@pytest.mark.parametrize("kind", ALL)
def test_a_class_that_is_not_in_the_mapping_is_refused(here: Path, kind: type[ReadDataset]):
    Path("train.fa").write_text(fasta(">lbl|4711|5||odd\nACGT\n"))
    with pytest.raises(BadSource, match=r"train\.fa: .*species_mapping.*: 4711"):
        make(kind)


def test_a_header_that_does_not_match_is_an_error_or_skipped_or_has_no_label(here: Path):
    Path("train.fa").write_text(fasta(">something else\nACGT\n"))
    with pytest.raises(BadSource, match="something else"):
        make()
    assert len(make(on_mismatch="skip")) == NUM_READS
    for mapping_df in (dict(CLASSES), None):
        last = plain(make(on_mismatch="null", mapping_df=mapping_df)[NUM_READS])
        assert (last["labels"], last["class_id"], last["tax_id"]) == (-100, -1, -1)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"path": "missing.fa"}, BadSource, "missing.fa: "),
        ({"path": "configs"}, BadSource, "configs: "),
        ({"header_regex": r"lbl\|(?P<class_id>[^|]+)"}, BadSource, "class_id"),
        ({"header_regex": r"lbl\|(?P<tax_id>\d+)", "mapping_df": None}, BadSource, "class_id"),
        ({"header_regex": r"lbl\|(?P<tax_id>\d+)"}, BadSource, "'class_id'"),
        ({"header_regex": r"lbl\|("}, BadSource, r"lbl\|("),
        ({"tokenizer": "bpe"}, ValueError, "'bpe'"),
        ({"tokenizer": str.split}, TypeError, "method_descriptor"),
        ({"max_length": 0}, ValueError, "max_length=0"),
        ({"mapping_df": "missing.tsv"}, BadSource, "missing.tsv: "),
    ],
)
def test_a_wrong_argument_is_named(here: Path, changed: dict[str, object], error: type, message: str):
    with pytest.raises(error, match=re.escape(message)):
        make(**changed)  # type: ignore[arg-type]


def test_a_trace_store_is_refused(here: Path):
    with ms.TraceWriter("traces") as writer:
        writer.append({"tokens": np.arange(3)})
    with pytest.raises(BadSource, match="traces: "):
        make(path="traces")


# -- the tokenizer


def test_the_tokenizer_gives_the_same_ids_as_the_rust_library(here: Path):
    rust = pytest.importorskip("tokenizers").Tokenizer.from_str(trained())
    texts = [sequence for _, _, sequence in reads()[:20]]
    plain_ids = [encoding.ids for encoding in rust.encode_batch(texts)]
    tokenizer = MetaGeneTokenizer(tokenizer_path="METAGENE-1", use_hf_tokenizer=True)
    assert tokenizer(texts)["input_ids"] == plain_ids
    assert tokenizer(texts)["attention_mask"] == [[1] * len(ids) for ids in plain_ids]
    assert tokenizer.encode(texts[9]) == tokenizer(texts[9])["input_ids"] == plain_ids[9]
    assert (tokenizer.vocab_size, tokenizer.pad_token_id) == (rust.get_vocab_size(), rust.token_to_id("[PAD]"))

    rust.enable_truncation(16)
    rust.enable_padding(length=16, pad_id=0, pad_token="[PAD]")
    wanted = rust.encode_batch(texts)
    tensors = tokenizer(texts, max_length=16, padding="max_length", truncation=True, return_tensors="pt")
    assert tensors["input_ids"].tolist() == [encoding.ids for encoding in wanted]
    assert tensors["attention_mask"].tolist() == [encoding.attention_mask for encoding in wanted]
    assert tensors["input_ids"].dtype == tensors["attention_mask"].dtype == torch.int64
    one = tokenizer(texts[9], max_length=16, padding="max_length", truncation=True, return_tensors="pt")
    assert one["input_ids"].tolist() == [wanted[9].ids]
    longest = max(map(len, plain_ids))
    assert tokenizer(texts, padding=True, return_tensors="pt")["input_ids"].shape == (20, longest)
    assert {len(ids) for ids in tokenizer(texts, max_length=90, padding="max_length")["input_ids"]} == {90}


def test_without_the_hf_tokenizer_a_token_is_a_base():
    tokenizer = MetaGeneTokenizer("metagene-ai/METAGENE-1", use_hf_tokenizer=False)
    assert tokenizer.encode("ACGTN") == [1, 2, 3, 4, 5]
    assert tokenizer(["AC", ""], max_length=3, padding="max_length")["attention_mask"] == [[1, 1, 0], [0, 0, 0]]
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.pad_token_id) == ("base", 6, 0)


def test_the_tokenizer_works_with_millstream_features_and_can_be_pickled(here: Path):
    tokenizer = pickle.loads(pickle.dumps(MetaGeneTokenizer(here / "METAGENE-1" / "tokenizer.json")))
    found = ms.open("train.fa")
    assert isinstance(found, ms.Reads)
    feature = ms.features.tokens(tokenizer, max_length=MAX_LENGTH)
    batch = feature(found.fetch([3, 9], feature.fields))
    assert (
        batch["input_ids"].tolist()
        == tokenizer(  # type: ignore[union-attr]
            [reads()[3][2], reads()[9][2]], max_length=MAX_LENGTH, padding=True, truncation=True
        )["input_ids"]
    )


def test_a_model_that_is_not_on_this_machine_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSource, match=r"no-such-people/NO-SUCH-MODEL.*tokenizer\.json"):
        MetaGeneTokenizer("no-such-people/NO-SUCH-MODEL")
    with pytest.raises(ValueError, match="tokenizer_path"):
        MetaGeneTokenizer()


@pytest.mark.parametrize("dataset", [SequenceDataset, StreamingSequenceDataset, CachedStreamingDataset])
def test_a_missing_header_regex_is_an_error(dataset: Any, tmp_path: Path):
    (tmp_path / "reads.fa").write_text(">a\nACGT\n")
    with pytest.raises(BadSetting, match="header_regex=None"):
        dataset(tmp_path / "reads.fa", None, "base", None, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 3, "padding": "max_length"}, "max_length=3"),
        ({"return_tensors": "pt"}, "2 to 4"),
        ({"return_tensors": "tf"}, "return_tensors='tf'"),
        ({"padding": "left"}, "padding='left'"),
        ({"truncation": True}, "truncation=True"),
        ({"padding": "max_length"}, 'padding="max_length"'),
    ],
)
def test_an_impossible_call_is_an_error_with_the_argument(settings: dict[str, object], message: str):
    tokenizer = MetaGeneTokenizer(use_hf_tokenizer=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer(["AC", "ACGT"], **settings)  # type: ignore[call-overload]


@needs_metagene
def test_metagene_1_gives_its_known_tokens_in_all_datasets(here: Path):
    tokenizer = MetaGeneTokenizer(METAGENE)
    assert (tokenizer.vocab_size, tokenizer.pad_token_id) == (1024, 0)
    assert tokenizer.encode("N") == [3, 11, 4]  # [BOS] N [EOS]
    rust = pytest.importorskip("tokenizers").Tokenizer.from_file(str(METAGENE / "tokenizer.json"))
    texts = (METAGENE / "sample_reads.csv").read_text().split()
    assert tokenizer(texts)["input_ids"] == [encoding.ids for encoding in rust.encode_batch(texts)]
    wanted = [expected(number, tokenizer) for number in range(NUM_READS)]
    for kind in ALL:
        assert [plain(item) for item in make(kind, tokenizer=tokenizer)] == wanted  # type: ignore[attr-defined]


@quiet_loader
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ALL)
def test_batches_are_what_default_collation_makes_of_plain_dicts(tmp_path, kind, workers):
    (tmp_path / "reads.fa").write_text(fasta())
    dataset = kind(tmp_path / "reads.fa", None, "kmer(6)", REGEX, MAX_LENGTH)
    for batch_size in (1, 7):
        batches = list(DataLoader(dataset, batch_size=batch_size, num_workers=workers))
        items = [dict(dataset[number]) for number in range(len(dataset))]
        expected = [default_collate(items[at : at + batch_size]) for at in range(0, len(items), batch_size)]
        for batch, other in zip(batches, expected, strict=True):
            assert type(batch) is dict and list(batch) == list(other)
            for name, values in other.items():
                assert batch[name].dtype == values.dtype and batch[name].is_contiguous()
                assert batch[name].tolist() == values.tolist()
