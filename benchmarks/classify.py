"""Read classifiers against Kraken 2 and naive Bayes, on real genomes; and the cost of streaming.

    python benchmarks/classify.py GENOMES             # about 35 minutes, 6 GB of disk; benchmarks/results/classify.json
    python benchmarks/classify.py GENOMES compare     # parts: compare, epoch
    python benchmarks/classify.py GENOMES quick=true  # few reads, a few minutes
    python benchmarks/classify.py GENOMES dir=FOLDER  # working folder; existing files are reused

GENOMES is a folder with genomes.tsv: file, taxid, species, role (train or heldout). Kraken 2 is the Debian package.

compare: training reads from the train strains; test reads from new positions in the same strains (known) and from other
strains of the species (heldout), 1 % error rate, the same number per species; and long ones of those (10 kb, 7 %
errors), which nets read in windows as long as their training reads. Only species-level assignments count:
Kraken's assignments to a genus or higher count as unclassified. Each model and peer runs as a shell command; memory is
the PSS of its process tree. The nets train on fewer reads: there is no GPU. `hf` is a small random model (no pretrained
one is available): it shows cost, not accuracy. Writes the table and the curve into docs/results.md.
epoch: the passes of `millstream train` with kmer-linear, on reads streamed under 300 MB, plain and gzipped; on reads in
RAM; and on batches of k-mers prepared in RAM. Reports the fraction of time spent waiting for data.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from classify_peers import KrakenPeer, NaiveBayes
from measuring import PAGE, RESULTS, Result, clock, peak_pss, save, update_page

CURVE = PAGE.with_name("classify.svg")
MARK = "<!-- made by benchmarks/classify.py -->"
PARTS = ("known", "heldout")
LONG = "long"
MEMORY = "2GB"
LITTLE = 300_000_000
READY = "batches ready in RAM"
WAYS = {  # the file, and the memory limit
    "reads in RAM": ("epoch.fa", 8_000_000_000),
    "plain file": ("epoch.fa", LITTLE),
    "gzipped file": ("epoch.fa.gz", LITTLE),
}


@dataclass(frozen=True)
class Sizes:
    """The number of reads in each file."""

    deep: int = 8_000_000  # for kmer-linear and naive Bayes
    few: int = 150_000  # for nets
    fewest: int = 20_000  # for the largest net
    scored: int = 40_000
    val: int = 20_000
    speed: int = 1_000_000  # to measure the speed of fast classifiers
    epoch: int = 2_000_000
    turns: int = 5
    long: int = 4_000


QUICK = Sizes(400_000, 20_000, 4_000, 4_000, 2_000, 100_000, 200_000, 3, 200)
WINDOW = "max_length=150"


@dataclass(frozen=True)
class Model:
    """One of our classifiers, and its training reads and settings."""

    name: str
    reads: str
    settings: Sequence[str]
    speed: str = "known.fa"


MODELS = (
    Model("kmer-linear", "deep.fa.gz", ["epochs=1"], "speed.fa"),
    Model("kmer-exact", "deep.fa.gz", ["epochs=1"], "speed.fa"),
    Model("cnn", "few.fa.gz", ["epochs=2", "batch_size=256", WINDOW]),
    Model("lstm", "few.fa.gz", ["epochs=1", "batch_size=256", WINDOW]),
    Model("transformer", "few.fa.gz", ["epochs=1", "batch_size=256", WINDOW]),
    Model("hf", "fewest.fa.gz", ["epochs=1", "batch_size=64", "lora=8", WINDOW]),
)


def main() -> int:
    words = [word for word in sys.argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if not words:
        print(__doc__, file=sys.stderr)
        return 2
    genomes, parts = Path(words[0]), words[1:] or ["compare", "epoch"]
    quick = options.get("quick", "false") == "true"
    sizes = QUICK if quick else Sizes()
    folder = Path(options.get("dir") or tempfile.mkdtemp(prefix="classify-"))
    folder.mkdir(parents=True, exist_ok=True)
    name = "classify-quick" if quick else "classify"
    file = RESULTS / f"{name}.json"
    result: Result = json.loads(file.read_text()) if file.exists() else {}
    data = Data(genomes, folder, sizes)
    data.make()
    if "epoch" in parts:
        result["epoch"] = epochs(data)
        save(name, result)
    if "compare" in parts:
        for model, found in compare(data, options.get("models", "").split(",")):
            result.setdefault("compare", {})[model] = found
            save(name, result)
    if not quick and "compare" in result:
        write_page(result)
    if "dir" not in options:
        shutil.rmtree(folder)
    return 0


@dataclass(frozen=True)
class Data:
    """Genomes and the reads simulated from them."""

    genomes: Path
    folder: Path
    sizes: Sizes

    @property
    def mapping(self) -> Path:
        return self.folder / "species.tsv"

    def files(self, role: str) -> list[str]:
        with (self.genomes / "genomes.tsv").open() as file:
            return [
                str(self.genomes / row["file"]) for row in csv.DictReader(file, delimiter="\t") if row["role"] == role
            ]

    def make(self) -> None:
        """Simulate the files that are missing."""
        sizes = self.sizes
        wanted = {
            "known.fa": ("train", sizes.scored, "equal"),
            "heldout.fa": ("heldout", sizes.scored, "equal"),
            "val.fa": ("train", sizes.val, "equal"),
            "speed.fa": ("train", sizes.speed, "length"),
            "deep.fa.gz": ("train", sizes.deep, "length"),
            "few.fa.gz": ("train", sizes.few, "length"),
            "fewest.fa.gz": ("train", sizes.fewest, "length"),
            "epoch.fa.gz": ("train", sizes.epoch, "length"),
            "epoch.fa": ("train", sizes.epoch, "length"),
            f"{LONG}.fa": ("heldout", sizes.long, "equal"),
        }
        for seed, (name, (role, count, abundance)) in enumerate(wanted.items(), 11):
            if not (self.folder / name).exists():
                chosen = ["--reads", count, "--abundance", abundance, "--seed", min(seed, 18)]
                chosen += ["--profile", "ont"] if name == f"{LONG}.fa" else []
                index = ["--mapping", self.mapping, "--index-dir", self.folder / "index"]
                run("simulate", *self.files(role), "-o", self.folder / name, *chosen, *index)

    def labels(self, part: str) -> np.ndarray:
        with (self.folder / f"{part}.fa").open() as file:
            return np.array([int(line.split("|", 2)[1]) for line in file if line[0] == ">"])

    def classes(self) -> dict[int, int]:
        """The class of each taxon."""
        with self.mapping.open() as file:
            return {int(row["tax_id"]): int(row["class_id"]) for row in csv.DictReader(file, delimiter="\t")}


def compare(data: Data, models: Sequence[str]) -> Iterable[tuple[str, Result]]:
    """Measure every classifier, one after the other."""
    wanted = [name for name in models if name]
    for model in MODELS:
        if not wanted or model.name in wanted:
            yield model.name, ours(data, model)
    for name, measure in (("naive Bayes, 8-mers", naive_bayes), ("Kraken 2", kraken)):
        if not wanted or name.split()[0] in wanted:
            yield name, measure(data)


def ours(data: Data, model: Model) -> Result:
    out = data.folder / f"run-{model.name}"
    shutil.rmtree(out, ignore_errors=True)
    files = {
        "train": model.reads,
        "val": "val.fa",
        "test": f"known.fa,{data.folder / 'heldout.fa'},{data.folder / LONG}.fa",
    }
    settings = [f"data.{name}={data.folder / file}" for name, file in files.items()]
    settings += [f"mapping={data.mapping}", f"model={model.name}", f"memory={MEMORY}", f"out={out}", *model.settings]
    if model.name == "hf":
        settings.append(f"hf={random_model(data.folder / 'random')}")
    train_s, peak = measured(lambda: run("train", *settings))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows_file = data.folder / f"{model.name}.tsv"
    rows_file.unlink(missing_ok=True)
    done = subprocess.run(
        [*millstream("classify"), out, data.folder / model.speed, "-o", rows_file, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    table = pq.read_table(out / "predictions.parquet")
    found: Result = {
        "reads": {"deep.fa.gz": data.sizes.deep, "few.fa.gz": data.sizes.few}.get(model.reads, data.sizes.fewest),
        "train_s": train_s,
        "reads_per_s": json.loads(done.stdout)["reads_per_s"],
        "peak_bytes": peak,
        "waiting": {line["kind"]: line["waiting"] for line in lines if "waiting" in line},
    }
    for part in (*PARTS, LONG):
        rows = table.filter(np.array(table.column("part").to_pylist()) == part)
        label, predicted = rows.column("label").to_numpy(), rows.column("class").to_numpy()
        found[part] = scored(label, predicted, rows.column("probability").to_numpy())
    return found


def naive_bayes(data: Data) -> Result:
    """Trained on the same reads as kmer-linear."""
    peer = NaiveBayes(8, len(data.classes()))
    train_s, peak = measured(lambda: peer.fit(data.folder / "deep.fa.gz"))
    speed = data.sizes.speed / clock(lambda: peer.classify(data.folder / "speed.fa"))
    found: Result = {"reads": data.sizes.deep, "train_s": train_s, "reads_per_s": speed, "peak_bytes": peak}
    for part in (*PARTS, LONG):
        found[part] = scored(data.labels(part), *peer.classify(data.folder / f"{part}.fa"))
    return found


def kraken(data: Data) -> Result:
    """Its database is built from the genomes themselves; --confidence gives the curve."""
    peer = KrakenPeer(data.folder / "kraken", data.classes())
    train_s, peak = measured(lambda: peer.build(data.files("train"), data.mapping))
    speed, classify_bytes = peer.speed(data.folder / "speed.fa", measured)
    found: Result = {"reads": 0, "train_s": train_s, "reads_per_s": speed[1], "reads_per_s_2_threads": speed[2]}
    found |= {"peak_bytes": peak, "classify_bytes": classify_bytes}
    for part in (*PARTS, LONG):
        labels = data.labels(part)
        found[part] = scored(labels, peer.classify(data.folder / f"{part}.fa", 0.0), None)
        points = [
            scored(labels, peer.classify(data.folder / f"{part}.fa", c), None) for c in (0.05, 0.1, 0.2, 0.4, 0.6)
        ]
        found[part]["curve"] = [[p["precision"], p["recall"]] for p in (found[part], *points)]
    return found


def scored(label: np.ndarray, predicted: np.ndarray, probability: np.ndarray | None) -> Result:
    """Species-level scores; -1 is unclassified. The curve is precision and recall by decreasing confidence."""
    right = predicted == label
    classes = np.unique(label)
    f1 = [2 * (right & (label == c)).sum() / ((predicted == c).sum() + (label == c).sum()) for c in classes]
    classified = predicted >= 0
    found: Result = {
        "accuracy": float(right.mean()),
        "macro_f1": float(np.mean(f1)),
        "precision": float(right[classified].mean()),
        "recall": float(right.mean()),
    }
    if probability is not None:
        order = np.argsort(-probability, kind="stable")
        hits = np.cumsum(right[order])
        places = np.unique(np.geomspace(100, len(order), 300).astype(int)) - 1
        found["curve"] = [[float(hits[p] / (p + 1)), float(hits[p] / len(order))] for p in places]
    return found


def recall_at(found: Result, precision: float) -> float:
    """The highest recall at no less than this precision."""
    return max((r for p, r in found["curve"] if p >= precision), default=0.0)


def epochs(data: Data) -> Result:
    """The counting pass and the training steps of kmer-linear, streamed and from RAM, interleaved."""
    import torch

    from millstream.core.console import ignore_message
    from millstream.core.loader import Loader
    from millstream.core.split import LABEL
    from millstream.features import fields
    from millstream.reads.classifiers import classifier_kit
    from millstream.reads.files.index import IndexSettings
    from millstream.reads.kind import HEADERS, ReadSettings
    from millstream.reads.open import open_reads
    from millstream.training.loop import Clock

    torch.set_num_threads(1)  # as `millstream train` does on two cores
    kit = classifier_kit("kmer-linear", ReadSettings(memory=LITTLE), len(data.classes()))
    opened = {
        name: open_reads([data.folder / name], settings=IndexSettings(header_regex=HEADERS), mapping=data.mapping)
        for name in ("epoch.fa", "epoch.fa.gz")
    }

    def batches(way: str, order: str) -> Iterable[dict[str, Any]]:
        name, budget = WAYS[way]
        return Loader(
            opened[name], batch_size=1024, features=[*kit.features, fields(LABEL)], memory=budget // 2, order=order,
            notify=ignore_message, rank=0, world=1,
        )  # fmt: skip

    def count(net: Any, some: Iterable[dict[str, Any]]) -> None:
        net.prepare(some)

    def train(net: Any, some: Iterable[dict[str, Any]]) -> None:
        optimizer = net.optimizer(0.02, 0.0)
        for batch in some:
            loss, _ = net(batch, batch[LABEL], torch.ones(len(batch[LABEL])))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    works: Mapping[str, tuple[Callable[[Any, Iterable[dict[str, Any]]], None], str]] = {
        "counting": (count, "none"),
        "training": (train, "auto"),
    }
    found: Result = {}
    for work, (do, order) in works.items():
        some = batches("reads in RAM", order)
        ready = [{name: value.clone() for name, value in batch.items()} for batch in some]
        net = kit.build(ready[0])
        net.train()
        seconds: dict[str, list[float]] = {way: [] for way in (READY, *WAYS)}
        waiting: dict[str, list[float]] = {way: [] for way in (READY, *WAYS)}
        for turn in range(data.sizes.turns + 1):
            for way in seconds:
                timing = Clock()
                do(net, timing.watch(ready if way == READY else batches(way, order)))
                timing.stop()
                if turn:
                    seconds[way].append(timing.seconds)
                    waiting[way].append(timing.share)
        middle = {way: float(np.median(times)) for way, times in seconds.items()}
        found[work] = {
            way: {
                "seconds": middle[way],
                "of_reads_in_ram": middle[way] / middle["reads in RAM"],
                "of_batches_in_ram": middle[way] / middle[READY],
                "waiting": float(np.median(waiting[way])),
            }
            for way in seconds
        }
        print(work, json.dumps(found[work]), flush=True)
    return found


def random_model(folder: Path) -> Path:
    """A Llama with 2 layers and random weights, and one token per base."""
    if not folder.exists():
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

        words = {"[PAD]": 0, "A": 1, "C": 2, "G": 3, "T": 4, "N": 5}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="N"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        LlamaModel(LlamaConfig(vocab_size=6, pad_token_id=0, **size)).save_pretrained(folder)
    return folder


def write_page(result: Result) -> None:
    """Write the table as Markdown in place of the previous one, and the curve next to it."""
    rows = result["compare"]
    peer = rows["Kraken 2"]
    lines = [
        "| | known: accuracy | macro F1 | recall at Kraken's precision | heldout: accuracy | macro F1 | recall at "
        "Kraken's precision | long: accuracy | training reads | training, s | reads/s | peak memory, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells: list[str] = []
        for part in PARTS:
            at = peer[part]["recall"] if row is peer else recall_at(row[part], peer[part]["precision"])
            cells += [f"{row[part]['accuracy']:.4f}", f"{row[part]['macro_f1']:.4f}", f"{at:.4f}"]
        cells.append(f"{row[LONG]['accuracy']:.4f}" if LONG in row else "–")
        reads = f"{row['reads']:,}" if row["reads"] else "the genomes"
        speed = f"{row['reads_per_s']:,.0f}"
        if row is peer:
            speed += f" (2 threads: {row['reads_per_s_2_threads']:,.0f})"
        memory = f"{row['peak_bytes'] / 1e6:,.0f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {reads} | {row['train_s']:,.0f} | {speed} | {memory} |")
    stated = ", ".join(f"{peer[part]['precision']:.4f} on {part}" for part in PARTS)
    text = [
        "## Reads",
        "",
        "`python benchmarks/classify.py GENOMES`: 20 species, 150 bp reads with a 1 % substitution rate; 40,000 from "
        "new positions in the training strains (known) and 40,000 from other strains of 10 of the species (heldout); "
        "and 4,000 of those strains of about 10,000 bases with 7 % errors (long). "
        f"Kraken 2 classifies a read or leaves it unclassified, with a precision of {stated}; the other classifiers "
        "assign every read, and are compared with it at the threshold that gives the same precision.",
        "",
        *lines,
        "",
        "![precision against recall](classify.svg)",
    ]
    if "epoch" in result:
        text += [
            "",
            "kmer-linear with `memory=300MB`, 2 million reads, two cores: one pass counts k-mers, another one trains.",
            "",
            "| | s | of reads in RAM | of batches ready in RAM | waiting for data |",
            "|---|---|---|---|---|",
        ]
        for work, ways in result["epoch"].items():
            for way, row in ways.items():
                ratios = f"{row['of_reads_in_ram']:.2f} | {row['of_batches_in_ram']:.2f}"
                text.append(f"| {work}, {way} | {row['seconds']:.1f} | {ratios} | {row['waiting']:.1%} |")
    update_page(MARK, text)
    draw(rows)


def draw(rows: Mapping[str, Result]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "millstream"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, part in zip(axes, PARTS, strict=True):
        for name, row in rows.items():
            precision, recall = np.array(row[part]["curve"]).T
            is_peer = name == "Kraken 2"
            ax.plot(recall, precision, "k.--" if is_peer else "-", label=name, zorder=3 if is_peer else 2)
        ax.set(title=part, xlabel="recall", ylabel="precision", ylim=(0.8, 1.005))
    axes[0].legend(fontsize=8)
    figure.savefig(CURVE, metadata={"Date": None})


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the peak PSS of this process tree."""
    with peak_pss() as memory:
        seconds = clock(work)
    return seconds, memory.peak_bytes


def millstream(command: str) -> list[str]:
    return [sys.executable, "-m", "millstream", command]


def run(command: str, *arguments: object) -> None:
    print(f"$ millstream {command} ... {' '.join(map(str, arguments[-4:]))}", flush=True)
    subprocess.run([*millstream(command), *map(str, arguments)], check=True)


if __name__ == "__main__":
    sys.exit(main())
