"""Profiles of sequencers: a base is wrong as often as its quality says, and rates are those of the settings."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.errors import BadSetting
from millstream.reads.features import BASES, COMPLEMENT
from millstream.reads.pack.pack import pack
from millstream.reads.pack.unpack import unpack
from millstream.reads.profiles import LEAST, PROFILES, UNIFORM, Profile, Sequenced, draw_lengths, sequence
from millstream.reads.simulate import SimulateSettings, simulate
from support.commands import run_here

SEQUENCERS = [name for name in PROFILES if name != UNIFORM]
LENGTH = 200


def random_genome(size: int, seed: int = 0) -> np.ndarray:
    return BASES[np.random.default_rng(seed).integers(0, 4, size)]


def make(genome: np.ndarray, profile: Profile, count: int, *, seed: int = 1) -> tuple[np.ndarray, Sequenced]:
    """Reads of both strands, and for each the bases of the genome from its start on, on its strand."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, genome.size - profile.span + 1, count)
    is_reverse = rng.random(count) < 0.5
    windows = genome[starts[:, None] + np.arange(profile.span)]
    windows[is_reverse] = COMPLEMENT[windows[is_reverse, ::-1]]
    return windows, sequence(genome, starts, np.full(count, profile.span), is_reverse, profile, rng)


def edits(read: Sequence[int], window: Sequence[int]) -> int:
    """Between the read and the beginning of the window that is nearest to it."""
    row = np.arange(len(window) + 1)
    places = np.arange(len(window) + 1)
    bases = np.asarray(window)
    for base in read:
        best = np.minimum(row[:-1] + (bases != base), row[1:] + 1)
        row = np.concatenate([[row[0] + 1], best])
        row = np.minimum.accumulate(row - places) + places
    return int(row.min())


@pytest.mark.parametrize("name", SEQUENCERS)
def test_a_base_is_wrong_with_the_probability_that_its_quality_says(name: str):
    profile = replace(PROFILES[name], length=LENGTH, length_spread=0.0, indel=0.0, error=0.02)
    windows, made = make(random_genome(100_000), profile, 4000)
    wrong = made.bases.reshape(-1, LENGTH) != windows
    assert made.phred is not None
    phred = made.phred.reshape(-1, LENGTH).astype(int)
    assert len(np.unique(phred)) > 20
    for value in np.unique(phred):
        here, expected = wrong[phred == value], 10 ** (-value / 10)
        assert abs(here.sum() - here.size * expected) < 5 * np.sqrt(here.size * expected) + 2, value
    assert wrong.mean() == pytest.approx(0.02, rel=0.1)
    replaced = {
        (a, b) for a, b in zip(windows[wrong].tolist(), made.bases.reshape(-1, LENGTH)[wrong].tolist(), strict=True)
    }
    assert len(replaced) == 12  # every base becomes every other one


def test_insertions_and_deletions_count_as_errors():
    profile = replace(PROFILES["ont"], length=LENGTH, length_spread=0.0)
    windows, made = make(random_genome(50_000), profile, 100)
    assert made.phred is not None
    expected = (10 ** (-0.1 * made.phred.astype(float))).reshape(-1, LENGTH).sum(axis=1)
    rows = zip(made.bases.reshape(-1, LENGTH), windows, strict=True)
    found = np.array([edits(read.tolist(), window.tolist()) for read, window in rows])
    assert 0.85 < found.sum() / expected.sum() < 1.02  # neighbouring errors may look like one
    assert np.corrcoef(found, expected)[0, 1] > 0.6  # reads differ, and tell it
    only = replace(profile, error=0.0)
    more, fewer = (
        make(random_genome(50_000), replace(only, insertions=share), 100)[1].bases.reshape(-1, LENGTH)
        for share in (1.0, 0.0)
    )
    assert np.mean([edits(a.tolist(), b.tolist()) for a, b in zip(more, windows, strict=True)]) > 3
    assert not np.array_equal(more, fewer)


@pytest.mark.parametrize("name", SEQUENCERS)
def test_the_mean_error_rate_is_that_of_the_profile(name: str):
    profile = replace(PROFILES[name], length_spread=0.0, length=1000)
    _, made = make(random_genome(100_000), profile, 2000)
    assert made.phred is not None
    rates = 10 ** (-0.1 * made.phred.reshape(-1, 1000).astype(float))
    assert rates.mean() == pytest.approx(profile.error + profile.indel, rel=0.1)
    per_read = rates.mean(axis=1)
    assert np.percentile(per_read, 90) > 1.7 * np.percentile(per_read, 10)
    halves = rates.mean(axis=0).reshape(2, 500).mean(axis=1)
    expected = pytest.approx(3.3, rel=0.2) if name == "illumina" else pytest.approx(1, abs=0.1)
    assert halves[1] / halves[0] == expected  # quality falls along short reads


def test_homopolymers_are_where_indels_are_and_their_qualities_are_lower():
    profile = replace(PROFILES["hifi"], length=LENGTH, length_spread=0.0, error=0.0, indel=0.02)
    runs = np.tile(np.repeat(BASES, 8), 400)
    _, plain = make(random_genome(12_800), profile, 500)
    _, long = make(runs, profile, 500)
    assert plain.phred is not None and long.phred is not None
    rates = [(10 ** (-0.1 * one.phred.astype(float))).mean() for one in (plain, long)]
    assert rates[1] > 3 * rates[0]


def test_an_n_stays_an_n_of_the_lowest_quality():
    genome = random_genome(3000)
    genome[1000:1500] = ord("N")
    _, made = make(genome, replace(PROFILES["illumina"], indel=0.0, error=0.3), 400)
    assert made.phred is not None
    assert (made.phred[made.bases == ord("N")] == LEAST).all() and (made.bases == ord("N")).sum() > 1000


def test_without_errors_reads_are_exact_and_qualities_the_best():
    profile = replace(PROFILES["ont"], length=LENGTH, length_spread=0.0, error=0.0, indel=0.0)
    windows, made = make(random_genome(5000), profile, 50)
    assert made.phred is not None
    assert (made.bases.reshape(-1, LENGTH) == windows[:, :LENGTH]).all() and (made.phred == profile.best).all()


def test_lengths_of_long_reads_vary_around_the_mean():
    for name in ("hifi", "ont"):
        profile = PROFILES[name]
        lengths = draw_lengths(profile, 20_000, np.random.default_rng(0))
        assert lengths.mean() == pytest.approx(profile.length, rel=0.03)
        assert lengths.std() == pytest.approx(profile.length * profile.length_spread, rel=0.1)
        assert lengths.min() >= 200 and lengths.max() <= 10 * profile.length


@pytest.fixture(scope="module")
def genome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("genome") / "562_x.fna"
    texts = [random_genome(size, size).tobytes().decode() for size in (30_000, 700)]
    path.write_text("".join(f">s{number}\n{text}\n" for number, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("name", SEQUENCERS)
def test_a_seed_gives_the_same_bytes_and_what_is_reported_was_written(genome: Path, tmp_path: Path, name: str):
    texts: list[bytes] = []
    for file, seed in (("a.fq", 1), ("b.fq", 1), ("c.fq", 2)):
        settings = SimulateSettings(reads=60, profile=name, length=900 if name != "illumina" else None, seed=seed)
        done = simulate([genome], [tmp_path / file], settings=settings)
        texts.append((tmp_path / file).read_bytes())
        reads = ms.open(tmp_path / file)
        lengths = [len(read) for read in reads]
        assert (done.reads, done.bases) == (60, sum(lengths))
        assert done.coverage == {genome.name: pytest.approx(sum(lengths) / 30_700)}
        assert [int(read.name.split("|")[3]) for read in reads] == lengths
        assert (set(lengths) == {150}) == (name == "illumina")
        assert simulate([genome], [tmp_path / file], settings=settings) == done  # nothing is written again
    assert texts[0] == texts[1] != texts[2]


def test_long_reads_are_from_the_position_in_their_name(genome: Path, tmp_path: Path):
    settings = SimulateSettings(reads=1000, profile="ont", length=2000, error=0.0, indel=0.0)
    simulate([genome], [tmp_path / "a.fa"], settings=settings)
    text = genome.read_text().splitlines()
    whole = {"s0": text[1], "s1": text[3]}
    places: list[int] = []
    for read in ms.open(tmp_path / "a.fa"):
        name, place = read.name.removesuffix("/1").split("_")[1:]
        start = int(place[:-1])
        found = np.frombuffer(whole[name][start : start + len(read)].encode(), np.uint8)
        expected = found if place[-1] == "+" else COMPLEMENT[found[::-1]]
        assert read.sequence.encode() == expected.tobytes()
        places += [start] if name == "s0" else []
    assert np.histogram(places, 4, (0, 26_000))[0].min() > 0.7 * len(places) / 4


def test_packs_keep_qualities(genome: Path, tmp_path: Path):
    simulate([genome], [tmp_path / "a.fq.gz"], settings=SimulateSettings(reads=40, profile="ont", length=500))
    pack([tmp_path / "a.fq.gz"], tmp_path / "a.pack")
    unpack(tmp_path / "a.pack", tmp_path / "back.fq")
    assert (tmp_path / "back.fq").read_bytes() == gzip.decompress((tmp_path / "a.fq.gz").read_bytes())


def test_long_reads_have_no_mates_and_short_ones_do(genome: Path, tmp_path: Path):
    with pytest.raises(BadSetting, match="profile=ont"):
        SimulateSettings(reads=10, profile="ont", insert=20_000).check()
    with pytest.raises(BadSetting, match="profile=454"):
        SimulateSettings(profile="454").check()
    code, _, err = run_here(
        "simulate", genome, "-o", tmp_path / "1.fq", "-o", tmp_path / "2.fq", "--profile", "illumina",
        "--reads", "100", "--insert", "300",
    )  # fmt: skip
    assert code == 0 and "15,000 bases" in err
    one, two = (ms.open(tmp_path / f"{mate}.fq") for mate in (1, 2))
    assert [read.name[:-1] for read in one] == [read.name[:-1] for read in two]
    assert {read.quality for read in one}.isdisjoint({read.quality for read in two})
