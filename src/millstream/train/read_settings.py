"""What `millstream train` takes to learn which class a read is of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millstream.config import setting_pairs
from millstream.errors import BadSetting
from millstream.train.settings import LoopSettings

HEADERS = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"


@dataclass(frozen=True)
class ReadData:
    """Files of reads: several are separated by commas, each may be a folder or a pattern."""

    train: str = ""  # reads to learn from
    val: str | None = None  # to choose epochs by; if not given, reads of `train` are held out, which flatters
    test: str | None = None  # each file is a part of its own in the report
    header_regex: str = HEADERS  # its group class_id is looked up in the mapping
    index_dir: str | None = None  # where indexes go, if not beside the files


@dataclass(frozen=True)
class ReadSettings(LoopSettings):
    """The same files, mapping and augmentation for all classifiers of a run."""

    data: ReadData = field(default_factory=ReadData)
    mapping: str = ""  # TSV, CSV or Parquet: class_id, and names, tax_id, genus and other ranks
    taxonomy: str | None = None  # folder with NCBI's nodes.dmp and names.dmp, for the ranks above tax_id
    model: str = "kmer-linear,cnn"  # also lstm, transformer, and hf with hf=FOLDER
    epochs: int = 3
    batch_size: int = 1024
    patience: int = 2
    dropout: float = 0.1
    weight_decay: float = 0.0
    balance: str = "weights"  # so that rare classes count as much: by weights, by drawing them more often, or not
    reverse_complement: bool = True  # train on either strand, and average over both when scoring
    paired: bool = False  # neighbouring reads are a pair, and get one answer
    val_reads: int = 100_000  # at most, to choose epochs by
    k: str = "auto"  # of kmer-linear: lengths of k-mers, and of how many one is kept, as in 14/4,16/8
    bits: int | None = None  # of kmer-linear: 2^bits buckets; as many as the memory allows if not given
    width: int = 64  # of cnn, lstm and transformer
    layers: int = 4  # of cnn and transformer
    tokenizer: str = "auto"  # of lstm and transformer: kmer(6), hf(folder), ...
    max_length: int | None = None  # tokens of a read; longer ones are cut
    hf: str | None = None  # of the model hf: a name or folder that transformers can load
    lora: int = 0  # rank of the adapters that are trained with it; 0: it is frozen

    def science(self) -> dict[str, object]:
        """As of all runs, but for where tables are: what they say is part of the data."""
        return {name: value for name, value in super().science().items() if name not in ("mapping", "taxonomy")}

    def check(self) -> None:
        if not self.data.train:
            raise BadSetting("data.train=FILE: name the reads to train on")
        if not self.mapping:
            raise BadSetting("mapping=FILE: name the table that says which class ids there are")
        if self.balance not in ("weights", "sampling", "none"):
            raise BadSetting(f"balance={self.balance}: there is weights, sampling and none")
        for name in ("val_reads", "width", "layers", "max_length", "bits"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadSetting(f"{name}={getattr(self, name)}: at least 1")
        if self.lora < 0:
            raise BadSetting(f"lora={self.lora}: a rank, or 0 for none")
        super().check()


def are_of_reads(settings: Sequence[str] | Mapping[str, object]) -> bool:
    """Whether settings ask for classifiers of reads: then their data are files to train on."""
    return any(key.startswith("data.") for key, _ in setting_pairs(settings))
