"""Simulated reads: each is from the position in its name, with the set error rates, and the same for a seed."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import BadSetting, BadSource, StoreExists
from millstream.reads.profiles import ROOM
from millstream.reads.simulate import ABUNDANCES, CHUNK, Simulated, SimulateSettings, simulate
from support.commands import run_here

HEADER = re.compile(r"lbl\|(\d+)\|(\d+)\|(\d+)\|r(\d+)_(.+)_(\d+)([+-])/([12])")
COMPLEMENT = str.maketrans("ACGTRYN", "TGCAYRN")
PINNED = [  # sequence, position, strand and bases
    ("NC_2", 1153, "+", "TAACGCCGTCTTCATTGGAACTTATCAGGG"),
    ("NC_1.1", 2432, "-", "GAAAAAAACCAAGACCTATAGGCAGATCAC"),
    ("NC_2", 5396, "-", "GTTCGATTTCAAATGCTCTGGGACCCTCCG"),
    ("s_kraken_taxid_77", 56, "+", "CTAATGTCAGCGGATCCTACAACCGCATTC"),
    ("NC_2", 1327, "+", "TAACTGAGCTTAAGCCACTCAGCACCAAGC"),
]
Genomes = dict[Path, dict[str, str]]  # the sequences of each file, by the names they have in reads


@dataclass(frozen=True)
class Made:
    """A simulated read, and the origin in its name."""

    class_id: int
    tax_id: int
    number: int
    sequence: str
    place: int
    strand: str
    mate: int
    bases: str


def random_bases(num: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), num))


def reverse_complement(bases: str) -> str:
    return bases[::-1].translate(COMPLEMENT)


def write_genome(path: Path, sequences: dict[str, str], width: int = 70) -> Path:
    """FASTA with wrapped lines."""
    path.parent.mkdir(exist_ok=True)
    text = [
        f">{name}\n" + "\n".join(bases[at : at + width] for at in range(0, len(bases), width)) + "\n"
        for name, bases in sequences.items()
    ]
    path.write_text("".join(text))
    return path


@pytest.fixture(scope="module")
def genomes(tmp_path_factory: pytest.TempPathFactory) -> Genomes:
    """Of several sequences, one of them shorter than a read; of one; and of one whose taxon its header tells."""
    path = tmp_path_factory.mktemp("genomes")
    given = {
        "562_Escherichia_coli.fna": {
            "NC_1.1 the chromosome": random_bases(4000, 1),
            "plasmid|two": random_bases(900, 2),
            "short": random_bases(60, 3),
        },
        "573_Klebsiella_pneumoniae_x.fna": {"NC_2": random_bases(9000, 4)},
        "other.fna": {"s|kraken:taxid|77 bla": random_bases(2000, 5)},
    }
    plain = {
        "NC_1.1 the chromosome": "NC_1.1",
        "plasmid|two": "plasmid_two",
        "s|kraken:taxid|77 bla": "s_kraken_taxid_77",
    }
    return {
        write_genome(path / name, sequences): {plain.get(key, key): text for key, text in sequences.items()}
        for name, sequences in given.items()
    }


def read_back(path: Path) -> list[Made]:
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    lines = text.splitlines()
    made: list[Made] = []
    for at in range(0, len(lines), 4 if text[0] == "@" else 2):
        assert lines[at][0] == text[0]
        match = HEADER.fullmatch(lines[at][1:])
        assert match, lines[at]
        class_id, tax_id, length, number, name, place, strand, mate = match.groups()
        assert int(length) == len(lines[at + 1])
        made.append(Made(int(class_id), int(tax_id), int(number), name, int(place), strand, int(mate), lines[at + 1]))
    return made


def draw(genomes: Sequence[Path] | Genomes, out: Path, *, mapping: Path | None = None, **settings) -> list[Made]:
    simulate(list(genomes), [out], settings=SimulateSettings(**settings), mapping=mapping)
    return read_back(out)


def sequence_of(made: Made, genomes: Genomes) -> str:
    (found,) = [sequences[made.sequence] for sequences in genomes.values() if made.sequence in sequences]
    return found


def window_of(made: Made, genomes: Genomes, more: int = 0) -> str:
    """The bases that a single read was sampled from, on its strand."""
    bases = sequence_of(made, genomes)[made.place : made.place + len(made.bases) + more]
    return bases if made.strand == "+" else reverse_complement(bases)


# -- seeds


@pytest.mark.parametrize("more", [{}, {"indel": 0.02}, {"insert": 300}, {"abundance": "lognormal"}])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_ones(
    genomes: Genomes, tmp_path: Path, more: dict
):
    texts: list[bytes] = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        draw(genomes, tmp_path / f"{name}.fa", reads=200, length=90, seed=seed, **more)
        texts.append((tmp_path / f"{name}.fa").read_bytes())
    assert texts[0] == texts[1] != texts[2]
    bases = [{made.bases for made in read_back(tmp_path / name)} for name in ("a.fa", "c.fa")]
    assert len(bases[0] & bases[1]) < 10


def test_the_reads_of_a_seed_are_pinned(genomes: Genomes, tmp_path: Path):
    """Reads of earlier versions, and measurements on them, can be reproduced."""
    made = draw(genomes, tmp_path / "out.fa", reads=5, length=30, error=0.1, seed=11)
    assert [(one.sequence, one.place, one.strand, one.bases) for one in made] == PINNED


def test_read_numbers_are_consecutive_and_chunks_differ(genomes: Genomes, tmp_path: Path):
    made = draw(genomes, tmp_path / "out.fa", reads=CHUNK + 3000, length=20)
    assert [one.number for one in made] == list(range(CHUNK + 3000))
    first, second = made[:3000], made[CHUNK:]
    same = sum((a.place, a.strand) == (b.place, b.strand) for a, b in zip(first, second, strict=True))
    assert same < 30
    owners = [one.class_id for one in made]
    assert Counter(owners[:3000])[1] == pytest.approx(Counter(owners)[1] * 3000 / len(made), abs=150)  # mixed


# -- origin


def test_a_read_without_errors_matches_the_position_in_its_name(genomes: Genomes, tmp_path: Path):
    made = draw(genomes, tmp_path / "out.fa", reads=1500, length=120, error=0.0)
    assert len(made) == 1500
    classes = {name: number for number, sequences in enumerate(genomes.values()) for name in sequences}
    taxa = [562, 573, 77]
    for one in made:
        assert one.bases == window_of(one, genomes)
        assert (one.class_id, one.tax_id, one.mate) == (classes[one.sequence], taxa[classes[one.sequence]], 1)
    assert {one.sequence for one in made} == {"NC_1.1", "plasmid_two", "NC_2", "s_kraken_taxid_77"}  # none of "short"
    share = Counter(one.sequence for one in made)
    assert share["plasmid_two"] / share["NC_1.1"] == pytest.approx(781 / 3881, abs=0.09)


def test_every_position_is_drawn_and_no_read_crosses_the_end(tmp_path: Path):
    sequences = {"a": random_bases(105, 1), "b": random_bases(103, 2), "c": random_bases(100, 3)}
    path = write_genome(tmp_path / "1_a.fna", sequences)
    made = draw([path], tmp_path / "out.fa", reads=2200, length=100, error=0.0)
    found = Counter((one.sequence, one.place) for one in made)
    assert set(found) == {(name, at) for name, bases in sequences.items() for at in range(len(bases) - 99)}
    assert min(found.values()) > 150 and max(found.values()) < 290  # 220 each; five standard deviations
    assert all(one.bases == window_of(one, {path: sequences}) for one in made)


def test_each_strand_is_drawn_half_of_the_time(genomes: Genomes, tmp_path: Path):
    made = draw(genomes, tmp_path / "out.fa", reads=4000, length=20)
    assert np.mean([one.strand == "+" for one in made]) == pytest.approx(0.5, abs=0.035)


def test_lower_case_becomes_upper_and_iupac_codes_are_complemented(tmp_path: Path):
    bases = "acgtnnRYac" + random_bases(40, 0).lower() + "NNNN"
    path = write_genome(tmp_path / "5_x.fna", {"s": bases})
    made = draw([path], tmp_path / "out.fa", reads=300, length=50, error=0.0)
    assert {one.strand for one in made} == {"+", "-"}
    assert all(one.bases == window_of(one, {path: {"s": bases.upper()}}) for one in made)
    changed = draw([path], tmp_path / "wrong.fa", reads=300, length=50, error=0.99)
    assert sum(one.bases.count("N") for one in changed) < 30


# -- errors


@pytest.mark.parametrize("error", [0.05, 0.98])
def test_the_substitution_rate_is_the_setting(genomes: Genomes, tmp_path: Path, error: float):
    """If a base could be replaced by itself, the rate would be three quarters of the setting."""
    made = draw(genomes, tmp_path / "out.fa", reads=2000, length=100, error=error)
    pairs = Counter(pair for one in made for pair in zip(window_of(one, genomes), one.bases, strict=True))
    wrong = {pair: count for pair, count in pairs.items() if pair[0] != pair[1]}
    assert sum(wrong.values()) / 200_000 == pytest.approx(error, abs=0.003)  # six standard deviations
    assert len(wrong) == 12  # every base becomes every other one
    mean = 200_000 * error / 12
    assert min(wrong.values()) > 0.8 * mean and max(wrong.values()) < 1.2 * mean


def test_substitutions_are_independent_of_position_and_read(genomes: Genomes, tmp_path: Path):
    made = draw(genomes, tmp_path / "out.fa", reads=2000, length=50, error=0.1)
    wrong = np.array([[a != b for a, b in zip(window_of(one, genomes), one.bases, strict=True)] for one in made])
    assert wrong.mean(axis=0) == pytest.approx(0.1, abs=0.04)
    assert wrong.sum(axis=1).var() == pytest.approx(50 * 0.1 * 0.9, rel=0.2)


def alignments(made: Sequence[Made], genomes: Genomes, more: int) -> tuple[np.ndarray, np.ndarray]:
    """Edits from the window to each read, and the number of bases of the window it covers; vectorised over reads."""
    reads = np.array([list(one.bases) for one in made])
    windows = np.array([list(window_of(one, genomes, more)) for one in made])
    width = windows.shape[1]
    row = np.tile(np.arange(width + 1), (len(made), 1))
    for i in range(reads.shape[1]):
        change = row[:, :-1] + (windows != reads[:, i : i + 1])
        best = np.minimum(change, row[:, 1:] + 1)
        row = np.concatenate([row[:, :1] + 1, best], axis=1)
        row = np.minimum.accumulate(row - np.arange(width + 1), axis=1) + np.arange(width + 1)
    size = reads.shape[1]
    nearest = np.abs(np.arange(width + 1) - size) / 1000  # among equals, the end without a gap
    ends = (row + nearest).argmin(axis=1)
    return row[np.arange(len(made)), ends], ends


def test_insertions_and_deletions_are_balanced_and_reads_keep_their_length(genomes: Genomes, tmp_path: Path):
    made = draw(genomes, tmp_path / "out.fa", reads=1000, length=100, error=0.0, indel=0.04)
    assert {len(one.bases) for one in made} == {100}
    edits, ends = alignments(made, genomes, ROOM)
    assert 3.2 < edits.mean() < 4.1  # 4 per read; some near its end do not show
    assert (ends - 100).mean() == pytest.approx(0, abs=0.3)  # as many deletions as insertions
    assert 1.2 < (ends - 100).std() < 2.3
    assert {one.strand for one in made} == {"+", "-"}


def test_inserted_bases_are_uniform(tmp_path: Path):
    """In a genome of one base, a quarter of the insertions cannot be seen."""
    path = write_genome(tmp_path / "1_a.fna", {"a": "A" * 500})
    made = draw([path], tmp_path / "out.fa", reads=2000, length=100, error=0.0, indel=0.08)
    found = Counter((one.strand, base) for one in made for base in one.bases)
    inserted = {pair: count for pair, count in found.items() if pair not in (("+", "A"), ("-", "T"))}
    assert sum(inserted.values()) / 200_000 == pytest.approx(0.04 * 3 / 4, abs=0.0025)
    assert len(inserted) == 6 and min(inserted.values()) > 0.8 * 1000  # of 200,000 / 2 * 0.04 / 4


def test_with_many_indels_reads_of_the_smallest_genome_stay_within_it(tmp_path: Path):
    path = write_genome(tmp_path / "1_a.fna", {"a": random_bases(30 + ROOM, 1)})
    made = draw([path], tmp_path / "out.fa", reads=3000, length=30, error=0.0, indel=0.1)
    assert {one.place for one in made} == {0}
    with pytest.raises(BadSource, match=rf"1_a\.fna: .* {31 + ROOM} bases"):
        draw([path], tmp_path / "more.fa", reads=10, length=31, indel=0.1)


# -- pairs


def test_mates_are_the_two_ends_of_a_fragment_on_opposite_strands(genomes: Genomes, tmp_path: Path):
    settings = {"reads": 4000, "length": 50, "error": 0.0, "insert": 200, "insert_sd": 12.0, "seed": 5}
    made = draw(genomes, tmp_path / "both.fa", **settings)
    sizes: list[int] = []
    for one, two in zip(made[::2], made[1::2], strict=True):
        assert (one.mate, two.mate) == (1, 2)
        assert (one.number, one.sequence, one.place, one.strand) == (two.number, two.sequence, two.place, two.strand)
        left, right = (one, two) if one.strand == "+" else (two, one)
        bases = sequence_of(one, genomes)
        assert bases[one.place : one.place + 50] == left.bases
        end = bases.index(reverse_complement(right.bases), one.place) + 50
        sizes.append(end - one.place)
    assert np.mean(sizes) == pytest.approx(200, abs=1.6)  # six standard deviations
    assert np.std(sizes) == pytest.approx(12, abs=1.2)
    assert max(sizes) <= 248
    assert np.mean([one.strand == "+" for one in made[::2]]) == pytest.approx(0.5, abs=0.06)
    out = [tmp_path / "one.fa", tmp_path / "two.fa"]
    simulate(list(genomes), out, settings=SimulateSettings(**settings))
    assert read_back(out[0]) == made[::2] and read_back(out[1]) == made[1::2]


def test_fragments_are_between_a_read_and_a_sequence_long(tmp_path: Path):
    sequences = {"a": random_bases(140, 1)}
    path = write_genome(tmp_path / "1_a.fna", sequences)
    made = draw([path], tmp_path / "out.fa", reads=2000, length=50, error=0.0, insert=60, insert_sd=20.0)
    ends = [reverse_complement(one.bases) if (one.mate == 1) == (one.strand == "-") else one.bases for one in made]
    assert all(bases in sequences["a"] for bases in ends)
    with pytest.raises(BadSource, match=" 144 bases"):
        draw([path], tmp_path / "more.fa", reads=2, length=50, insert=60, insert_sd=21.0)


def test_mates_have_independent_errors(tmp_path: Path):
    path = write_genome(tmp_path / "1_a.fna", {"a": random_bases(100, 1)})
    made = draw([path], tmp_path / "out.fa", reads=200, length=100, error=0.1, insert=100, insert_sd=0.0)
    same = [one.bases == reverse_complement(two.bases) for one, two in zip(made[::2], made[1::2], strict=True)]
    assert not any(same)


# -- abundance


def counts_of(done: Simulated, lengths: dict[str, int], length: int) -> dict[str, int]:
    return {name: round(times * lengths[name] / length) for name, times in done.coverage.items()}


@pytest.mark.parametrize("abundance", ABUNDANCES)
@pytest.mark.parametrize("insert", [None, 150])
def test_the_reported_coverage_is_that_of_the_reads(
    genomes: Genomes, tmp_path: Path, abundance: str, insert: int | None
):
    settings = SimulateSettings(reads=602, length=70, abundance=abundance, insert=insert)
    done = simulate(list(genomes), [tmp_path / "out.fa"], settings=settings)
    assert (done.reads, done.bases) == (602, 602 * 70)
    found = Counter(one.class_id for one in read_back(tmp_path / "out.fa"))
    assert list(done.coverage) == [path.name for path in genomes]
    for number, (path, sequences) in enumerate(genomes.items()):
        size = sum(map(len, sequences.values()))
        assert done.coverage[path.name] == pytest.approx(found[number] * 70 / size)


def test_genomes_of_one_file_name_in_two_folders_have_their_own_coverage(tmp_path: Path):
    genomes: list[Path] = []
    for name, size in (("a", 2000), ("b", 8000)):
        (tmp_path / name).mkdir()
        genomes.append(tmp_path / name / "genome.fna")
        genomes[-1].write_text(f">{name}\n{'ACGTTGCA' * (size // 8)}\n")
    settings = SimulateSettings(reads=200, length=50, abundance="equal")
    done = simulate(genomes, [tmp_path / "reads.fa"], settings=settings)
    assert done.coverage == {str(genomes[0]): pytest.approx(2.5), str(genomes[1]): pytest.approx(0.625)}
    done = simulate([genomes[0]] * 2, [tmp_path / "twice.fa"], settings=settings)
    assert done.coverage == {"genome.fna": pytest.approx(5)}


def test_genomes_have_equal_coverage_or_classes_equal_numbers_of_reads(tmp_path: Path):
    sizes = {"1_a.fna": 1000, "2_b.fna": 4000, "2_c.fna": 12_000}
    paths = [write_genome(tmp_path / name, {f"s{size}": random_bases(size, size)}) for name, size in sizes.items()]
    alike = simulate(paths, [tmp_path / "a.fa"], settings=SimulateSettings(reads=3400, length=20))
    assert list(alike.coverage.values()) == pytest.approx([4, 4, 4], rel=0.02)
    even = simulate(paths, [tmp_path / "b.fa"], settings=SimulateSettings(reads=3400, length=20, abundance="equal"))
    found = counts_of(even, sizes, 20)
    assert found["1_a.fna"] == 1700 == found["2_b.fna"] + found["2_c.fna"]
    assert found["2_c.fna"] / found["2_b.fna"] == pytest.approx(3, rel=0.02)  # within a class, by length
    assert Counter(one.class_id for one in read_back(tmp_path / "b.fa")) == {0: 1700, 1: 1700}


def test_lognormal_abundances_differ_between_classes_and_seeds(tmp_path: Path):
    paths = [write_genome(tmp_path / f"{n}_x.fna", {f"s{n}": random_bases(60, n)}) for n in range(1, 41)]
    found: list[np.ndarray] = []
    for seed in range(2):
        settings = SimulateSettings(reads=20_000, length=10, abundance="lognormal", seed=seed)
        done = simulate(paths, [tmp_path / f"{seed}.fa"], settings=settings)
        found.append(np.log(np.array(list(done.coverage.values())) + 1e-3))
    assert [1.1 < logs.std() < 1.9 for logs in found] == [True, True]
    assert abs(np.corrcoef(found)[0, 1]) < 0.5


# -- classes


def test_class_ids_come_from_the_mapping(genomes: Genomes, tmp_path: Path):
    mapping = tmp_path / "species.tsv"
    text = "class_id\ttax_id\tname\n40\t77\tx\n7\t573\tk\n9\t562\te\n3\t1\tz\n"
    mapping.write_text(text)
    made = draw(genomes, tmp_path / "out.fa", reads=100, length=50, mapping=mapping)
    assert {(one.class_id, one.tax_id) for one in made} == {(9, 562), (7, 573), (40, 77)}
    assert mapping.read_text() == text


def test_a_missing_mapping_is_written_and_used_the_next_time(genomes: Genomes, tmp_path: Path):
    mapping = tmp_path / "species.tsv"
    again = write_genome(tmp_path / "562.fna", {"another": random_bases(500, 9)})
    first = draw([*genomes, again], tmp_path / "a.fa", reads=200, length=50, mapping=mapping)
    lines = [line.split("\t") for line in mapping.read_text().splitlines()]
    assert lines[0] == ["class_id", "tax_id", "species", "genus", "genome_length"]
    assert [line[:2] for line in lines[1:]] == [["0", "562"], ["1", "573"], ["2", "77"]]
    assert lines[2][2:4] == ["Klebsiella pneumoniae", "Klebsiella"]
    of_first = sum(map(len, next(iter(genomes.values())).values()))
    assert float(lines[1][4]) == pytest.approx((of_first + 500) / 2, abs=1)  # the mean of two genomes
    assert {(one.class_id, one.sequence) for one in first if one.tax_id == 562} == {
        (0, "NC_1.1"),
        (0, "plasmid_two"),
        (0, "another"),
    }
    reversed_order = draw([again, *reversed(genomes)], tmp_path / "b.fa", reads=200, length=50, mapping=mapping)
    assert {(one.class_id, one.tax_id) for one in reversed_order} == {(0, 562), (1, 573), (2, 77)}


def test_each_genome_without_a_taxon_is_a_class(tmp_path: Path):
    paths = [write_genome(tmp_path / f"{name}.fna", {name: random_bases(200, 1)}) for name in ("x", "y")]
    made = draw(paths, tmp_path / "out.fa", reads=50, length=50)
    assert {(one.class_id, one.tax_id, one.sequence) for one in made} == {(0, 0, "x"), (1, 0, "y")}


def test_genomes_without_a_taxon_are_matched_by_name(tmp_path: Path):
    paths = [tmp_path / f"{name}.fna" for name in ("Alba_minor_x", "Alba_major_y")]
    for path, bases in zip(paths, ("ACGT" * 50, "AACC" * 50), strict=True):
        path.write_text(f">s\n{bases}\n")
    mapping = tmp_path / "species.tsv"
    first = draw(paths, tmp_path / "a.fa", reads=20, length=50, mapping=mapping)
    again = draw(paths[::-1], tmp_path / "b.fa", reads=20, length=50, mapping=mapping)
    assert mapping.read_text().splitlines()[1:] == ["0\t0\tAlba minor\tAlba\t200", "1\t0\tAlba major\tAlba\t200"]
    for made in (first, again):
        assert {(read.class_id, "AACC" in read.bases or "GGTT" in read.bases) for read in made} == {
            (0, False),
            (1, True),
        }


def test_a_taxon_missing_from_the_mapping_is_an_error(genomes: Genomes, tmp_path: Path):
    mapping = tmp_path / "species.tsv"
    mapping.write_text("class_id\ttax_id\n0\t562\n1\t77\n")
    with pytest.raises(BadSource, match=r"573_.*\.fna: .*species\.tsv"):
        draw(genomes, tmp_path / "out.fa", reads=10, mapping=mapping)
    mapping.write_text("class_id\tname\n0\tx\n")
    with pytest.raises(BadSource, match=r"species\.tsv: .*tax_id"):
        draw(genomes, tmp_path / "out.fa", reads=10, mapping=mapping)
    assert not (tmp_path / "out.fa").exists()


# -- files


def test_file_names_select_gzip_and_fastq(genomes: Genomes, tmp_path: Path):
    out = {name: tmp_path / name for name in ("out.fa", "out.fa.gz", "out.fq", "out.fastq.gz")}
    made = [draw(genomes, path, reads=300, length=60, seed=2) for path in out.values()]
    assert made[0] == made[1] == made[2] == made[3] and len(made[0]) == 300
    assert gzip.decompress(out["out.fa.gz"].read_bytes()) == out["out.fa"].read_bytes()
    assert gzip.decompress(out["out.fastq.gz"].read_bytes()) == out["out.fq"].read_bytes()
    lines = out["out.fq"].read_text().splitlines()
    assert len(lines) == 1200 and set(lines[2::4]) == {"+"} and set(lines[3::4]) == {"I" * 60}
    pairs = [tmp_path / "one.fq.gz", tmp_path / "two.fa"]
    simulate(list(genomes), pairs, settings=SimulateSettings(reads=100, length=60, insert=100))
    assert gzip.decompress(pairs[0].read_bytes())[:1] == b"@" and pairs[1].read_text()[0] == ">"
    assert [one.number for one in read_back(pairs[0])] == [two.number for two in read_back(pairs[1])]


def test_an_existing_file_is_kept(genomes: Genomes, tmp_path: Path):
    (tmp_path / "out.fa").write_text("mine")
    with pytest.raises(StoreExists, match=r"out\.fa"):
        draw(genomes, tmp_path / "out.fa", reads=10)
    assert (tmp_path / "out.fa").read_text() == "mine"


def test_non_ascii_names_are_made_ascii(tmp_path: Path):
    path = write_genome(tmp_path / "3_x.fna", {"séq_α.1": random_bases(200, 0)})
    assert {one.sequence for one in draw([path], tmp_path / "out.fa", reads=10, length=50)} == {"s_q__.1"}


def test_a_genome_that_is_not_dna_is_refused(genomes: Genomes, tmp_path: Path):
    protein = write_genome(tmp_path / "9_protein.fna", {"p": "MEFLKQ" * 50})
    with pytest.raises(BadSource, match=r"9_protein\.fna: 'E'"):
        draw([*genomes, protein], tmp_path / "out.fa", reads=10)


# -- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reads": 0}, "reads=0"),
        ({"length": 0}, "length=0"),
        ({"error": 1.0}, "error=1.0"),
        ({"error": -0.1}, "error=-0.1"),
        ({"error": float("nan")}, "error=nan"),
        ({"indel": 0.11}, "indel=0.11"),
        ({"indel": -0.01}, "indel=-0.01"),
        ({"insert": 149}, "insert=149"),
        ({"insert": 300, "reads": 7}, "reads=7"),
        ({"insert": 300, "insert_sd": -1.0}, "insert_sd=-1"),
        ({"abundance": "many"}, "many"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_bad_setting_is_exit_code_2_before_any_file_is_opened(tmp_path: Path, settings: dict, says: str):
    out = tmp_path / "out.fa"
    with pytest.raises(BadSetting, match=re.escape(says)):
        simulate([tmp_path / "missing.fna"], [out], settings=SimulateSettings(**settings))
    if "insert_sd" in settings:  # not an option of the command
        return
    options = [text for name, value in settings.items() for text in (f"--{name}", value)]
    code, text, err = run_here("simulate", tmp_path, "-o", out, *options)  # a folder without genomes
    assert (code, text, err.count("\n")) == (2, "", 1) and says in err
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_output_files_must_match_the_mates(genomes: Genomes, tmp_path: Path):
    two = [tmp_path / "a.fa", tmp_path / "b.fa"]
    with pytest.raises(BadSetting, match="2 output files"):
        simulate(list(genomes), two, settings=SimulateSettings(reads=10))
    with pytest.raises(BadSetting, match="3 output files"):
        simulate(list(genomes), [*two, tmp_path / "c.fa"], settings=SimulateSettings(reads=10, insert=200))
    with pytest.raises(BadSetting, match=r"a\.fa"):
        simulate(list(genomes), [two[0], two[0]], settings=SimulateSettings(reads=10, insert=200))
    assert list(tmp_path.iterdir()) == []


def test_a_genome_shorter_than_a_read_is_named(genomes: Genomes, tmp_path: Path):
    short = write_genome(tmp_path / "1_short.fna", {"a": "ACGT" * 20, "b": "ACGT" * 30})
    with pytest.raises(BadSource, match=r"1_short\.fna: .* 121 bases"):
        draw([*genomes, short], tmp_path / "out.fa", reads=10, length=121)
    assert not (tmp_path / "out.fa").exists()
    draw([*genomes, short], tmp_path / "out.fa", reads=10, length=120)


# -- the command


def test_the_command_writes_the_reads_and_suggests_the_next_command(genomes: Genomes, tmp_path: Path):
    out, mapping = tmp_path / "reads.fa.gz", tmp_path / "species.tsv"
    code, text, err = run_here(
        "simulate", *genomes, "-o", out, "--reads", 500, "--length", 80, "--error", 0, "--seed", 6,
        "--mapping", mapping, "--index-dir", tmp_path / "indexes", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert len(list((tmp_path / "indexes").iterdir())) == 3
    answer = json.loads(text)
    assert (answer["reads"], answer["bases"], answer["paths"]) == (500, 40_000, [str(out)])
    assert set(answer["coverage"]) == {path.name for path in genomes}
    assert f"{out}: 500 reads from 3 genomes, 40,000 bases, coverage 2.4" in err
    assert err.splitlines()[-1].endswith(f"Next: millstream train data.train={out} mapping={mapping}")
    settings = {"reads": 500, "length": 80, "error": 0.0, "seed": 6}
    assert read_back(out) == draw(genomes, tmp_path / "same.fa", **settings)
    assert all(one.bases == window_of(one, genomes) for one in read_back(out))


def test_every_option_of_the_command_has_an_effect(genomes: Genomes, tmp_path: Path):
    out = [tmp_path / "one.fq", tmp_path / "two.fq"]
    code, _, err = run_here(
        "simulate", next(iter(genomes)).parent, "-o", out[0], "-o", out[1], "--reads", 200, "--length", 60, "--error",
        0.02, "--indel", 0.03, "--insert", 220, "--abundance", "equal",
    )  # fmt: skip
    assert code == 0, err
    settings = SimulateSettings(reads=200, length=60, error=0.02, indel=0.03, insert=220, abundance="equal")
    same = [tmp_path / "a.fq", tmp_path / "b.fq"]
    simulate(list(genomes), same, settings=settings)
    assert [path.read_bytes() for path in out] == [path.read_bytes() for path in same]


@pytest.mark.parametrize(
    ("name", "options", "code", "says"),
    [
        ("missing.fna", [], 1, "missing.fna: no such file"),
        ("1_short.fna", [], 1, "1_short.fna: has no sequence of at least 150 bases"),
        ("1_short.fna", ["--length", "many"], 2, "'--length'"),
        ("1_short.fna", ["--length", 20, "-o", "again.fa"], 2, "2 output files"),
        ("1_short.fna", ["--length", 20, "--mapping", "no_taxa.tsv"], 1, "has no column tax_id"),
        ("empty.fna", [], 1, "empty.fna: empty"),
        ("binary.fna", [], 1, "binary.fna"),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list, code: int, says: str
):
    monkeypatch.chdir(tmp_path)
    write_genome(tmp_path / "1_short.fna", {"a": "ACGT" * 20})
    (tmp_path / "empty.fna").write_bytes(b"")
    (tmp_path / "binary.fna").write_bytes(bytes(range(256)))
    (tmp_path / "no_taxa.tsv").write_text("class_id\tname\n0\tx\n")
    found, text, err = run_here("simulate", name, "-o", "out.fa", "--reads", 10, *options)
    assert (found, text) == (code, "")
    assert says in " ".join(err.replace("│", " ").split()) and "Traceback" not in err
    assert not Path("out.fa").exists() and not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))
