"""Genomes in memory: the bases of all files, whose they are, and the class of each."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from millstream.core.console import format_bytes, say
from millstream.core.files import publish
from millstream.errors import BadSetting, BadSource
from millstream.reads.features import COMPLEMENT, UPPER
from millstream.reads.labels import SPECIES, FileClasses, species_of, taxon_of
from millstream.reads.mapping import GENOME_LENGTH, load_mapping
from millstream.reads.open import open_reads
from millstream.reads.reads import Reads
from millstream.reads.tokenizers.kmers import Bases, Numbers

PIECE = 16 << 20  # bases read at a time
READING = 256 << 20  # memory budget of one genome while it is read


@dataclass(frozen=True)
class Genome:
    """One file: its class, and where its sequences are among the bases of all genomes."""

    path: Path
    class_id: int
    tax_id: int  # 0 if it is not known
    names: Sequence[str]
    starts: Numbers
    lengths: Numbers

    def places(self, length: int) -> Numbers:
        """The number of positions in each sequence where a fragment of this length fits."""
        return np.maximum(self.lengths - length + 1, 0)


def load_genomes(
    paths: Sequence[Path], mapping: Path | None, index_dir: Path | None, memory: int
) -> tuple[Bases, list[Genome]]:
    """The bases of all genomes, in upper case, and the genomes."""
    opened = [open_reads([path], index_dir=index_dir, memory=READING) for path in paths]
    total = sum(reads.num_bases for reads in opened)
    if total > memory:
        largest = max(opened, key=lambda reads: reads.num_bases)
        raise BadSetting(
            f"{largest.paths[0]}: {largest.num_bases:,} of the {total:,} bases of all genomes, too many for the memory "
            f"budget of {format_bytes(memory)}. Raise memory to {format_bytes(total * 1.05)}, or give fewer genomes"
        )
    bases = np.empty(total, np.uint8)
    genomes: list[Genome] = []
    at = 0
    for path in paths:
        reads = opened.pop(0)  # decoded blocks are not kept
        numbers = np.arange(len(reads))
        lengths = reads.lengths(numbers)
        first = at
        for piece in _pieces(reads, lengths):
            bases[at : at + piece.size] = UPPER[piece]
            if bad := np.flatnonzero(COMPLEMENT[bases[at : at + piece.size]] == 0)[:1].tolist():
                found = chr(bases[at + bad[0]])
                raise BadSource(f"{path}: {found!r} is not a nucleotide; reads can only be simulated from DNA")
            at += piece.size
        names = [str(name) for name in reads.fetch(numbers, ["name"]).columns["name"]]
        ascii_names = [re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII) for name in names]
        starts = first + np.cumsum(lengths) - lengths
        genomes.append(Genome(path, 0, taxon_of(path, names[0] if names else ""), ascii_names, starts, lengths))
    class_ids = _class_ids(genomes, mapping)
    return bases, [replace(g, class_id=own) for g, own in zip(genomes, class_ids, strict=True)]


def _pieces(reads: Reads, lengths: Numbers) -> Iterator[Bases]:
    """The bases of all sequences in order, some megabytes at a time however long a sequence is."""
    counts = np.maximum(-(-lengths // PIECE), 1)
    numbers = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE
    ends = np.minimum(starts + PIECE, lengths[numbers])
    edges = np.flatnonzero(np.diff(np.cumsum(ends - starts) // PIECE)) + 1
    for some in np.split(np.arange(len(numbers)), edges):
        yield reads.regions(numbers[some], starts[some], ends[some]).flat


def _class_ids(genomes: Sequence[Genome], mapping: Path | None) -> list[int]:
    """The class of each genome: from the mapping, or one per taxon, which are written to it if it does not exist."""
    if mapping is not None and mapping.exists():
        known = FileClasses(load_mapping(mapping))
        if known.mapping.tax_id is None and not known.mapping.files:
            raise BadSource(f"{mapping}: has no column tax_id, and no column file, to look up the genomes by")
        found = [known.find(g.path, partial(int, g.tax_id)) for g in genomes]
        unknown = [genome.path.name for genome, own in zip(genomes, found, strict=True) if own is None]
        if unknown:
            raise BadSource(
                f"{unknown[0]}: its taxon is not in {mapping}. Add it, or its name in a column file, or start the file "
                "name with its taxon: 562_..."
            )
        return [own for own in found if own is not None]
    keys = [genome.tax_id or -1 - place for place, genome in enumerate(genomes)]  # without a taxon, one class each
    classes = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if mapping is not None:
        of_class: dict[int, list[Genome]] = {}
        for key, genome in zip(keys, genomes, strict=True):
            of_class.setdefault(classes[key], []).append(genome)
        _write_mapping(mapping, of_class)
    return [classes[key] for key in keys]


def _write_mapping(out: Path, genomes: dict[int, list[Genome]]) -> None:
    """`class_id tax_id species genus`, from the names of the files, and the mean length of the genomes."""
    lines = [f"class_id\ttax_id\t{SPECIES}\tgenus\t{GENOME_LENGTH}"]
    for class_id, some in genomes.items():
        name = species_of(some[-1].path)
        genus = name.split()[0] if " " in name else ""
        length = round(sum(int(genome.lengths.sum()) for genome in some) / len(some))
        lines.append(f"{class_id}\t{some[-1].tax_id}\t{name}\t{genus}\t{length}")
    publish(out, ("\n".join(lines) + "\n").encode())
    say(f"{out}: {len(genomes)} classes")
