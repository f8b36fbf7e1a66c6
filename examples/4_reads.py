"""From genomes to a classifier of gzipped reads, with 300 MB of memory: simulate, index, train, classify.

The genomes are synthetic. In a shell: millstream simulate, millstream index, millstream train, millstream classify.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.reads.kind import HEADERS
from millstream.reads.simulate import SimulateSettings, simulate
from millstream.report import report_of

SPECIES = {9001: "Alba_minor", 9002: "Alba_major", 9003: "Brevia_minor", 9004: "Brevia_major"}
FILES = {"train.fa.gz": ("first", 20_000), "val.fa": ("second", 1000), "test.fa": ("third", 1000)}


def main(folder: Path) -> None:
    reads, mapping = folder / "reads", folder / "reads" / "species.tsv"
    shutil.rmtree(reads, ignore_errors=True)  # finished output is never overwritten
    make_genomes(reads)
    for seed, (name, (strain, count)) in enumerate(FILES.items()):  # a different strain for each file: a fair test
        settings = SimulateSettings(reads=count, length=150, error=0.01, seed=seed)
        simulate(sorted((reads / strain).glob("*.fna")), [reads / name], settings=settings, mapping=mapping)
    train = ms.open(reads / "train.fa.gz", header_regex=HEADERS, mapping=mapping)  # indexed in place, as it is
    print(f"{len(train)} reads; number 12345 is {train[12345].name}: {train[12345].sequence[:40]}...")
    feature = ms.features.tokens("kmer(6)", columns=["label"], reverse_complement=0.5)
    batch = next(iter(ms.Loader(train, batch_size=256, features=feature, seed=7, memory="300MB")))
    print("a batch for your own model:", {name: tuple(values.shape) for name, values in batch.items()})
    files = {name.split(".")[0]: reads / name for name in FILES}  # train, val, test
    run = ms.train(files, mapping=str(mapping), model="kmer-linear", out=str(reads / "run"), memory="300MB")
    print(report_of(run.path).lines())
    out, counts = reads / "test.tsv", reads / "test.kreport"
    done = ms.classify(run.path, files["test"], out, threshold=0.9, report=counts, memory="300MB")
    print(f"{done.num_classified} of {done.num_rows} reads are assigned to a taxon with at least 90 % probability:")
    print(f"{counts.read_text()}Wrote {out}. Next: millstream report {run.path}, or open examples/explore.ipynb")


def make_genomes(folder: Path) -> None:
    """Species of a genus differ in a tenth of their bases, strains of a species in a twentieth."""
    rng = np.random.default_rng(0)
    genera = {"Alba": rng.integers(4, size=50_000), "Brevia": rng.integers(4, size=50_000)}
    for taxon, name in SPECIES.items():
        species = substituted(genera[name.split("_")[0]], 0.1, rng)
        for strain, _ in FILES.values():
            (folder / strain).mkdir(parents=True, exist_ok=True)
            sequence = np.frombuffer(b"ACGT", np.uint8)[substituted(species, 0.05, rng)].tobytes().decode()
            (folder / strain / f"{taxon}_{name}.fna").write_text(f">{name}\n{sequence}\n")


def substituted(genome: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(genome)) < rate, rng.integers(4, size=len(genome)), genome)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
