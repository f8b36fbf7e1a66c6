"""One row per read, of what it was assigned to: as a TSV, as Kraken 2 writes it, or as a CAMI binning."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import kernel
from millstream.core.record import Bytes
from millstream.reads.evidence import Evidence
from millstream.reads.files.names import NameText
from millstream.reads.kraken import Assignments
from millstream.reads.taxonomy import ROOT

Numbers = NDArray[np.int64]
HEAD = b"read\tclass\ttax_id\ttaxon\trank\tprobability\n"
KRAKEN, BINNING = ".kraken", ".binning"  # what names of such files end in, perhaps followed by .gz
DIGITS = len("0.1234\n")
THOUSAND = 1000  # in Kraken's last column, in which the k-mers of a read are counted by taxon, parts of its probability


@dataclass(frozen=True)
class Rows:
    """The rows of the reads from `first` to before `last`.

    `counts` says how many have each assignment, `is_classified` which have one; `evidence` is of those.
    """

    first: int
    last: int
    text: bytes
    counts: Numbers
    is_classified: NDArray[np.bool_]
    evidence: Evidence

    def to_bytes(self) -> bytes:
        """All of it but the range of reads."""
        evidence = self.evidence.to_text().encode()
        sizes = np.array([len(self.counts), len(self.is_classified), len(evidence)], np.int64)
        parts = (sizes.tobytes(), self.counts.tobytes(), self.is_classified.tobytes(), evidence, self.text)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, span: tuple[int, int], data: bytes) -> "Rows":
        num_counts, num_rows, num_bytes = np.frombuffer(data, np.int64, 3).tolist()
        at = 8 * (3 + num_counts)
        counts = np.frombuffer(data, np.int64, num_counts, 24)
        is_classified = np.frombuffer(data, np.bool_, num_rows, at)
        at += num_rows
        evidence = Evidence.from_text(data[at : at + num_bytes].decode())
        return cls(*span, data[at + num_bytes :], counts, is_classified, evidence)


def joined_rows(some: Sequence[Rows]) -> Rows:
    """The rows of neighbouring ranges of reads."""
    return Rows(
        some[0].first,
        some[-1].last,
        b"".join(rows.text for rows in some),
        np.sum([rows.counts for rows in some], axis=0),
        np.concatenate([rows.is_classified for rows in some]),
        Evidence.sum([rows.evidence for rows in some]),
    )


class RowFormat:
    """How rows are written. `kind` is the ending of the output's name, if it is one of ours."""

    def __init__(self, kind: str, assignments: Assignments) -> None:
        self.needs_lengths = kind == KRAKEN
        rows = list(zip(assignments.class_ids, assignments.taxa, assignments.ranks, strict=True))
        names = [" ".join(taxon.name.split()) for _, taxon, _ in rows]
        middles = NameText.of(  # from class to rank
            [f"\t{own}\t{taxon.tax_id}\t{name}\t{rank}\t" for (own, taxon, rank), name in zip(rows, names, strict=True)]
        )
        tax_ids = [_known_tax_id(assignments, number) for number in range(len(assignments))]
        self.text = {  # of these names, assignments, probabilities and lengths
            KRAKEN: partial(_kraken, tax_ids, assignments.unclassified),
            BINNING: partial(_binning, tax_ids),
        }.get(kind, partial(_table, middles))


def _known_tax_id(assignments: Assignments, number: int) -> int:
    """Of the taxon, or of the lowest above it that has one; that of the root if none has; 0 for unclassified reads."""
    if number == assignments.unclassified:
        return 0
    known = [assignments.taxa[above].tax_id for above in assignments.lineage(number)]
    return next((tax_id for tax_id in reversed(known) if tax_id > 0), ROOT)


def kind_of(out: Path) -> str:
    """KRAKEN or BINNING if the name ends so, otherwise empty: a TSV."""
    suffix = Path(out.name.removesuffix(".gz")).suffix
    return suffix if suffix in (KRAKEN, BINNING) else ""


def head_of(out: Path) -> bytes:
    """What precedes the rows in this file."""
    kind = kind_of(out)
    sample = out.name.removesuffix(".gz").removesuffix(kind)
    return {KRAKEN: b"", BINNING: f"@Version:0.9.1\n@SampleID:{sample}\n@@SEQUENCEID\tTAXID\n".encode()}.get(kind, HEAD)


def _table(
    middles: NameText, names: NameText, numbers: Numbers, likely: NDArray[np.float32], _: Sequence[str]
) -> bytes:
    sizes = np.diff(middles.offsets)[numbers]
    out = np.empty(len(names.text) + int(sizes.sum()) + DIGITS * len(numbers), np.uint8)
    _write_table(*names, *middles, numbers, likely, out)
    return out.tobytes()


@kernel
def _write_table(
    text: Bytes,
    offsets: Numbers,
    middle: Bytes,
    middle_offsets: Numbers,
    numbers: Numbers,
    likely: NDArray[np.float32],
    out: Bytes,
) -> None:
    at = 0
    for row in range(numbers.size):
        for i in range(offsets[row], offsets[row + 1]):
            out[at] = text[i]
            at += 1
        for i in range(middle_offsets[numbers[row]], middle_offsets[numbers[row] + 1]):
            out[at] = middle[i]
            at += 1
        value = int(np.rint(np.float64(likely[row]) * 10_000))
        out[at], out[at + 1], out[at + DIGITS - 1] = 48 + value // 10_000, 46, 10
        for i in range(4):
            out[at + DIGITS - 2 - i] = 48 + value % 10
            value //= 10
        at += DIGITS


def _kraken(
    tax_ids: Sequence[int],
    unclassified: int,
    names: NameText,
    numbers: Numbers,
    likely: NDArray[np.float32],
    lengths: Sequence[str],
) -> bytes:
    parts: list[int] = np.rint(likely * THOUSAND).astype(np.int64).tolist()
    return "".join(
        [
            f"U\t{name}\t0\t{length}\t0:{THOUSAND}\n"
            if number == unclassified
            else f"C\t{name}\t{tax_ids[number]}\t{length}\t{tax_ids[number]}:{part} 0:{THOUSAND - part}\n"
            for name, number, part, length in zip(names.names(), numbers.tolist(), parts, lengths, strict=True)
        ]
    ).encode()


def _binning(
    tax_ids: Sequence[int], names: NameText, numbers: Numbers, *_: NDArray[np.float32] | Sequence[str]
) -> bytes:
    rows = zip(names.names(), numbers.tolist(), strict=True)
    return "".join([f"{name}\t{tax_ids[number]}\n" for name, number in rows if tax_ids[number] > 0]).encode()
