"""Peers of the classifiers of reads: Kraken 2, and naive Bayes over k-mers as the RDP classifier has it."""

import csv
import gzip
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numba import njit

LENGTH = 150
CHUNK = 100_000
CODES = np.full(256, 4, np.uint8)
CODES[np.frombuffer(b"ACGT", np.uint8)] = np.arange(4)
Measured = Callable[[Callable[[], object]], tuple[float, int]]


class NaiveBayes:
    """Multinomial, over the k-mers of either strand, with one added to every count and the same prior for all."""

    def __init__(self, k: int, num_classes: int) -> None:
        self.k = k
        self.counts = np.ones((4**k, num_classes), np.float32)
        self.weights = np.empty((0, 0), np.float32)

    def fit(self, path: Path) -> None:
        for labels, letters in _chunks(path):
            _count(letters, labels, self.k, self.counts)
        self.weights = np.log(self.counts / self.counts.sum(axis=0))

    def call(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest class of every read, and how likely it is."""
        called, chances = [], []
        for _, letters in _chunks(path):
            scores = np.zeros((len(letters), self.counts.shape[1]), np.float32)
            _score(letters, self.k, self.weights, scores)
            called.append(scores.argmax(axis=1))
            chances.append(1 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1))
        return np.concatenate(called), np.concatenate(chances)


class KrakenPeer:
    """The commands of Kraken 2, as its manual has them."""

    def __init__(self, database: Path, classes: Mapping[int, int]) -> None:
        self.database, self.classes = database, classes

    def build(self, genomes: Sequence[str], mapping: Path) -> None:
        """A taxonomy of root, genera and species, the genomes, and the table."""
        (self.database / "taxonomy").mkdir(parents=True, exist_ok=True)
        self._write_taxonomy(mapping)
        for genome in genomes:
            taxon = re.match(r"\d+", Path(genome).name)
            plain = self.database / Path(genome).name.removesuffix(".gz")
            with gzip.open(genome, "rt") as file, plain.open("w") as out:
                for line in file:
                    out.write(f">kraken:taxid|{taxon[0]}|{line[1:]}" if line[0] == ">" and taxon else line)
            self._run("kraken2-build", "--db", self.database, "--add-to-library", plain, "--no-masking")
        self._run("kraken2-build", "--db", self.database, "--build", "--threads", "2", "--no-masking")

    def call(self, reads: Path, confidence: float) -> np.ndarray:
        """The class of every read; -1 where it calls nothing, or more than one species."""
        said = self._run(
            "kraken2", "--db", self.database, "--confidence", confidence, "--output", "/dev/stdout", reads
        )  # fmt: skip
        taxa = (int(line.split("\t", 3)[2]) for line in said.splitlines() if line[:1] in "CU")
        return np.array([self.classes.get(taxon, -1) for taxon in taxa])

    def speed(self, reads: Path, measured: Measured) -> tuple[dict[int, float], int]:
        """Reads a second by the number of threads, as Kraken itself counts them; and its memory."""
        found: dict[int, float] = {}
        peak = 0
        for threads in (1, 2):
            said: list[str] = []

            def work(threads: int = threads, said: list[str] = said) -> None:
                arguments = ["--threads", threads, "--output", "/dev/null", reads]
                said.append(self._run("kraken2", "--db", self.database, *arguments, errors=True))

            peak = max(peak, measured(work)[1])
            match = re.search(r"processed in ([\d.]+)s \(([\d.]+) Kseq/m", said[0])
            assert match, said[0]
            found[threads] = float(match[2]) * 1000 / 60
        return found, peak

    def _write_taxonomy(self, mapping: Path) -> None:
        with mapping.open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        genera = {name: 90_000_000 + place for place, name in enumerate(dict.fromkeys(row["genus"] for row in rows))}
        nodes = ["1\t|\t1\t|\tno rank\t|\t\t|"]
        names = ["1\t|\troot\t|\t\t|\tscientific name\t|"]
        for name, taxon in genera.items():
            nodes.append(f"{taxon}\t|\t1\t|\tgenus\t|\t\t|")
            names.append(f"{taxon}\t|\t{name}\t|\t\t|\tscientific name\t|")
        for row in rows:
            nodes.append(f"{row['tax_id']}\t|\t{genera[row['genus']]}\t|\tspecies\t|\t\t|")
            names.append(f"{row['tax_id']}\t|\t{row['species']}\t|\t\t|\tscientific name\t|")
        (self.database / "taxonomy" / "nodes.dmp").write_text("\n".join(nodes) + "\n")
        (self.database / "taxonomy" / "names.dmp").write_text("\n".join(names) + "\n")

    def _run(self, *arguments: object, errors: bool = False) -> str:
        done = subprocess.run([str(word) for word in arguments], check=True, capture_output=True, text=True)
        return done.stderr if errors else done.stdout


def _chunks(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Labels and codes of the letters, of reads that have two lines each."""
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        while lines := list(islice(file, 2 * CHUNK)):
            labels = np.array([int(line.split(b"|", 2)[1]) for line in lines[::2]])
            flat = np.frombuffer(b"".join(lines[1::2]), np.uint8).reshape(-1, LENGTH + 1)
            yield labels, CODES[flat[:, :LENGTH]]


@njit(cache=False)
def _count(letters, labels, k, counts):
    for read in range(letters.shape[0]):
        known = forward = backward = 0
        for i in range(letters.shape[1]):
            code = letters[read, i]
            known = 0 if code > 3 else known + 1
            forward = (forward << 2 | (code & 3)) & (4**k - 1)
            backward = backward >> 2 | (3 - (code & 3)) << 2 * (k - 1)
            if known >= k:
                counts[min(forward, backward), labels[read]] += 1


@njit(cache=False)
def _score(letters, k, weights, scores):
    for read in range(letters.shape[0]):
        known = forward = backward = 0
        for i in range(letters.shape[1]):
            code = letters[read, i]
            known = 0 if code > 3 else known + 1
            forward = (forward << 2 | (code & 3)) & (4**k - 1)
            backward = backward >> 2 | (3 - (code & 3)) << 2 * (k - 1)
            if known >= k:
                for c in range(scores.shape[1]):
                    scores[read, c] += weights[min(forward, backward), c]
