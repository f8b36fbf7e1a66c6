"""Reads as a kind of record: the settings of their commands, how reads are found and opened. Imports nothing heavy."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from millstream.core.config import Count, Natural, setting_pairs, without_effect
from millstream.errors import BadSetting
from millstream.training import LoopSettings

if TYPE_CHECKING:
    from millstream.reads.mapping import MappingSource
    from millstream.reads.reads import Reads

MODEL_GROUPS = ()
KMER_LINEAR, KMER_EXACT = "kmer-linear", "kmer-exact"
MACRO_F1 = "macro F1"  # what classifiers are chosen by
HEADERS = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
ROW_COLUMNS = ("read", "class", "tax_id", "taxon", "rank", "probability")  # of what `classify` writes
ON_MISMATCH = ("error", "skip", "null")
BALANCES = ("weights", "sampling", "none")


def is_named(path: Path) -> bool:
    """Whether a path has the name of a file of reads."""
    from millstream.reads.open import READ_NAMES

    return path.name.lower().endswith(READ_NAMES)


def is_at(path: Path) -> bool:
    """Whether a path is for reads: any file, a folder with FASTA, FASTQ or packs in it, a pattern, `-`.

    Any file, because opening it as reads gives the best error message for one that is neither FASTA nor FASTQ.
    """
    from millstream.core.remote import RemotePath

    if isinstance(path, RemotePath):
        from millstream.reads.open import READ_NAMES

        if is_named(path) or any(mark in path.name for mark in "*["):
            return True
        return path.is_file() or any(name.lower().endswith(READ_NAMES) for name in path.entries())
    if path.is_dir():
        from millstream.reads.files.source import looks_like_reads
        from millstream.reads.pack import is_named_pack

        return any(file.is_file() and (looks_like_reads(file) or is_named_pack(file)) for file in path.iterdir())
    is_pattern = str(path) == "-" or any(mark in str(path) for mark in "*?[")
    return is_pattern or path.exists() or is_named(path)


def open(
    path: str | Path | Sequence[str | Path],
    *,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: Literal["error", "skip", "null"] = "error",
    mapping: MappingSource | None = None,
    labels: str | Path | None = None,
    memory: int | str | None = None,
    index_dir: str | Path | None = None,
    salvage: bool = False,
    unverified: bool = False,
    **_others: object,
) -> Reads:
    """`ms.open` for reads; options of other kinds are ignored."""
    from millstream.reads.files.index import IndexSettings
    from millstream.reads.open import expand, open_reads, watch_index

    given = [path] if isinstance(path, str | Path) else path
    paths = [file for place in given for file in expand(place)]
    settings = None
    if header_regex is not None or columns is not None or salvage or unverified:
        chosen = tuple(columns) if columns is not None else None
        settings = IndexSettings(
            header_regex=header_regex,
            columns=chosen,
            on_mismatch=on_mismatch,
            salvage=salvage or unverified,
            unverified=unverified,
        )
    return open_reads(
        paths, settings=settings, mapping=mapping, labels=labels, memory=memory, index_dir=index_dir, watch=watch_index
    )


def files_at(path: Path) -> dict[str, Path]:
    """What `millstream copy` copies of a file: itself and its index, by name."""
    from millstream.reads.files.index import SUFFIX, find_index

    index = find_index(path)
    return {path.name: path} | ({} if index is None else {path.name + SUFFIX: index})


def is_output(path: Path) -> bool:
    """Whether `classify` wrote this file: one row per read."""
    head = "\t".join(ROW_COLUMNS).encode()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(len(head)) == head
    except (OSError, EOFError, zlib.error):
        return False


def expand_models(names: Sequence[str]) -> list[str]:
    """Each name once; there are no groups of classifiers."""
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class ReadData:
    """Read files, separated by commas; each may be a folder or a pattern."""

    train: Annotated[str, "reads to train on"] = ""
    val: Annotated[str | None, "validation reads; default: a sample of data.train, which is optimistic"] = None
    test: Annotated[str | None, "test reads; the report treats each file separately"] = None
    header_regex: Annotated[
        str, "matches from the start of a header; named groups become columns; class_id is looked up in the mapping"
    ] = HEADERS
    on_mismatch: Annotated[str, "training reads whose header does not match: error, skip, or null (no class)"] = "error"
    labels: Annotated[
        str | None, "table of reads and their tax_id or class_id, as in CAMI's reads_mapping.tsv, if headers have none"
    ] = None
    index_dir: Annotated[str | None, "folder for indexes; default: beside the files"] = None


NETS = ("cnn", "lstm", "transformer", "hf")
USED_BY: Mapping[str, Sequence[str]] = {  # settings that have no effect on other classifiers
    "k": ("kmer-linear",),
    "bits": ("kmer-linear",),
    "width": ("cnn", "lstm", "transformer"),
    "layers": ("cnn", "transformer"),
    "tokenizer": ("lstm", "transformer", "hf"),
    "max_length": NETS,
    "qualities": ("cnn",),
    "dropout": NETS,
    "reverse_complement": NETS,
    "ranks": NETS,
    "hf": ("hf",),
    "lora": ("hf",),
}


@dataclass(frozen=True)
class ReadSettings(LoopSettings):
    """The same files, mapping and augmentation for all classifiers of a run."""

    data: ReadData = field(default_factory=ReadData)
    mapping: Annotated[
        str,
        "TSV, CSV or Parquet with class_id or tax_id, names, ranks (genus, ...) or lineage, and file if it has a class",
    ] = ""
    taxonomy: Annotated[
        str | None, "folder with nodes.dmp, names.dmp and merged.dmp of NCBI, for the ranks above tax_id"
    ] = None
    model: Annotated[str, "classifiers to train and compare: kmer-linear, kmer-exact, cnn, lstm, transformer, hf"] = (
        "kmer-linear,cnn"
    )
    epochs: int = 3
    batch_size: int = 1024
    patience: int = 2
    dropout: float = 0.1
    weight_decay: float = 0.0
    balance: Annotated[str, "class balancing: weights (of the loss), sampling, or none"] = "weights"
    ranks: Annotated[str | None, "nets: also learn the taxa at these ranks, such as genus,family"] = None
    reverse_complement: Annotated[bool, "train on both strands, and average both when scoring"] = True
    by: Annotated[
        str | None,
        "without data.val: hold out a tenth of the groups of reads with equal values of this column, or file",
    ] = None
    paired: Annotated[bool, "neighbouring reads, or those of two files, are mates and get one prediction"] = False
    val_reads: Annotated[Count, "maximum number of validation reads"] = 100_000
    k: Annotated[str, "kmer-linear: k-mer lengths and subsampling, such as 14/4,16/8"] = "auto"
    bits: Annotated[Count | None, "kmer-linear: 2^bits hash buckets; default: what the memory budget allows"] = None
    width: Annotated[Count, "cnn, lstm, transformer: width"] = 64
    layers: Annotated[Count, "cnn, transformer: number of layers"] = 4
    tokenizer: Annotated[str, "lstm, transformer: kmer(6), hf(folder), ..."] = "auto"
    max_length: Annotated[
        Count | None,
        "nets: maximum number of tokens (cnn: bases), default: of 1,000 bases; windows of longer reads vote",
    ] = None
    qualities: Annotated[bool, "cnn: read base qualities, too"] = False
    min_quality: Annotated[Natural, "bases of a lower Phred quality become N"] = 0
    hf: Annotated[str | None, "hf: name or folder of a transformers model"] = None
    lora: Annotated[Natural, "hf: rank of LoRA adapters; 0 freezes the model"] = 0

    def science(self) -> dict[str, object]:
        """Without the paths of tables: their contents are part of the data. Older runs lack some settings."""
        unset = {name for name in ("qualities", "min_quality") if not getattr(self, name)}
        return {n: value for n, value in super().science().items() if n not in {"mapping", "taxonomy", *unset}}

    @property
    def needs_qualities(self) -> str:
        """The setting that needs base qualities, for messages; empty if none does."""
        has_cnn = "cnn" in (name.strip() for name in self.model.split(","))
        return (
            f"min_quality={self.min_quality}" if self.min_quality else "qualities=true" * (self.qualities and has_cnn)
        )

    def unused(self, models: Sequence[str]) -> list[str]:
        """A sentence for each setting that was changed but has no effect on any of these classifiers."""
        return without_effect(self, USED_BY, models)

    def check(self) -> None:
        if not self.data.train:
            raise BadSetting("data.train= is missing: the reads to train on, as in data.train=train.fa.gz")
        if not self.mapping:
            raise BadSetting("mapping= is missing: the table of class ids, as in mapping=species.tsv")
        if self.by is not None and self.data.val:
            raise BadSetting(
                f"by={self.by}: holds out groups of data.train, but data.val is set. Leave out one of them"
            )
        if self.balance not in BALANCES:
            raise BadSetting(f"balance={self.balance}: must be one of {', '.join(BALANCES)}")
        if self.data.on_mismatch not in ON_MISMATCH:
            raise BadSetting(f"data.on_mismatch={self.data.on_mismatch}: must be one of {', '.join(ON_MISMATCH)}")
        super().check()


TRAIN_SETTINGS, TRAINS = ReadSettings, "read classifiers (data.train=FILE)"


def is_training_on(settings: Sequence[str] | Mapping[str, object]) -> bool:
    """Whether training settings are for this kind of record: `data` has splits of its own."""
    return any(key.startswith("data.") for key, _ in setting_pairs(settings))
