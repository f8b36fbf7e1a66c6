"""Tables by URL: the rows of objects are those of the files, for few requests."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.core import bucket
from millstream.core.remote import RemotePath, to_path
from millstream.errors import BadSource, ObjectChanged
from millstream.tables import rows as rows_module
from millstream.tables import text as text_module
from millstream.tables.rows import Rows
from support.commands import run_here
from support.effort import PATIENCE_S
from support.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from support.http_server import http_objects
from support.s3_server import Bucket
from tables.test_rows import row, write

NUM_ROWS = 1000
FORMATS = ["parquet", "jsonl", "csv"]


@pytest.fixture(autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "5")
    monkeypatch.setenv("MILLSTREAM_CACHE", "1GB")  # `ms.open(cache=0)` sets it for the process
    monkeypatch.setattr(text_module, "RUN_BYTES", 1 << 15)


@pytest.fixture(params=FORMATS)
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / f"answers.{request.param}", [row(number) for number in range(NUM_ROWS)])


def put(s3: Bucket, name: str, data: bytes) -> RemotePath:
    path = to_path(f"{s3.url}/{name}")
    assert isinstance(path, RemotePath)
    path.put(data)
    return path


def opened(path: object, **options: Any) -> Rows:
    found = ms.open(str(path), **options)
    assert isinstance(found, Rows)
    return found


def fresh(proxy: FaultyProxy) -> None:
    """As in a new process."""
    bucket._here().buckets.clear()  # pyright: ignore[reportPrivateUsage]
    proxy.forget()


@pytest.mark.parametrize("cache", ["0", "1MB"])
def test_rows_of_an_object_are_those_of_the_file(local: Path, cache: str, s3: Bucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLSTREAM_CACHE", cache)
    url = put(s3, f"deep/{local.name}", local.read_bytes())
    here, there = opened(local), opened(url)
    assert list(there) == list(here) and there.types == here.types and there.fingerprint == here.fingerprint
    assert there.medium.is_remote and not there.medium.is_random
    numbers = np.random.default_rng(0).permutation(NUM_ROWS)
    for memory in (1 << 30, 300_000):
        small = there.within(memory)
        assert small.fetch(numbers, ["answer", "score"])["answer"] == here.fetch(numbers, ["answer"])["answer"]
        assert small._cache.held_bytes <= memory  # pyright: ignore[reportPrivateUsage]
        assert small[-1] == row(NUM_ROWS - 1)
    assert there.column("code").to_pylist() == here.column("code").to_pylist()
    again = pickle.loads(pickle.dumps(there))
    assert again[7] == row(7) and again.fingerprint == here.fingerprint
    with there._cache.lock, multiprocessing.get_context("fork").Pool(1) as processes:  # pyright: ignore
        assert processes.apply_async(there.__getitem__, [500]).get(PATIENCE_S) == row(500)
    assert run_here("verify", url)[0] == 0
    code, out, _ = run_here("inspect", url, "--examples", "1")
    assert code == 0 and str(url) in out and "1,000 rows" in out


def batches(answers: Rows, order: Any, memory: str) -> list[tuple[list[int], list[str]]]:
    features = ms.features.fields("answer", "score")
    loader = ms.Loader(answers, batch_size=64, seed=3, order=order, memory=memory, threads=2, features=features)
    return [(batch["numbers"].tolist(), batch["answer"]) for batch in loader]


@pytest.mark.parametrize("order", ["exact", "window"])
def test_a_loader_gives_the_same_batches_from_an_object(local: Path, order: str, s3: Bucket):
    url = put(s3, local.name, local.read_bytes())
    for memory in ("64MB", "3MB"):
        whole = batches(opened(url, cache=0), order, memory)
        assert sorted(number for numbers, _ in whole for number in numbers) == list(range(NUM_ROWS))
        assert all(texts == [row(number)["answer"] for number in numbers] for numbers, texts in whole)
        if local.suffix == ".parquet" or order == "exact":
            assert whole == batches(opened(local), order, memory)


def test_the_next_window_is_read_ahead_and_nothing_twice(local: Path, s3: Bucket):
    url = put(s3, local.name, local.read_bytes())
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        fresh(proxy)
        answers = opened(url, cache=0)
        numbers = np.arange(NUM_ROWS)
        answers.sizes(numbers, ["answer"])
        answers.will_need(np.array([700, 0]), np.array([NUM_ROWS - 1, 699]))
        proxy.forget()
        assert answers.fetch(numbers, ["answer"])["answer"] == [row(number)["answer"] for number in range(NUM_ROWS)]
        assert proxy.num_requests("GET") == 0
        again = opened(url)
        assert again.medium.num_bytes  # tries some rows
        proxy.forget()
        assert len(batches(again, "window", "64MB")) == -(-NUM_ROWS // 64)
        assert sum(seen.sent_bytes for seen in proxy.requests("GET")) <= url.info().num_bytes


def test_opening_and_reading_take_few_requests(s3: Bucket, tmp_path: Path):
    numbers = np.random.default_rng(0)
    table = pa.table({name: numbers.standard_normal(200_000) for name in "abcdefgh"})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000, compression="none", use_dictionary=False)
    put(s3, "a.parquet", (tmp_path / "a.parquet").read_bytes())
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        fresh(proxy)
        answers = opened(f"{s3.url}/a.parquet", cache=0)
        assert len(answers) == 200_000
        assert proxy.num_requests("HEAD") == 1 and proxy.num_requests("GET") <= 2, proxy.seen
        assert proxy.num_bytes() <= 70_000 and not proxy.num_requests("", "list-type")
        assert 0 <= answers.medium.num_bytes - 200_000 * 64 < 200_000 * 8 * 2
        assert proxy.num_requests() <= 5, "the beginnings of columns are neighbours too"
        proxy.forget()
        found: Any = answers.fetch([5, 190_000, 100_000], ["b", "c"])
        assert found["c"].tolist() == [table["c"][number].as_py() for number in (5, 190_000, 100_000)]
        assert proxy.num_requests() == 3, "two neighbouring columns of a row group are one request"
        assert proxy.num_bytes() < 3 * 2 * 20_000 * 8 * 1.01
        proxy.forget()
        assert len(answers.fetch([7, 190_001], ["c"])["c"]) == 2 and not proxy.num_requests()


def test_the_name_of_a_table_tells_its_kind_without_requests(local: Path, s3: Bucket):
    put(s3, local.name, local.read_bytes())
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        fresh(proxy)
        assert len(opened(f"{s3.url}/{local.name}")) == NUM_ROWS
        assert {seen.path.partition("?")[0] for seen in proxy.seen} == {f"/{s3.name}/{local.name}"}, proxy.seen
        assert proxy.num_requests() <= 4


def test_an_object_that_is_replaced_is_an_error(local: Path, s3: Bucket):
    url = put(s3, local.name, local.read_bytes())
    answers = opened(url, cache=0)
    write(local, [row(number + 1) for number in range(NUM_ROWS)])
    put(s3, local.name, local.read_bytes())
    with pytest.raises(ObjectChanged, match="replaced"):
        list(answers)
    assert opened(url)[0] == row(1)


def test_folders_patterns_and_missing_objects(s3: Bucket, tmp_path: Path):
    for part in range(3):
        path = write(tmp_path / f"part-{part}.parquet", [row(100 * part + number) for number in range(100)])
        put(s3, f"answers.parquet/{path.name}", path.read_bytes())
    put(s3, "answers.parquet/_SUCCESS", b"")
    for place in ("answers.parquet", "answers.parquet/", "answers.parquet/part-*.parquet"):
        assert [record["code"] for record in opened(f"{s3.url}/{place}")] == [f"{number:05d}" for number in range(300)]
    (tmp_path / "answers.parquet").mkdir()
    for part in range(3):
        (tmp_path / f"part-{part}.parquet").rename(tmp_path / "answers.parquet" / f"part-{part}.parquet")
    assert len(opened(tmp_path / "answers.parquet")) == 300
    for name in ("none.parquet", "none-*.csv", "none.jsonl"):
        with pytest.raises(BadSource, match=r"no such object|no files match"):
            opened(f"{s3.url}/{name}")
    with pytest.raises(BadSource, match="gunzip"):
        opened(f"{s3.url}/none.csv.gz")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_index_of_a_large_object_is_beside_it_or_elsewhere(
    suffix: str, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(rows_module, "SMALL_BYTES", 0)
    local = write(tmp_path / f"a.{suffix}", [row(number) for number in range(NUM_ROWS)])
    size = local.stat().st_size
    with faulty_proxy(s3.address) as proxy:
        url = put(s3, local.name, local.read_bytes())
        s3.through(proxy.address)
        fresh(proxy)
        first = opened(url, cache=0)
        assert size <= proxy.num_bytes("GET", local.name) < size + 210_000, "read once, and samples"
        fresh(proxy)
        again = opened(url, cache=0)
        assert proxy.num_requests() <= 4 and proxy.num_bytes() < size / 20 + 10_000
        assert again[700] == first[700] == row(700)
    s3.through(s3.address)
    bucket._here().buckets.clear()  # pyright: ignore[reportPrivateUsage]
    assert [path.name for path in url.parent.iterdir()] == [local.name, f"{local.name}.rows"]
    write(local, [row(number) for number in range(400)])
    put(s3, local.name, local.read_bytes())
    assert len(opened(url)) == 400 and "changed since it was indexed" in capsys.readouterr().err
    for folder in (str(tmp_path / "indexes"), f"{s3.url}/indexes"):
        assert len(opened(url, index_dir=folder)) == 400
        assert (to_path(folder) / f"{local.name}.rows").is_file()


def test_a_web_server_is_read_only(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(rows_module, "SMALL_BYTES", 0)
    with http_objects() as web:
        web[f"data/{local.name}"] = local.read_bytes()
        url = f"{web.address}/data/{local.name}"
        assert list(opened(url)) == [row(number) for number in range(NUM_ROWS)]
        assert ("index_dir=" in capsys.readouterr().err) == (local.suffix != ".parquet")
        assert opened(url, index_dir=tmp_path / "indexes")[3] == row(3)
        assert (tmp_path / "indexes" / f"{local.name}.rows").exists() == (local.suffix != ".parquet")
        assert run_here("verify", url)[0] == run_here("inspect", url)[0] == 0


def test_tables_of_objects_are_mixed_split_and_labelled(local: Path, s3: Bucket, tmp_path: Path):
    answers = opened(put(s3, local.name, local.read_bytes()))
    mixed = ms.mix({answers: 0.5, opened(local): 0.5}, seed=1)
    assert mixed.medium.is_remote
    batch = next(iter(ms.Loader(mixed, batch_size=16, features=ms.features.fields("code"))))
    assert len(batch["code"]) == 16
    train, test = ms.split(answers, {"train": 0.7, "test": 0.3})
    assert len(train) + len(test) == NUM_ROWS
    judged = pa.table({"question_id": [f"q{n}" for n in range(500)], "verdict": [n % 2 for n in range(500)]})
    pq.write_table(judged, tmp_path / "judged.parquet")
    url = put(s3, "judged.parquet", (tmp_path / "judged.parquet").read_bytes())
    joined: Any = ms.labelled(answers, str(url), column="verdict")
    assert joined.labels.tolist() == [number // 2 % 2 for number in range(NUM_ROWS)]
    with pytest.raises(BadSource, match="no such file"):
        ms.labelled(answers, f"{s3.url}/none.parquet", column="verdict")


def test_damage_on_the_way_is_reported_or_mended(local: Path, s3: Bucket):
    with faulty_proxy(s3.address) as proxy:
        put(s3, local.name, local.read_bytes())
        s3.through(proxy.address)
        fresh(proxy)
        proxy.program(Fault(cut_at=1000), method="GET", times=2)
        proxy.program(Fault(status=503), method="GET", skip=3, times=1)
        assert list(opened(f"{s3.url}/{local.name}", cache=0)) == [row(number) for number in range(NUM_ROWS)]
