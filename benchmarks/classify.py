"""Read classifiers against Kraken 2 on real genomes: strains they know, other strains, and what is foreign to them.

    python benchmarks/classify.py GENOMES              # about 10 minutes; docs/results/reads.md, results/classify.json
    python benchmarks/classify.py GENOMES nets=true    # also naive Bayes, cnn, lstm, transformer, hf: 10 minutes more
    python benchmarks/classify.py GENOMES quick=true   # few reads, 3 minutes; writes no page
    python benchmarks/classify.py GENOMES dir=FOLDER   # working folder; reads and databases in it are used again

GENOMES is a folder with genomes.tsv: file, taxid, species, role (train or heldout). Kraken 2 is the Debian package.

kmer-exact and Kraken 2 are built from the genomes of the train strains; kmer-linear, naive Bayes and nets learn from
reads simulated from them. Both are also built without the species in LEFT_OUT. Sets of reads, with 1 % substitutions
unless their name says otherwise: `known` from the train strains, `heldout` from other strains of ten of the species,
`long` of those (10 kb, 4 % substitutions, 3 % indels), `75-0` to `250-3` of those by length and errors in percent;
`random` DNA; `outside` from species left out, `mixed` from held-out strains with one read in ten from outside. An
assignment to a genus is not one to a species: those of Kraken count as unclassified except in the table by genus.
CPU time is of the whole command, with its start; it is what can be compared on a machine that is not idle.
"""

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from classify_page import write_page
from classify_peers import KrakenPeer, NaiveBayes
from measuring import RESULTS, Result, clock, peak_pss, save

MEMORY = "2GB"
LENGTHS = {f"{length}-{errors}": (length, errors / 100) for length in (75, 250) for errors in (0, 3)}
LEFT_OUT = ("Klebsiella variicola", "Staphylococcus epidermidis", "Enterococcus casseliflavus", "Vibrio cholerae")
CONFIDENCES = (0.05, 0.1, 0.2, 0.4, 0.6)  # of Kraken, for its curve
SETS = ("known", "heldout", "long", *LENGTHS)
WINDOW = "max_length=150"
NETS = {
    "cnn": ["epochs=2", WINDOW],
    "lstm": ["epochs=1", WINDOW],
    "transformer": ["epochs=1", WINDOW],
    "hf": ["epochs=1", "batch_size=64", "lora=8", WINDOW],
}


@dataclass(frozen=True)
class Sizes:
    """The number of reads in each file."""

    deep: int = 1_000_000  # to learn from, for what learns from reads
    few: int = 40_000  # for nets
    scored: int = 40_000
    others: int = 10_000  # in other sets
    foreign: int = 20_000  # of random DNA
    val: int = 10_000
    speed: int = 500_000
    long: int = 4_000


QUICK = Sizes(100_000, 2_000, 4_000, 2_000, 2_000, 1_000, 100_000, 200)


def main() -> int:
    words = [word for word in sys.argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    quick = options.get("quick") == "true"
    folder = Path(options.get("dir") or tempfile.mkdtemp(prefix="classify-"))
    data = Data(Path(words[0]), folder, QUICK if quick else Sizes())
    data.make()
    name = "classify-quick" if quick else "classify"
    file = RESULTS / f"{name}.json"
    result: Result = json.loads(file.read_text()) if file.exists() else {}
    nets = [lambda: naive_bayes(data), *(lambda n=n: learned(data, n, "few", NETS[n]) for n in NETS)]
    for measure in (
        lambda: kraken(data), lambda: exact(data), lambda: learned(data, "kmer-linear", "deep", ["epochs=1"]),
        *(nets if options.get("nets") == "true" else []),
    ):  # fmt: skip
        found = measure()
        result[found["name"]] = found
        save(name, result)
        print(found["name"], {key: value for key, value in found.items() if not isinstance(value, dict)}, flush=True)
    if not quick:
        write_page(result, data.rows)
    if "dir" not in options:
        shutil.rmtree(folder)
    return 0


@dataclass(frozen=True)
class Data:
    """Genomes, and the reads simulated from them."""

    genomes: Path
    folder: Path
    sizes: Sizes

    @property
    def mapping(self) -> Path:
        return self.folder / "species.tsv"

    def files(self, role: str, leave_out: bool = False, only: Sequence[str] = ()) -> list[Path]:
        with (self.genomes / "genomes.tsv").open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        wanted = [row for row in rows if row["role"] == role and not (leave_out and row["species"] in LEFT_OUT)]
        return [self.genomes / row["file"] for row in wanted if not only or row["species"] in only]

    def make(self) -> None:
        """Simulate the files that are missing."""
        sizes, train, held = self.sizes, self.files("train"), self.files("heldout")
        self._simulate("val", train, sizes.val, 11)  # writes the mapping of all species
        self._simulate("known", train, sizes.scored, 12)
        self._simulate("heldout", held, sizes.scored, 13)
        self._simulate("long", held, sizes.long, 14, "--profile", "ont")
        for seed, (name, (length, rate)) in enumerate(LENGTHS.items(), 15):
            self._simulate(name, held, sizes.others, seed, "--length", length, "--error", rate)
        self._simulate("outside", self.files("train", only=LEFT_OUT), sizes.others, 19)
        self._simulate("kept", self.files("heldout", leave_out=True), 9 * sizes.others // 10, 20)
        for name in ("deep.fa.gz", "few.fa.gz", "speed.fa"):
            self._simulate(name, train, getattr(sizes, name.split(".")[0]), 21, "--abundance", "length")
        if not (self.folder / "mixed.fa").exists():
            lines = (self.folder / "outside.fa").read_text().splitlines(keepends=True)[: 2 * sizes.others // 10]
            (self.folder / "mixed.fa").write_text((self.folder / "kept.fa").read_text() + "".join(lines))
            bases = np.random.default_rng(0).choice(list("ACGT"), (sizes.foreign, 150))
            texts = [f">lbl|-1||150|random{number}\n{''.join(row)}\n" for number, row in enumerate(bases)]
            (self.folder / "random.fa").write_text("".join(texts))

    def _simulate(self, name: str, genomes: Sequence[Path], count: int, seed: int, *options: object) -> None:
        out = self.folder / (name if "." in name else f"{name}.fa")
        if not out.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            more = ["--index-dir", self.folder / "index", "--reads", count, "--seed", seed, *options]
            more += [] if "--abundance" in options else ["--abundance", "equal"]
            millstream("simulate", *genomes, "-o", out, "--mapping", self.mapping, *more)

    def labels(self, part: str) -> np.ndarray:
        with (self.folder / f"{part}.fa").open() as file:
            return np.array([int(line.split("|", 2)[1]) for line in file if line[0] == ">"])

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        with self.mapping.open() as file:
            return list(csv.DictReader(file, delimiter="\t"))

    @cached_property
    def genus(self) -> np.ndarray:
        """The genus of each class, by number."""
        names = [row["genus"] for row in self.rows]
        return np.array([names.index(name) for name in names])


@dataclass(frozen=True)
class Answers:
    """Of each read: the class, the genus (-1: none), and the probability of what it is assigned to."""

    classes: np.ndarray
    genera: np.ndarray
    likely: np.ndarray


def exact(data: Data) -> Result:
    """kmer-exact, from the genomes, as users train it."""
    found: Result = {"name": "kmer-exact"}
    runs = {False: data.folder / "run-exact", True: data.folder / "run-outside"}
    for leave_out, run in runs.items():
        genomes = data.folder / f"genomes-{leave_out}"
        shutil.rmtree(genomes, ignore_errors=True)
        genomes.mkdir()
        for file in data.files("train", leave_out):
            (genomes / file.name).symlink_to(file.absolute())
        train = lambda run=run, genomes=genomes: _train(data, run, f"{genomes}/", "kmer-exact", [])  # noqa: E731
        cost = measured(train)
        found |= {} if leave_out else {f"train_{name}": value for name, value in cost.items()}
    found |= speeds(lambda threads: classify(data, runs[False], "speed", pinned=threads))
    return found | {"sets": _sets(data, lambda part, run: ours(data, runs[run], part), SETS, outside=True)}


def learned(data: Data, model: str, reads: str, settings: Sequence[str]) -> Result:
    """One of our classifiers that learns from simulated reads."""
    run = data.folder / f"run-{model}"
    more = [f"hf={random_model(data.folder / 'random')}"] if model == "hf" else []
    cost = measured(lambda: _train(data, run, data.folder / f"{reads}.fa.gz", model, [*settings, *more]))
    found: Result = {"name": model} | {f"train_{name}": value for name, value in cost.items()}
    is_fast = model not in NETS
    if is_fast:
        found |= speeds(lambda threads: classify(data, run, "speed", pinned=threads))
    parts = (*SETS, "random") if is_fast else SETS[:2]
    return found | {"sets": _sets(data, lambda part, _: ours(data, run, part), parts)}


def naive_bayes(data: Data) -> Result:
    peer = NaiveBayes(8, len(data.rows))
    found: Result = {"name": "naive Bayes, 8-mers"}
    found |= {f"train_{n}": v for n, v in measured(lambda: peer.fit(data.folder / "deep.fa.gz")).items()}

    def answers(part: str, _: bool) -> Answers:
        classes, likely = peer.classify(data.folder / f"{part}.fa")
        return Answers(classes, data.genus[classes], likely)

    return found | {"sets": _sets(data, answers, ("known", "heldout"))}


def kraken(data: Data) -> Result:
    """Its database is built from the genomes themselves; --confidence gives the curve."""
    taxa = {int(row["tax_id"]): int(row["class_id"]) for row in data.rows}
    peers = {leave_out: KrakenPeer(data.folder / f"kraken-{leave_out}", taxa) for leave_out in (False, True)}
    found: Result = {"name": "Kraken 2"}
    for leave_out, peer in peers.items():
        cost = measured(lambda peer=peer, out=leave_out: peer.build(data.files("train", out), data.mapping))
        found |= {} if leave_out else {f"train_{name}": value for name, value in cost.items()}
    reads, out = data.folder / "speed.fa", data.folder / "kraken.out"
    found |= speeds(lambda threads: peers[False].write(reads, out, threads=threads))

    def answers(part: str, leave_out: bool, confidence: float = 0.0) -> Answers:
        classes, genera = peers[leave_out].classify(data.folder / f"{part}.fa", confidence)
        genera = np.where(classes >= 0, data.genus[classes], genera)
        return Answers(classes, genera, (classes >= 0).astype(float))

    found["sets"] = _sets(data, answers, SETS, outside=True)
    for part in ("known", "heldout"):
        labels = data.labels(part)
        points = [scored(labels, answers(part, False, c), data.genus) for c in CONFIDENCES]
        found["sets"][part]["curve"] = [[p["precision"], p["recall"]] for p in (found["sets"][part], *points)]
    return found


def _sets(
    data: Data, answers: Callable[[str, bool], Answers], parts: Sequence[str], *, outside: bool = False
) -> dict[str, Result]:
    """The scores of each set; those of the database without some species, if there is one, are of `without`."""
    found = {part: scored(data.labels(part), answers(part, False), data.genus) for part in parts if part != "random"}
    if "random" in parts or outside:
        found["random"] = scored(data.labels("random"), answers("random", False), data.genus)
    if outside:
        is_out = np.array([row["species"] in LEFT_OUT for row in data.rows])
        for part in ("outside", "mixed"):
            labels = data.labels(part)
            found[part] = scored(np.where(is_out[labels], -1, labels), answers(part, True), data.genus, labels)
    return found


def ours(data: Data, run: Path, part: str) -> Answers:
    """At threshold 0 for the curve: `scored` applies the default one, 0.5."""
    out = classify(data, run, part, "--threshold", 0)
    with out.open() as file:
        rows = [(int(row["class"] or -1), float(row["probability"])) for row in csv.DictReader(file, delimiter="\t")]
    classes, likely = (np.array(column) for column in zip(*rows, strict=True))
    genera = np.where((classes >= 0) & (likely >= 0.5), data.genus[classes], -1)
    if part in ("heldout", "outside"):  # the genus, also where no species reaches the threshold
        names = [row["genus"] for row in data.rows]
        with classify(data, run, part).open() as file:
            taxa = [(row["rank"], row["taxon"]) for row in csv.DictReader(file, delimiter="\t")]
        is_only_genus = np.array([rank == "genus" for rank, _ in taxa])
        genera[is_only_genus] = [names.index(taxon) for rank, taxon in taxa if rank == "genus"]
    return Answers(classes, genera, likely)


def classify(data: Data, run: Path, part: str, *options: object, pinned: int | None = None) -> Path:
    out = data.folder / f"{run.name}-{part}.tsv"
    more = ["--index-dir", data.folder / "index", "--force", *options]
    millstream("classify", run, data.folder / f"{part}.fa", "-o", out, *more, pinned=pinned)
    return out


def scored(labels: np.ndarray, found: Answers, genus: np.ndarray, truth: np.ndarray | None = None) -> Result:
    """Per species, at the default threshold, and the curve over all. `truth`: labels with those of species left out."""
    is_called = found.classes >= 0
    predicted = np.where(is_called & (found.likely >= 0.5), found.classes, -1)
    right, classified = (predicted == labels) & (labels >= 0), predicted >= 0
    result: Result = {"reads": len(labels), "classified": int(classified.sum())}
    if truth is not None:
        is_genus = (found.genera >= 0) & (genus[truth] == found.genera)
        result["wrong_of_outside"] = float(classified[labels < 0].mean())
        result["right_genus"] = float(is_genus.mean())
    if (labels < 0).all():
        return result
    classes = np.unique(labels[labels >= 0])
    f1 = [2 * (right & (labels == c)).sum() / ((predicted == c).sum() + (labels == c).sum()) for c in classes]
    order = np.argsort(np.where(is_called, -found.likely, 1), kind="stable")[: int(is_called.sum())]
    hits = np.cumsum((found.classes == labels)[order])
    is_last = np.append(np.diff(found.likely[order]) != 0, True)
    num_known = int((labels >= 0).sum())
    places = np.flatnonzero(is_last)
    places = places[np.unique(np.linspace(0, len(places) - 1, 400).astype(int))]
    result |= {
        "precision": float(right.sum() / max(classified.sum(), 1)), "recall": float(right.sum() / num_known),
        "macro_f1": float(np.mean(f1)), "recall_at_0": float(hits[-1] / num_known),
        "curve": [[float(hits[p] / (p + 1)), float(hits[p] / num_known)] for p in places],
    }  # fmt: skip
    by_genus = np.where(labels >= 0, genus[labels], -1)
    for name, truths, answers in (("species", labels, predicted), ("genus", by_genus, found.genera)):
        result[name] = {
            int(c): [float((answers[truths == c] == c).mean()), float((truths[answers == c] == c).mean())]
            for c in np.unique(truths[truths >= 0]) if (answers == c).any()
        }  # fmt: skip
    return result


def speeds(work: Callable[[int], object]) -> Result:
    """With one thread and two: seconds, CPU time, and the peak memory."""
    return {f"threads_{threads}": measured(lambda threads=threads: work(threads)) for threads in (1, 2)}


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds, CPU time and peak memory of this process tree."""
    before = _cpu_s()
    with peak_pss() as memory:
        seconds = clock(work)
    return {"s": seconds, "cpu_s": _cpu_s() - before, "bytes": memory.peak_bytes, "file_bytes": memory.peak_file_bytes}


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _train(data: Data, run: Path, reads: Path | str, model: str, settings: Sequence[str]) -> None:
    shutil.rmtree(run, ignore_errors=True)
    given = {"data.train": reads, "data.val": data.folder / "val.fa", "mapping": data.mapping, "model": model}
    given |= {"memory": MEMORY, "out": run, "data.index_dir": data.folder / "index"}
    millstream("train", *(f"{name}={value}" for name, value in given.items()), *settings)


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


def millstream(command: str, *arguments: object, pinned: int | None = None) -> None:
    """Run a command, on this many cores if it is `pinned`."""
    cores = sorted(os.sched_getaffinity(0))[:pinned]
    words = [sys.executable, "-m", "millstream", command, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    if done.returncode:
        sys.exit(f"millstream {command}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
