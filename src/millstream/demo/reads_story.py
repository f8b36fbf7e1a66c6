"""The second part of `millstream demo`: strains of made-up bacteria, half a million of their reads, who is who."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.console import format_bytes, format_seconds, quoted, say
from millstream.demo import child_decides, command, shown
from millstream.errors import BadSetting
from millstream.train.read_settings import HEADERS

GENERA = ("Alba", "Brevia", "Cinera", "Durula", "Elgia", "Fenna")
SPECIES = ("minor", "major")
STRAINS = ("train", "val", "strains")  # to learn from; to choose by; never seen before
FIRST_TAXON = 9_000_001  # beyond those of NCBI
BASES = np.frombuffer(b"ACGT", np.uint8)
HABIT, MEMORY = 3.0, 3  # the smaller, the stronger habits are; of how many letters
PIECE = 1000  # letters that strains have of their own, at a time
WIDTH = 80
Letters = NDArray[np.uint8]


@dataclass(frozen=True)
class ReadStory:
    """How much there is of everything, and how it is trained on."""

    letters: int = 300_000  # of a genome
    reads: int = 500_000
    scored: int = 10_000  # reads of each other part
    train: Sequence[str] = (
        "model=kmer-linear,cnn",
        "memory=300MB",
        "epochs=1",
        "batch_size=256",
        "width=32",
        "layers=2",
    )


def run(folder: Path, story: ReadStory) -> None:
    """The whole part, with its story on stdout."""
    begun = time.monotonic()
    if folder.exists():
        if not (folder / "genomes" / "train").is_dir():
            raise BadSetting(
                f"{folder}: is there, and not made by a demo. Choose another folder: millstream demo FOLDER"
            )
        shutil.rmtree(folder)
    genomes, trained, mapping = folder / "genomes", folder / "run", folder / "species.tsv"
    num = make_genomes(genomes, story.letters, seed=0)
    kinds = f"{num // len(STRAINS)} species in {len(GENERA)} genera, {len(STRAINS)} strains of each"
    print(f"1. The genomes of made-up bacteria, {kinds}: {genomes}")
    parts = {
        "train.fa.gz": ("train", story.reads),
        "val.fa": ("val", story.scored),
        "known.fa": ("train", story.scored),
        "strains.fa": ("strains", story.scored),
    }
    print("2. Reads of 150 letters with 1 % errors, labelled with their class:", flush=True)
    for seed, (name, (strain, count)) in enumerate(parts.items()):
        drawn = command("simulate", str(genomes / strain), "-o", str(folder / name), "--reads", str(count))
        _do([*drawn, "--mapping", str(mapping), "--seed", str(seed)])
    print(
        f"3. The gzipped file is indexed as it is, {format_bytes((folder / 'train.fa.gz').stat().st_size)}:", flush=True
    )
    _do(command("index", str(folder / "train.fa.gz"), "--header-regex", HEADERS))
    print("4. Two classifiers learn; reads of strains that were never seen are the honest test:", flush=True)
    files = [f"data.{part}={folder / name}" for part, name in (("train", "train.fa.gz"), ("val", "val.fa"))]
    tests = f"data.test={folder / 'known.fa'},{folder / 'strains.fa'}"
    _do(command("train", *files, tests, f"mapping={mapping}", f"out={trained}", *story.train))
    print("5. The better one names every read of a file, and counts them as Kraken 2 does:", flush=True)
    report = folder / "strains.kreport"
    named = command("classify", str(trained), str(folder / "strains.fa"), "-o", str(folder / "strains.tsv"))
    _do([*named, "--threshold", "0.9", "--kraken-output", str(report)])
    print("\n".join(f"   {line}" for line in report.read_text().splitlines()[:6]))
    print(f"6. The report, after {format_seconds(time.monotonic() - begun)}: {trained / 'report.html'}")
    say(f"Next: millstream view {quoted(trained)}")


def make_genomes(folder: Path, letters: int, *, seed: int) -> int:
    """Write a genome of every strain of every species; how many there are.

    A genus has habits of its own: which letter follows which three. Species of it differ in one letter of eight. A
    strain differs from its species in one of fifty, and a tenth of it is found in no other.
    """
    rng = np.random.default_rng(seed)
    number = 0
    for genus in GENERA:
        habits = rng.dirichlet(np.full(4, HABIT), 4**MEMORY)
        ancestor = _drawn(habits, letters, rng)
        for species in SPECIES:
            own = _changed(ancestor, 1 / 8, rng)
            for strain in STRAINS:
                genome = _changed(own, 1 / 50, rng)
                for start in range(0, letters - PIECE + 1, 10 * PIECE):
                    genome[start : start + PIECE] = _drawn(habits, PIECE, rng)
                name = f"{FIRST_TAXON + number // len(STRAINS)}_{genus}_{species}"
                _write(folder / strain / f"{name}.fna", f"{genus}_{species}_{strain}", genome)
                number += 1
    return number


def _drawn(habits: NDArray[np.float64], letters: int, rng: np.random.Generator) -> Letters:
    """So many letters, each chosen by those before it."""
    ends: list[list[float]] = np.cumsum(habits, axis=1)[:, :3].tolist()
    state, codes = 0, bytearray(letters)
    for place, chance in enumerate(rng.random(letters).tolist()):
        a, b, c = ends[state]
        code = (chance > a) + (chance > b) + (chance > c)
        codes[place] = code
        state = (4 * state + code) % len(ends)
    return BASES[np.frombuffer(codes, np.uint8)]


def _changed(genome: Letters, share: float, rng: np.random.Generator) -> Letters:
    """With this share of letters replaced by others."""
    changed = genome.copy()
    at = np.flatnonzero(rng.random(genome.size) < share)
    changed[at] = BASES[(np.searchsorted(BASES, genome[at]) + rng.integers(1, 4, at.size)) % 4]
    return changed


def _write(path: Path, name: str, genome: Letters) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = genome.tobytes().decode()
    lines = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    path.write_text("\n".join([f">{name}", *lines, ""]))


def _do(arguments: list[str]) -> None:
    print(f"   {shown(arguments)}", flush=True)
    with child_decides():
        subprocess.run(arguments, check=True)
