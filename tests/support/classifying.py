"""Small files of reads, and a run of classifiers trained on the first of them."""

from pathlib import Path

import numpy as np

import millstream as ms
from millstream.reads.simulate import SimulateSettings, simulate

READS = 300  # per file


def make_run(path: Path) -> tuple[list[Path], Path]:
    """Three files, plain and gzipped, without indexes beside them; and a run."""
    rng, genomes = np.random.default_rng(0), list[Path]()
    for number in range(2):
        genomes.append(path / f"{562 + number}_genome.fna")
        genomes[-1].write_text(f">{number}\n{''.join(rng.choice(list('ACGT'), 3000))}\n")
    files = [path / name for name in ("a.fa", "b.fq.gz", "c.fa.gz")]
    indexes = path / "training-indexes"
    for seed, file in enumerate(files):
        settings = SimulateSettings(reads=READS, seed=seed)
        simulate(genomes, [file], settings=settings, mapping=path / "species.tsv", index_dir=indexes)
    data = {"train": str(files[0]), "val": str(files[1]), "index_dir": str(indexes)}
    run = path / "run"
    ms.train(data, mapping=str(path / "species.tsv"), model="kmer-linear", epochs=1, bits=12, out=str(run))
    return files, run


def write_genomes(folder: Path) -> None:
    """Three FASTA files to pack together."""
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.fa").write_text("".join(f">{number}.{i}\n{'ACGTN' * (i + 1)}\n" for i in range(20)))
