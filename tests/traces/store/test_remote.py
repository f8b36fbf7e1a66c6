"""Trace stores in object stores: the same records, few and exact requests, and no fault that goes unnoticed."""

from pathlib import Path

import numpy as np
import pytest

import millstream as ms
from millstream.core.remote import RemotePath, to_path
from millstream.errors import CorruptRecord, CorruptShard, NotAStore, ObjectChanged, RemoteError
from millstream.traces.store.writer import TraceWriter
from support.faulty_proxy import DELETED, Fault, FaultyProxy, unavailable
from support.http_server import Objects
from support.making import same, write
from support.making_traces import make_traces
from support.s3_server import Bucket

NUM_RECORDS, NUM_LAYERS = 24, 8
LAYER_BYTES = 40 * 128 * 2


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "20")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "traces"
    rng = np.random.default_rng(1)
    with TraceWriter(path, schema={"hidden": "float16[layer, token, dim]"}, shard_records=4) as writer:
        for number in range(NUM_RECORDS):
            hidden = rng.normal(size=(NUM_LAYERS, 40, 128)).astype(np.float16)
            writer.append({"question_id": f"q{number}", "text": f"text {number}", "hidden": hidden})
    return path


@pytest.fixture
def web(web: Objects, local: Path) -> Objects:
    """The store on a web server, which lists nothing."""
    web.update((f"traces/{file.name}", file.read_bytes()) for file in local.iterdir() if file.is_file())
    return web


@pytest.fixture
def traces(proxy: FaultyProxy) -> ms.Traces:
    return ms.open(f"{proxy.address}/traces")


def upload(path: Path, url: str) -> str:
    for file in path.iterdir():
        if file.is_file():
            remote = to_path(f"{url}/{file.name}")
            assert isinstance(remote, RemotePath)
            remote.put(file)
    return url


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_record_is_that_of_the_local_store(s3: Bucket, tmp_path: Path, compression: str) -> None:
    path = tmp_path / "traces"
    write(path, [(1, number) for number in range(7)], compression=compression, shard_records=3)
    there, here = ms.open(upload(path, f"{s3.url}/traces")), ms.open(path)
    assert len(there) == 7 and there.fingerprint == here.fingerprint
    assert all(same(there[number], here[number]) for number in range(7))
    assert there.by_id("1:5")["question"] == here.by_id("1:5")["question"]
    assert there.table.equals(here.table)


def test_some_layers_of_some_records(traces: ms.Traces, local: Path) -> None:
    for layers in (3, [0, 7], [5, 1, -1]):
        found = traces.fetch([20, 3, 11], ["hidden", "text"], layers=layers)
        wanted = ms.open(local).fetch([20, 3, 11], ["hidden", "text"], layers=layers)
        assert np.array_equal(found["hidden"], wanted["hidden"]) and found["text"] == wanted["text"]


def test_opening_reads_the_manifest_only(proxy: FaultyProxy) -> None:
    ms.open(f"{proxy.address}/traces")
    assert {seen.path for seen in proxy.requests()} == {"/traces/manifest.json"}


def test_one_layer_costs_one_layer(proxy: FaultyProxy, traces: ms.Traces) -> None:
    traces.fetch([0], ["text"])  # the sidecar
    proxy.forget()
    traces.fetch([0, 2], ["hidden"], layers=[4])
    assert proxy.num_requests("GET") == 2
    assert sum(seen.sent_bytes for seen in proxy.requests("GET")) == 2 * LAYER_BYTES


def test_an_epoch_over_one_layer_fetches_little_more_than_it(proxy: FaultyProxy, traces: ms.Traces) -> None:
    loader = ms.Loader(traces, batch_size=5, features=ms.features.layers(token="last", layers=[4]), seed=3)
    assert sum(len(batch["numbers"]) for batch in loader) == NUM_RECORDS
    shards = sum(seen.sent_bytes for seen in proxy.requests("GET", ".arrow"))
    assert shards <= 1.2 * NUM_RECORDS * LAYER_BYTES
    proxy.forget()
    assert sum(len(batch["numbers"]) for batch in loader) == NUM_RECORDS
    assert proxy.num_requests("GET", ".arrow") == 0, "the second epoch comes from the cache"


@pytest.mark.parametrize("cache", ["1GB", "0"])
def test_a_loader_gives_the_batches_of_the_local_store(
    traces: ms.Traces, local: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE", cache)
    there, here = (
        ms.Loader(one, batch_size=5, features=ms.features.fields("hidden", "text"), seed=3)
        for one in (traces, ms.open(local))
    )
    for _ in range(2):
        for mine, theirs in zip(there, here, strict=True):
            assert mine["text"] == theirs["text"] and bool((mine["hidden"] == theirs["hidden"]).all())


def test_a_loader_with_many_shards_does_not_read_every_sidecar_first(proxy: FaultyProxy, traces: ms.Traces) -> None:
    loader = ms.Loader(traces, batch_size=1, features=ms.features.fields("text"), threads=0)
    next(iter(loader))
    assert proxy.num_requests("GET", ".parquet") == 1


@pytest.mark.parametrize("fault", [unavailable(503), Fault(cut_at=3000), Fault(drop=7), Fault(flip_at=5000)])
def test_passing_faults_change_no_record(proxy: FaultyProxy, traces: ms.Traces, local: Path, fault: Fault) -> None:
    for suffix in (".arrow", ".parquet"):
        proxy.program(fault, method="GET", match=suffix, times=1)
    assert all(same(traces[number], ms.open(local)[number]) for number in range(5))
    assert all(same(traces[number], ms.open(local)[number]) for number in range(5)), "from the cache"


def test_damage_at_the_server_is_noticed(proxy: FaultyProxy, traces: ms.Traces) -> None:
    rule = proxy.program(Fault(flip_at=20_000), method="GET", match="shard-00000.arrow")
    for read in (lambda: traces[0], lambda: traces.fetch([0], ["hidden"])):
        with pytest.raises(CorruptRecord, match=r"shard-00000\.arrow.*damaged"):
            read()
    assert rule.hits == 3, "fetched again at once, and again instead of what is cached"
    proxy.program(Fault(flip_at=100), method="GET", match="shard-00001.parquet")
    with pytest.raises(CorruptShard, match=r"shard-00001\.parquet: missing or damaged"):
        traces.fetch([4], ["text"])


def test_a_shard_that_is_replaced_in_the_middle_of_an_epoch_is_an_error(web: Objects, traces: ms.Traces) -> None:
    loader = iter(ms.Loader(traces, batch_size=1, order="none", threads=0, features=ms.features.fields("hidden")))
    next(loader)
    web["traces/shard-00000.arrow"] = web["traces/shard-00003.arrow"]
    with pytest.raises(ObjectChanged, match=r"shard-00000\.arrow: was replaced"):
        next(loader)


def test_a_shard_that_is_deleted_in_the_middle_of_an_epoch_is_an_error(proxy: FaultyProxy, traces: ms.Traces) -> None:
    loader = iter(ms.Loader(traces, batch_size=1, order="none", threads=0, features=ms.features.fields("hidden")))
    next(loader)
    proxy.program(DELETED, match="shard-00000.arrow")
    with pytest.raises(RemoteError, match=r"shard-00000\.arrow: no such object"):
        next(loader)


def test_a_damaged_block_of_the_cache_is_fetched_again(traces: ms.Traces, local: Path, tmp_path: Path) -> None:
    _ = traces[0]
    for block in (tmp_path / "cache").glob("*/*"):
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(data)
    assert same(ms.open(str(traces.path))[0], ms.open(local)[0])


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    traces: ms.Traces, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert same(traces[0], ms.open(local)[0])


def test_a_folder_without_a_store_is_told(s3: Bucket) -> None:
    with pytest.raises(NotAStore, match="not a trace store"):
        ms.open(f"{s3.url}/nothing")


def test_labels_beside_a_remote_store_are_joined(s3: Bucket, tmp_path: Path) -> None:
    path = make_traces(tmp_path / "labelled", num=12)
    url = upload(path, f"{s3.url}/labelled")
    here, there = (
        ms.labelled(ms.open(one), column="verdict", values={"right": 0, "wrong": 1}, missing="drop")
        for one in (path, url)
    )
    assert there.column("label").equals(here.column("label"))
    sizes = {"train": 0.5, "test": 0.5}
    assert {name: part.fingerprint for name, part in zip(sizes, ms.split(there, sizes), strict=True)} == {
        name: part.fingerprint for name, part in zip(sizes, ms.split(here, sizes), strict=True)
    }
