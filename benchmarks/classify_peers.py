"""Peers of the read classifiers: Kraken 2, and naive Bayes over k-mers as in the RDP classifier."""

import csv
import gzip
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numba import njit

LENGTH = 150
CHUNK = 100_000
CODES = np.full(256, 4, np.uint8)
CODES[np.frombuffer(b"ACGT", np.uint8)] = np.arange(4)


class NaiveBayes:
    """Multinomial, over canonical k-mers, with add-one smoothing and a uniform prior."""

    def __init__(self, k: int, num_classes: int) -> None:
        self.k = k
        self.counts = np.ones((4**k, num_classes), np.float32)
        self.weights = np.empty((0, 0), np.float32)

    def fit(self, path: Path) -> None:
        for labels, codes in _chunks(path):
            _count(codes, labels, self.k, self.counts)
        self.weights = np.log(self.counts / self.counts.sum(axis=0))

    def classify(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """The most likely class of every read, and its probability."""
        classes, probabilities = [], []
        for _, codes in _chunks(path):
            scores = np.zeros((len(codes), self.counts.shape[1]), np.float32)
            _score(codes, self.k, self.weights, scores)
            classes.append(scores.argmax(axis=1))
            probabilities.append(1 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1))
        return np.concatenate(classes), np.concatenate(probabilities)


class KrakenPeer:
    """The commands of Kraken 2, as in its manual."""

    def __init__(self, database: Path, classes: Mapping[int, int]) -> None:
        self.database, self.classes = database, classes

    def build(self, genomes: Sequence[Path], mapping: Path) -> None:
        """Build a taxonomy of root, genera and species, add the genomes, build the hash table, unless it is there."""
        if (self.database / "hash.k2d").exists():
            return
        (self.database / "taxonomy").mkdir(parents=True, exist_ok=True)
        self._write_taxonomy(mapping)
        for genome in genomes:
            taxon = re.match(r"\d+", genome.name)
            plain = self.database / genome.name.removesuffix(".gz")
            with gzip.open(genome, "rt") as file, plain.open("w") as out:
                for line in file:
                    out.write(f">kraken:taxid|{taxon[0]}|{line[1:]}" if line[0] == ">" and taxon else line)
            self._run("kraken2-build", "--db", self.database, "--add-to-library", plain, "--no-masking")
        self._run("kraken2-build", "--db", self.database, "--build", "--threads", "2", "--no-masking")

    def write(self, reads: Path, out: Path, *, confidence: float = 0.0, threads: int = 1) -> str:
        """Kraken's own output; the text of it if `out` is /dev/stdout."""
        arguments = ["--confidence", confidence, "--threads", threads, "--output", out, reads]
        return self._run("kraken2", "--db", self.database, *arguments)

    def classify(self, reads: Path, confidence: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """The class of every read, and its genus if that is all; -1 if there is none."""
        output = self.write(reads, Path("/dev/stdout"), confidence=confidence)
        taxa = [int(line.split("\t", 3)[2]) for line in output.splitlines() if line[:1] in "CU"]
        genera = self.genera()
        classes = np.array([self.classes.get(taxon, -1) for taxon in taxa])
        return classes, np.array([genera.get(taxon, -1) for taxon in taxa])

    def genera(self) -> dict[int, int]:
        """The first class of each genus, by the taxon of the genus."""
        nodes = [line.split("\t|\t") for line in (self.database / "taxonomy" / "nodes.dmp").read_text().splitlines()]
        found: dict[int, int] = {}
        for node in nodes:
            if node[2] == "species":
                found.setdefault(int(node[1]), self.classes[int(node[0])])
        return found

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

    def _run(self, *arguments: object) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # it obeys it
        words = [str(word) for word in arguments]
        return subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout


def _chunks(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Labels and base codes of reads in two-line FASTA."""
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        while lines := list(islice(file, 2 * CHUNK)):
            labels = np.array([int(line.split(b"|", 2)[1]) for line in lines[::2]])
            flat = np.frombuffer(b"".join(lines[1::2]), np.uint8).reshape(-1, LENGTH + 1)
            yield labels, CODES[flat[:, :LENGTH]]


@njit(cache=False)
def _count(codes, labels, k, counts):
    kmers = np.empty(codes.shape[1], np.int64)
    for read in range(codes.shape[0]):
        for i in range(_canonical_kmers(codes[read], k, kmers)):
            counts[kmers[i], labels[read]] += 1


@njit(cache=False)
def _score(codes, k, weights, scores):
    kmers = np.empty(codes.shape[1], np.int64)
    for read in range(codes.shape[0]):
        for i in range(_canonical_kmers(codes[read], k, kmers)):
            for c in range(scores.shape[1]):
                scores[read, c] += weights[kmers[i], c]


@njit(cache=False)
def _canonical_kmers(codes, k, kmers):
    """Fill `kmers` with the canonical k-mers of a read that have no N; returns how many there are."""
    count = known = forward = backward = 0
    for i in range(codes.shape[0]):
        code = np.int64(codes[i])
        known = 0 if code > 3 else known + 1
        forward = (forward << 2 | (code & 3)) & (4**k - 1)
        backward = backward >> 2 | (3 - (code & 3)) << 2 * (k - 1)
        if known >= k:
            kmers[count] = min(forward, backward)
            count += 1
    return count
