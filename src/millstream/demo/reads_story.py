"""The second half of `millstream demo`: classify half a million reads of fictional bacteria by species."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.core.console import format_bytes, format_seconds, quoted, say
from millstream.demo.traces_story import child_decides, command, shown
from millstream.errors import BadSetting
from millstream.reads.settings import HEADERS

GENERA = ("Alba", "Brevia", "Cinera", "Durula", "Elgia", "Fenna")
SPECIES = ("minor", "major")
STRAINS = ("train", "val", "strains")  # to train on; to select by; never seen in training
FIRST_TAXON = 9_000_001  # above the ids of NCBI
BASES = np.frombuffer(b"ACGT", np.uint8)
CONCENTRATION, CONTEXT = 3.0, 3  # of the Dirichlet prior of base frequencies; number of bases they depend on
PIECE = 1000  # bases of each region that is unique to a strain
WIDTH = 80
Genome = NDArray[np.uint8]


@dataclass(frozen=True)
class ReadStory:
    """The number of bases and reads, and the training settings of the classifiers."""

    genome_bases: int = 300_000
    reads: int = 500_000
    scored: int = 10_000  # reads of each other split
    train: Sequence[str] = (
        "model=kmer-linear,cnn",
        "memory=300MB",
        "epochs=1",
        "batch_size=256",
        "width=32",
        "layers=2",
    )


def run(folder: Path, story: ReadStory) -> None:
    """Run the second half; prints each step to stdout."""
    started = time.monotonic()
    if folder.exists():
        if not (folder / "genomes" / "train").is_dir():
            raise BadSetting(
                f"{folder}: exists and was not made by the demo. Choose another folder: millstream demo FOLDER"
            )
        shutil.rmtree(folder)
    genomes, trained, mapping = folder / "genomes", folder / "run", folder / "species.tsv"
    num = make_genomes(genomes, story.genome_bases, seed=0)
    kinds = f"{num // len(STRAINS)} species in {len(GENERA)} genera, {len(STRAINS)} strains of each"
    print(f"1. Genomes of fictional bacteria, {kinds}: {genomes}")
    files = {
        "train.fa.gz": ("train", story.reads),
        "val.fa": ("val", story.scored),
        "known.fa": ("train", story.scored),
        "strains.fa": ("strains", story.scored),
    }
    print("2. Reads of 150 bases with an error rate of 1 %, labelled with their class:", flush=True)
    for seed, (name, (strain, count)) in enumerate(files.items()):
        drawn = command("simulate", str(genomes / strain), "-o", str(folder / name), "--reads", str(count))
        _run_command([*drawn, "--mapping", str(mapping), "--seed", str(seed)])
    size = format_bytes((folder / "train.fa.gz").stat().st_size)
    print(f"3. Index the gzipped file in place ({size}):", flush=True)
    _run_command(command("index", str(folder / "train.fa.gz"), "--header-regex", HEADERS))
    print("4. Train two classifiers; reads of strains they never saw are the fair test:", flush=True)
    splits = [f"data.train={folder / 'train.fa.gz'}", f"data.val={folder / 'val.fa'}"]
    tests = f"data.test={folder / 'known.fa'},{folder / 'strains.fa'}"
    _run_command(command("train", *splits, tests, f"mapping={mapping}", f"out={trained}", *story.train))
    print("5. The better model classifies every read and writes a Kraken 2-style report:", flush=True)
    report = folder / "strains.kreport"
    classify = command("classify", str(trained), str(folder / "strains.fa"), "-o", str(folder / "strains.tsv"))
    _run_command([*classify, "--threshold", "0.9", "--kraken-output", str(report)])
    print("\n".join(f"   {line}" for line in report.read_text().splitlines()[:6]))
    print(f"6. The report, after {format_seconds(time.monotonic() - started)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def make_genomes(folder: Path, num_bases: int, *, seed: int) -> int:
    """Write a genome for every strain of every species; returns their number.

    Each genus has its own base frequencies, which depend on the three bases before. Its species differ in one base in
    eight. A strain differs from its species in one base in fifty, and a tenth of its genome is unique to it.
    """
    rng = np.random.default_rng(seed)
    number = 0
    for genus in GENERA:
        frequencies = rng.dirichlet(np.full(4, CONCENTRATION), 4**CONTEXT)
        ancestor = _sample(frequencies, num_bases, rng)
        for species in SPECIES:
            own = _substituted(ancestor, 1 / 8, rng)
            for strain in STRAINS:
                genome = _substituted(own, 1 / 50, rng)
                for start in range(0, num_bases - PIECE + 1, 10 * PIECE):
                    genome[start : start + PIECE] = _sample(frequencies, PIECE, rng)
                name = f"{FIRST_TAXON + number // len(STRAINS)}_{genus}_{species}"
                _write(folder / strain / f"{name}.fna", f"{genus}_{species}_{strain}", genome)
                number += 1
    return number


def _sample(frequencies: NDArray[np.float64], num_bases: int, rng: np.random.Generator) -> Genome:
    """A sequence in which each base is sampled given those before it."""
    ends: list[list[float]] = np.cumsum(frequencies, axis=1)[:, :3].tolist()
    state, codes = 0, bytearray(num_bases)
    for position, drawn in enumerate(rng.random(num_bases).tolist()):
        a, b, c = ends[state]
        code = (drawn > a) + (drawn > b) + (drawn > c)
        codes[position] = code
        state = (4 * state + code) % len(ends)
    return BASES[np.frombuffer(codes, np.uint8)]


def _substituted(genome: Genome, rate: float, rng: np.random.Generator) -> Genome:
    """A copy with substitutions at this rate per base."""
    changed = genome.copy()
    at = np.flatnonzero(rng.random(genome.size) < rate)
    changed[at] = BASES[(np.searchsorted(BASES, genome[at]) + rng.integers(1, 4, at.size)) % 4]
    return changed


def _write(path: Path, name: str, genome: Genome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = genome.tobytes().decode()
    lines = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    path.write_text("\n".join([f">{name}", *lines, ""]))


def _run_command(arguments: list[str]) -> None:
    print(f"   {shown(arguments)}", flush=True)
    with child_decides():
        subprocess.run(arguments, check=True)
