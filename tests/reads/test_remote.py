"""Reads by URL: what a bucket has is read, indexed, packed and classified as local files are."""

import gzip
import io
import multiprocessing
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.core import bucket
from millstream.core.block_cache import cache_settings
from millstream.core.files import spool_root
from millstream.core.remote import RemotePath, to_path
from millstream.errors import BadSetting, ObjectChanged, StaleIndex, StoreExists
from millstream.reads.classify import classify
from millstream.reads.files.index import IndexLimits, IndexSettings, build_index, find_index, index_paths
from millstream.reads.pack import PackFile
from millstream.reads.pack.pack import pack
from millstream.reads.pack.unpack import unpack
from millstream.reads.reads import Reads
from support.classifying import make_run
from support.commands import run_here
from support.effort import PATIENCE_S
from support.faulty_proxy import Fault, Seen, faulty_proxy
from support.http_server import http_objects
from support.read_files import REGEX, WRAPPERS, fasta, fastq, holds, opened, records, sequences_of, texts
from support.s3_server import Bucket

MADE = records(300, seed=1)
FASTQ = records(200, seed=2, quality=True)


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "5")


def put(bucket: Bucket, name: str, data: bytes) -> RemotePath:
    path = to_path(f"{bucket.url}/{name}")
    assert isinstance(path, RemotePath)
    path.put(data)
    return path


def fresh_clients() -> None:
    """As in a new process."""
    bucket._here().buckets.clear()


def batches(reads: object, order: str) -> list[tuple[list[int], bytes]]:
    loader = ms.Loader(
        reads, batch_size=32, seed=3, order=order, memory="64MB", threads=1, features=ms.features.fields("sequence")
    )  # type: ignore
    return [(batch["numbers"].tolist(), str(batch["sequence"]).encode()) for batch in loader]


@pytest.mark.parametrize("cache", ["0", "1MB"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reads_of_an_object_are_those_of_the_file(
    wrapper: str, cache: str, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", cache)
    data = WRAPPERS[wrapper](fasta(MADE) if cache == "0" else fastq(FASTQ))
    made = MADE if cache == "0" else FASTQ
    (tmp_path / "reads.x").write_bytes(data)
    local = opened(tmp_path / "reads.x", header_regex=REGEX)
    url = put(s3, "a/reads.x", data)
    limits = IndexLimits(point_bytes=1)
    build_index(url, IndexSettings(header_regex=REGEX), limits=limits)
    assert (url.parent / "reads.x.millstream").is_file()
    reads = opened(str(url))
    assert holds(reads, made)
    assert reads.table == local.table
    assert reads.fingerprint == local.fingerprint
    assert reads.by_name(local[7].name).sequence == local[7].sequence
    assert reads[-1].sequence == local[-1].sequence
    longest = int(np.argmax(local.lengths(range(len(local)))))
    assert reads.region(longest, 3, 9) == local.region(longest, 3, 9)
    assert reads.medium.is_remote
    for memory in (1 << 30, 1000):
        numbers = np.random.default_rng(0).permutation(len(made))
        assert reads.within(memory).fetch(numbers).sequences() == local.fetch(numbers).sequences()
    assert holds(pickle.loads(pickle.dumps(reads)), made)


@pytest.mark.parametrize("order", ["exact", "window"])
@pytest.mark.parametrize("wrapper", ["plain", "bgzf", "pack"])
def test_a_loader_gives_the_same_batches_from_an_object(
    wrapper: str, order: str, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", "0")
    (tmp_path / "reads.fq").write_bytes(fastq(FASTQ) if wrapper != "bgzf" else WRAPPERS["bgzf"](fastq(FASTQ)))
    local = tmp_path / "reads.fq"
    if wrapper == "pack":
        local = tmp_path / "reads.pack"
        pack([tmp_path / "reads.fq"], local)
    url = put(s3, "reads.x", local.read_bytes())
    assert batches(opened(str(url)), order) == batches(opened(local), order)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_pack_is_read_as_the_local_one(is_large: bool, s3: Bucket, tmp_path: Path) -> None:
    made = records(3000, seed=4, quality=True, longest=90)
    (tmp_path / "reads.fq").write_bytes(fastq(made))
    pack([tmp_path / "reads.fq"], tmp_path / "reads.pack", settings=IndexSettings(header_regex=REGEX))
    url = put(s3, "reads.pack", (tmp_path / "reads.pack").read_bytes())
    memory = 1000 if is_large else 1 << 30
    reads, local = opened(str(url), memory=memory), opened(tmp_path / "reads.pack")
    assert holds(reads, made)
    numbers = np.random.default_rng(0).permutation(len(made))
    fields = ["sequence", "quality", "name", "class_id"]
    ours, theirs = reads.fetch(numbers, fields), local.fetch(numbers, fields)
    assert ours.sequences() == theirs.sequences()
    assert np.array_equal(ours.quality, theirs.quality)
    assert {name: list(column) for name, column in ours.columns.items()} == {
        name: list(column) for name, column in theirs.columns.items()
    }
    assert reads.by_name("r77/2") == local.by_name("r77/2") if "r77/2" in local else True
    out = io.BytesIO()
    unpack(url, out)
    assert out.getvalue() == (tmp_path / "reads.fq").read_bytes()


def test_opening_takes_the_same_few_requests_for_any_size(s3: Bucket) -> None:
    with faulty_proxy(s3.address) as proxy:
        counts: list[int] = []
        for name, count in (("small", 100), ("large", 200_000)):
            url = put(s3, name, WRAPPERS["bgzf"](fasta(records(count // 100, longest=30)) * 100))
            build_index(url, IndexSettings(header_regex=REGEX))
        s3.through(proxy.address)
        for name in ("small", "large"):
            url = f"{s3.url}/{name}"
            fresh_clients()
            proxy.forget()
            reads = opened(url)
            counts.append(proxy.num_requests())
            assert proxy.num_bytes("GET", name) < 70_000
        assert counts[0] == counts[1] <= 11
        assert len(reads) == 200_000


def test_the_index_is_beside_the_object_or_in_a_folder(s3: Bucket, tmp_path: Path) -> None:
    url = put(s3, "deep/reads.fa", fasta(MADE))
    folder = tmp_path / "indexes"
    assert holds(opened(str(url), index_dir=folder), MADE)
    assert [path.name for path in url.parent.iterdir()] == ["reads.fa"]
    assert find_index(url, folder) == index_paths(url, folder)[0]
    elsewhere = f"{s3.url}/indexes"
    assert holds(opened(str(url), index_dir=elsewhere), MADE)
    assert find_index(url, to_path(elsewhere)) == index_paths(url, to_path(elsewhere))[0]
    assert find_index(url) is None
    code, _, said = run_here("index", url)
    assert code == 0, said
    assert find_index(url, folder) == url.with_name("reads.fa.millstream")
    assert holds(opened(f"{s3.url}/deep"), MADE)
    assert run_here("inspect", url)[0] == run_here("verify", url)[0] == 0


def test_an_index_that_was_copied_with_its_file_is_used(s3: Bucket, tmp_path: Path) -> None:
    (tmp_path / "reads.fa").write_bytes(fasta(MADE))
    index = build_index(tmp_path / "reads.fa", IndexSettings())
    url = put(s3, "reads.fa", fasta(MADE))
    put(s3, "reads.fa.millstream", index.read_bytes())
    assert holds(opened(str(url)), MADE)
    put(s3, "reads.fa", fasta(MADE).replace(b"A", b"C"))
    with pytest.raises(StaleIndex):
        opened(str(url))


def test_a_replaced_object_is_noticed(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", "0")
    url = put(s3, "reads.fa", fasta(MADE))
    reads = opened(str(url), memory=1000)
    assert reads[0].sequence == MADE[0].sequence.decode()
    put(s3, "reads.fa", fasta(MADE).replace(b"A", b"C"))
    with pytest.raises(ObjectChanged, match=r"reads\.fa"):
        texts(reads)
    with pytest.raises(StaleIndex, match="--rebuild"):
        opened(str(url))
    code, _, said = run_here("index", url, "--rebuild")
    assert code == 0, said
    assert texts(opened(str(url))) == [record.sequence.decode().replace("A", "C") for record in MADE]


def test_damage_on_the_way_or_in_the_cache_is_never_served(s3: Bucket) -> None:
    with faulty_proxy(s3.address) as proxy:
        url = put(s3, "reads.fq", WRAPPERS["bgzf"](fastq(FASTQ)))
        build_index(url, IndexSettings())
        s3.through(proxy.address)
        fresh_clients()
        index_bytes = url.with_name("reads.fq.millstream").info().num_bytes
        texts: list[str] = []  # requests for the reads themselves

        def flip_in_first(seen: Seen) -> Fault | None:
            texts.extend([seen.path] if seen.path.endswith("/reads.fq") else [])
            return Fault(flip_at=3000) if len(texts) == 1 and seen.path == texts[-1] else None

        shutil.rmtree(cache_settings().folder)
        proxy.program(flip_in_first, method="GET")
        proxy.program(Fault(flip_at=index_bytes - 20), match=".millstream", method="GET", times=1)
        assert holds(opened(str(url)), FASTQ)
        assert len(texts) >= 2, "damaged, and fetched again"
        for block in cache_settings().folder.glob("??/*"):
            data = bytearray(block.read_bytes())
            data[len(data) // 2] ^= 1
            block.write_bytes(data)
        assert holds(opened(str(url)), FASTQ)


def test_a_web_server_is_read_only(tmp_path: Path) -> None:
    with http_objects() as web:
        web["reads.fa"] = fasta(MADE)
        url = f"{web.address}/reads.fa"
        with pytest.raises(BadSetting, match="--index-dir"):
            opened(url)
        assert holds(opened(url, index_dir=tmp_path), MADE)
        assert holds(opened(url, index_dir=tmp_path), MADE)


@pytest.mark.parametrize("where", ["object to object", "file to object", "object to file"])
def test_pack_and_unpack_stream_from_and_to_urls(where: str, s3: Bucket, tmp_path: Path) -> None:
    local = tmp_path / "reads.fq"
    local.write_bytes(fastq(FASTQ))
    url = put(s3, "reads.fq", local.read_bytes())
    source, target = where.split(" to ")
    pack([local], tmp_path / "wanted.pack")
    start = url if source == "object" else local
    out = to_path(f"{s3.url}/out.pack") if target == "object" else tmp_path / "out.pack"
    code, _, said = run_here("pack", start, out)
    assert code == 0, said
    assert PackFile(out, memory=1 << 20).records == len(FASTQ)
    assert "nothing to do" in run_here("pack", start, out)[2]
    again = to_path(f"{s3.url}/again.fq") if target == "object" else tmp_path / "again.fq"
    assert run_here("unpack", out, again)[0] == 0
    assert again.read_bytes() == local.read_bytes()
    assert "nothing to do" in run_here("unpack", out, again)[2]
    assert run_here("verify", out)[0] == 0
    assert not list(spool_root().iterdir())


def test_classify_reads_from_and_writes_to_urls(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, run = make_run(tmp_path)
    wanted, report = tmp_path / "wanted.tsv.gz", tmp_path / "wanted.kreport"
    classify(run, files, wanted, report=report)
    urls = [str(put(s3, file.name, file.read_bytes())) for file in files]
    out, ours = to_path(f"{s3.url}/out.tsv.gz"), to_path(f"{s3.url}/out.kreport")
    calls = iter(range(9))
    stopped = classify(run, urls, out, report=ours, batch_size=64, save_s=0.0, stop=lambda: next(calls) == 3)
    assert stopped.interrupted and not out.exists()
    done = classify(run, urls, out, report=ours)  # resumes from what is on local disk
    assert done.num_resumed and not done.interrupted
    assert (gzip.decompress(out.read_bytes()), ours.read_bytes()) == (
        gzip.decompress(wanted.read_bytes()),
        report.read_bytes(),
    )
    assert not list(spool_root().iterdir())
    code, _, said = run_here("classify", run, *urls, "-o", out, "--report", ours)
    assert code == 0 and "nothing to do" in said, said
    with pytest.raises(StoreExists):
        classify(run, urls[:1], out)


def test_classifiers_are_trained_on_urls(s3: Bucket, tmp_path: Path) -> None:
    files, run = make_run(tmp_path)
    urls = [str(put(s3, file.name, file.read_bytes())) for file in files]
    mapping = put(s3, "species.tsv", (tmp_path / "species.tsv").read_bytes())
    data = {"train": urls[0], "val": urls[1]}
    settings = {"model": "kmer-linear", "epochs": 1, "bits": 12}
    ms.train(data, mapping=str(mapping), out=str(tmp_path / "remote"), **settings)
    theirs, ours = (folder / "kmer-linear-0" / "weights.safetensors" for folder in (run, tmp_path / "remote"))
    found = sorted(path.relative_to(run) for path in run.rglob("*.safetensors"))
    assert found
    for name in found:
        assert (run / name).read_bytes() == (tmp_path / "remote" / name).read_bytes(), (theirs, ours)


@pytest.mark.parametrize("wrapper", ["plain", "bgzf"])
def test_a_forked_child_reads_what_its_parent_has_open(wrapper: str, s3: Bucket) -> None:
    reads = opened(str(put(s3, "reads.fa", WRAPPERS[wrapper](fasta(MADE)))))
    assert texts(reads)[:3] == sequences_of(MADE)[:3]
    with multiprocessing.get_context("fork").Pool(2, inherited.append, [reads]) as pool:
        found = pool.map_async(inherited_sequence, range(0, 300, 50)).get(PATIENCE_S)
    assert found == sequences_of(MADE)[::50]


inherited: list[Reads] = []


def inherited_sequence(number: int) -> str:
    return inherited[0][number].sequence
