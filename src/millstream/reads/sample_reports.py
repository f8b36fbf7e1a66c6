"""What is written about a sample as a whole: Kraken 2-style reports, CAMI profiles, and the table of abundances."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.core.files import already_exists, check_replaceable, publish
from millstream.core.outputs import check_new
from millstream.core.remote import to_path
from millstream.errors import BadSetting
from millstream.reads.abundance import Abundance, abundance_table, estimate
from millstream.reads.evidence import Evidence
from millstream.reads.kraken import Assignments, kraken_report
from millstream.reads.taxonomy import Taxon

PROFILE = ".profile"  # what the name of a CAMI profile ends in; other reports are in Kraken's format
ABUNDANCE = ".abundance.tsv"
DOMAIN, SPECIES, STRAIN = "superkingdom", "species", "strain"
CAMI_RANKS = {  # and ours
    DOMAIN: "domain", "phylum": "phylum", "class": "class", "order": "order", "family": "family", "genus": "genus",
    SPECIES: SPECIES, STRAIN: STRAIN,
}  # fmt: skip


@dataclass(frozen=True)
class SampleReports:
    """The reports to write, by the endings of their names, and beside the first of them the abundances."""

    reports: Sequence[Path]

    @classmethod
    def at(cls, given: "str | Path | Sequence[str | Path] | None") -> "SampleReports":
        paths = [] if given is None else [given] if isinstance(given, str | Path) else given
        return cls([to_path(path) for path in paths])

    @property
    def files(self) -> list[Path]:
        """All files."""
        beside = [path.with_name(f"{path.stem}{ABUNDANCE}") for path in self.reports[:1]]
        return [*self.reports, *beside]

    def check(self, others: Sequence[Path]) -> None:
        """BadSetting if one is also another output."""
        seen = [path.absolute() for path in others]
        for path in self.files:
            check_replaceable(path)
            if path.absolute() in seen:
                raise BadSetting(f"report={path}: is also another output file. Choose another name for the report")
            seen.append(path.absolute())

    def check_new(self) -> None:
        for path in self.files:
            check_new(path)

    def write(
        self, assignments: Assignments, counts: Sequence[int], evidence: Evidence, *, replace: bool = False
    ) -> None:
        """Write all; a file that exists must be the same, unless it is to be replaced."""
        if not self.reports:
            return
        lengths = assignments.classes.genome_lengths
        found = estimate(evidence, lengths)
        for path in self.files:
            if path not in self.reports:
                text = abundance_table(assignments, counts, found, lengths)
            elif path.suffix == PROFILE:
                text = cami_profile(assignments, found, counts, sample=path.stem)
            else:
                text = kraken_report(assignments, counts)
            if not replace and path.exists() and path.read_bytes() != text.encode():
                raise already_exists(path)
            publish(path, text.encode())


def cami_profile(assignments: Assignments, found: Abundance, counts: Sequence[int], *, sample: str) -> str:
    """The shares of all taxa in the format of CAMI; at each rank those of the classes that have a taxon there.

    Taxa without a tax id are left out; their places in the paths are empty.
    """
    ranks = list(CAMI_RANKS)
    shares: dict[tuple[int, str], float] = {}  # of a tax id at a rank
    paths: dict[tuple[int, str], list[Taxon | None]] = {}
    for label, share in enumerate(found.share.tolist()):
        of_rank = {assignments.ranks[number]: assignments.taxa[number] for number in assignments.lineage(label)[:-1]}
        path = [of_rank.get(ours) for ours in CAMI_RANKS.values()]
        own = assignments.taxa[label]
        if own.tax_id not in [taxon.tax_id for taxon in path if taxon is not None]:
            path[ranks.index(STRAIN if path[ranks.index(SPECIES)] else SPECIES)] = own
        for place, taxon in enumerate(path):
            if taxon is not None and taxon.tax_id > 0 and share > 0:
                key = taxon.tax_id, ranks[place]
                shares[key] = shares.get(key, 0.0) + share
                paths[key] = path[: place + 1]
    total = max(sum(counts), 1)
    lines = [
        f"# {100 * counts[assignments.unclassified] / total:.2f} % of the reads are unclassified and not in the shares",
        f"@SampleID:{sample}",
        "@Version:0.10.0",
        f"@Ranks:{'|'.join(ranks)}",
        "@@TAXID\tRANK\tTAXPATH\tTAXPATHSN\tPERCENTAGE",
    ]
    for key in sorted(shares, key=lambda key: (ranks.index(key[1]), -shares[key], key[0])):
        ids = "|".join("" if taxon is None or taxon.tax_id <= 0 else str(taxon.tax_id) for taxon in paths[key])
        names = "|".join("" if taxon is None else " ".join(taxon.name.split()) for taxon in paths[key])
        lines.append(f"{key[0]}\t{key[1]}\t{ids}\t{names}\t{100 * shares[key]:.6g}")
    return "\n".join(lines) + "\n"
