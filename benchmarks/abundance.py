"""Abundances by expectation maximisation against plain counts, on uneven communities of real genomes.

    python benchmarks/abundance.py GENOMES             # about 10 minutes, 1 GB of disk
    python benchmarks/abundance.py GENOMES dir=FOLDER  # working folder; existing files are reused
    python benchmarks/abundance.py GENOMES reads=20000 training=200000

GENOMES is as for classify.py. Two classifiers learn from the train strains. Communities are lognormal, of the same
strains (known) or of other strains of the species (heldout), three of each; the truth is the species of the reads that
were drawn. L1 is the summed absolute difference of the shares of species, among the reads that are classified.
`covered` is the share of species whose true share is in the 95 % interval. Writes benchmarks/results/abundance.json.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from classify import millstream
from measuring import Result, save

MODELS = ("kmer-exact", "kmer-linear")
SEEDS = (3, 4, 5)
PARTS = {"known": "train", "heldout": "heldout"}


def main() -> int:
    words = [word for word in sys.argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    genomes = Path(words[0])
    folder = Path(options.get("dir") or tempfile.mkdtemp(prefix="abundance-"))
    folder.mkdir(parents=True, exist_ok=True)
    make_run(genomes, folder, int(options.get("training", 2_000_000)))
    result: Result = {}
    for model in MODELS:
        for part, role in PARTS.items():
            for seed in SEEDS:
                reads = folder / f"{part}-{seed}.fa"
                simulate(
                    genomes,
                    role,
                    reads,
                    "--abundance",
                    "lognormal",
                    "--seed",
                    seed,
                    "--reads",
                    options.get("reads", 100_000),
                )
                out = folder / f"{model}-{part}-{seed}.tsv"
                settings = ["--model", model, "--report", out.with_suffix(".kreport"), "--index-dir", folder / "index"]
                run("classify", folder / "run", reads, "-o", out, *settings, "--force")
                result[f"{model} {part} {seed}"] = found = compared(reads, out.with_suffix(".abundance.tsv"))
                print(model, part, seed, found, flush=True)
    save("abundance", result)
    if "dir" not in options:
        shutil.rmtree(folder)
    return 0


def make_run(genomes: Path, folder: Path, reads: int) -> None:
    """Both classifiers, trained on the train strains."""
    simulate(genomes, "train", folder / "train.fa.gz", "--reads", reads, "--seed", 1)
    simulate(genomes, "train", folder / "val.fa", "--reads", 5000, "--abundance", "equal", "--seed", 2)
    if not (folder / "run" / "predictions.parquet").exists():
        data = [f"data.{name}={folder / file}" for name, file in (("train", "train.fa.gz"), ("val", "val.fa"))]
        settings = [f"data.index_dir={folder / 'index'}", f"mapping={folder / 'species.tsv'}", f"out={folder / 'run'}"]
        run("train", *data, *settings, f"model={','.join(MODELS)}", "epochs=1", "memory=2GB")


def simulate(genomes: Path, role: str, out: Path, *settings: object) -> None:
    if not out.exists():
        with (genomes / "genomes.tsv").open() as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if row["role"] == role]
        where = ["--mapping", out.parent / "species.tsv", "--index-dir", out.parent / "index"]
        run("simulate", *(genomes / row["file"] for row in rows), "-o", out, *where, *settings)


def compared(reads: Path, table: Path) -> Result:
    """Both estimates against the species of the reads."""
    with table.open() as file:
        *rows, unclassified = csv.DictReader(file, delimiter="\t")
    with reads.open() as file:
        drawn = np.bincount([int(line.split("|", 2)[1]) for line in file if line[0] == ">"], minlength=len(rows))
    truth = (drawn / drawn.sum())[[int(row["class"]) for row in rows]]
    counts, em = (np.array([float(row[name]) for row in rows]) for name in ("reads", "estimated_reads"))
    low, high, share = (np.array([float(row[name]) for row in rows]) for name in ("low", "high", "abundance"))
    em /= em.sum()
    scale = np.divide(em, share, out=np.ones_like(em), where=share > 0)  # the interval is that of the genomes
    return {
        "l1_counts": round(float(np.abs(counts / counts.sum() - truth).sum()), 4),
        "l1_em": round(float(np.abs(em - truth).sum()), 4),
        "covered": round(float(((low * scale <= truth) & (truth <= high * scale)).mean()), 3),
        "unclassified": round(float(unclassified["read_share"]), 3),
    }


def run(command: str, *arguments: object) -> None:
    subprocess.run([*millstream(command), *map(str, arguments)], check=True, capture_output=True)


if __name__ == "__main__":
    raise SystemExit(main())
