"""millstream copy: what arrives is what was sent, whatever happens on the way."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest

import millstream as ms
from millstream.core.copy import copy
from millstream.core.remote import RemotePath, to_path
from millstream.errors import BadSetting, StoreExists
from support.commands import run_here
from support.copied_kinds import KINDS, check_copies, kinds
from support.effort import PATIENCE_S
from support.extras import need
from support.faulty_proxy import Fault, Seen, faulty_proxy, unavailable
from support.http_server import http_objects
from support.making_traces import make_traces
from support.s3_server import Bucket

need("obstore", "huggingface_hub")

__all__ = ["kinds"]


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "20")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards with labels."""
    return make_traces(tmp_path_factory.mktemp("copied") / "traces")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def objects_in(url: str) -> dict[str, bytes]:
    path = to_path(url)
    assert isinstance(path, RemotePath)
    return {name: (path / name).read_bytes() for name in sorted(path.walk_files())}


def test_a_store_there_and_back_is_the_same(store: Path, s3: Bucket, tmp_path: Path) -> None:
    assert copy(store, f"{s3.url}/a").num_new == len(files_in(store))
    assert copy(f"{s3.url}/a", f"{s3.url}/b/c").num_new == len(files_in(store))
    assert copy(f"{s3.url}/b/c", tmp_path / "back").num_bytes == sum(map(len, files_in(store).values()))
    assert copy(tmp_path / "back", tmp_path / "again").num_files == len(files_in(store))
    assert objects_in(f"{s3.url}/a") == files_in(tmp_path / "back") == files_in(tmp_path / "again") == files_in(store)
    assert len(ms.open(f"{s3.url}/a")) == len(ms.open(store))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "spool"]
    assert [path.name for path in (tmp_path / "spool").iterdir() if path.suffix != ".lock"] == []


def test_a_store_on_a_web_server_is_copied_by_its_manifest(store: Path, tmp_path: Path) -> None:
    with http_objects() as web:
        web.update({f"data/{name}": data for name, data in files_in(store).items()})
        copy(f"{web.address}/data", tmp_path / "copy")
        assert files_in(tmp_path / "copy") == files_in(store)
        web.has_etags = False
        copy(f"{web.address}/data", tmp_path / "unnamed")
        assert files_in(tmp_path / "unnamed") == files_in(store)


def test_reads_are_copied_with_their_index_which_still_fits(s3: Bucket, tmp_path: Path) -> None:
    reads = tmp_path / "reads.fa"
    reads.write_text("".join(f">r{number}\nACGT\n" for number in range(100)))
    assert len(ms.open(reads)) == 100
    copy(reads, f"{s3.url}/folder/")
    assert sorted(objects_in(f"{s3.url}/folder")) == ["reads.fa", "reads.fa.millstream"]
    copy(f"{s3.url}/folder/reads.fa", tmp_path / "other.fa")
    index = (tmp_path / "other.fa.millstream").read_bytes()
    for place in (f"{s3.url}/folder/reads.fa", tmp_path / "other.fa"):
        opened = ms.open(place)
        assert isinstance(opened, ms.Reads) and opened[99].name == "r99"
    assert (tmp_path / "other.fa.millstream").read_bytes() == index, "not indexed again"


def test_packs_tables_runs_and_folders_are_copied(s3: Bucket, tmp_path: Path) -> None:
    reads, pack, rows = tmp_path / "reads.fa", tmp_path / "reads.pack", tmp_path / "rows.jsonl"
    reads.write_text("".join(f">r{number}\nACGT\n" for number in range(100)))
    assert run_here("pack", reads, pack)[0] == 0
    rows.write_text('{"a": 1}\n{"a": 2}\n')
    run = tmp_path / "run"
    (run / "checkpoints/lstm-0").mkdir(parents=True)
    for name in ("config.yaml", "data.json", "metrics.jsonl", "checkpoints/lstm-0/scores.parquet"):
        (run / name).write_text(name)
    (tmp_path / "back").mkdir()
    for path in (pack, rows, run):
        copy(path, f"{s3.url}/{path.name}")
        copy(f"{s3.url}/{path.name}", tmp_path / "back" / path.name)
    assert (tmp_path / "back/reads.pack").read_bytes() == pack.read_bytes()
    assert (tmp_path / "back/rows.jsonl").read_bytes() == rows.read_bytes()
    assert files_in(tmp_path / "back/run") == files_in(run)
    assert len(ms.open(f"{s3.url}/reads.pack")) == 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["disk", "s3"])
def test_every_kind_is_copied_and_opens_there(
    kinds: Path, kind: str, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check_copies(kinds, kind, str(tmp_path) if target == "disk" else request.getfixturevalue("s3").url, tmp_path)


def test_a_bit_that_flips_on_the_way_is_noticed(store: Path, s3: Bucket, tmp_path: Path) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        copy(store, f"{s3.url}/a")
        proxy.program(Fault(flip_at=1000), method="GET", match="shard-00001.arrow", times=1)
        copy(f"{s3.url}/a", tmp_path / "copy")
        assert files_in(tmp_path / "copy") == files_in(store)
        assert proxy.num_requests("GET", "shard-00001.arrow") > proxy.num_requests("GET", "shard-00000.arrow")


def test_a_file_of_many_parts_is_verified_by_the_checksum_of_its_parts(s3: Bucket, tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(range(256)) * 70_000)  # 17.9 MB: three parts
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        copy(file, f"{s3.url}/large.bin")
        proxy.forget()
        copy(f"{s3.url}/large.bin", tmp_path / "whole.bin")
        assert proxy.num_bytes(match="/large.bin") == file.stat().st_size, "read once"
        proxy.program(Fault(flip_at=16_000_000), method="GET", match="/large.bin", times=10)
        copy(f"{s3.url}/large.bin", tmp_path / "again.bin")
        assert proxy.num_bytes(match="/large.bin") == 3 * file.stat().st_size
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes() == file.read_bytes()


def test_within_a_bucket_the_server_copies(store: Path, s3: Bucket, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(bytes(range(256)) * 70_000)
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        copy(store, f"{s3.url}/a")
        copy(large, f"{s3.url}/large.bin")
        proxy.forget()
        copy(f"{s3.url}/a", f"{s3.url}/b")
        assert objects_in(f"{s3.url}/b") == files_in(store)
        proxy.forget()
        copy(f"{s3.url}/a", f"{s3.url}/c")
        assert (proxy.num_bytes(match="shard-"), sum(seen.received_bytes for seen in proxy.seen)) == (0, 0)
        copy(f"{s3.url}/large.bin", f"{s3.url}/copy.bin")
        assert sum(seen.received_bytes for seen in proxy.seen) == 0, "nothing is uploaded"
        assert to_path(f"{s3.url}/copy.bin").read_bytes() == large.read_bytes()

        def damage(seen: Seen) -> None:
            """What the server has copied, before it is verified."""
            connection = HTTPConnection(s3.address.removeprefix("http://"), timeout=PATIENCE_S)
            signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"}
            connection.request("PUT", seen.path, bytes(len(files_in(store)["shard-00001.arrow"])), signed)
            assert connection.getresponse().status == 200

        proxy.program(damage, method="HEAD", match="/d/shard-00001.arrow", times=1)
        copy(f"{s3.url}/a", f"{s3.url}/d")
        assert objects_in(f"{s3.url}/d") == files_in(store), "what arrives wrong is uploaded"


def test_passing_faults_are_not_seen(store: Path, s3: Bucket, tmp_path: Path) -> None:
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        proxy.program(unavailable(503), times=2)
        proxy.program(Fault(cut_at=500), method="GET", match=".arrow", times=2)
        copy(store, f"{s3.url}/a")
        copy(f"{s3.url}/a", tmp_path / "copy")
        assert files_in(tmp_path / "copy") == files_in(store)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_killed_copy_resumes_without_copying_again(store: Path, s3: Bucket, tmp_path: Path, direction: str) -> None:
    source, target = (store, f"{s3.url}/a") if direction == "up" else (f"{s3.url}/source", tmp_path / "copy")
    method, name = ("PUT", "a") if direction == "up" else ("GET", "source")
    with faulty_proxy(s3.address) as proxy:
        s3.through(proxy.address)
        copy(store, f"{s3.url}/source")
        rule = proxy.program(Fault(hang=True), method=method, match=f"{name}/shard-00002.arrow")
        child = subprocess.Popen([sys.executable, "-m", "millstream", "copy", str(source), str(target)])
        done = len(files_in(store)) - 2  # all but this shard, and the manifest after it
        journal = tmp_path / "spool"
        _wait_until(
            lambda: rule.hits and sum(len(file.read_text().splitlines()) for file in journal.glob("*.journal")) == done
        )
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
        assert direction == "up" or not Path(target).exists()
        proxy.heal()
        proxy.forget()
        copied = copy(source, target)
        moved = {
            seen.path.partition("?")[0].rpartition("/")[2] for seen in proxy.requests(method) if "shard-" in seen.path
        }
        assert moved == {"shard-00002.arrow"} and copied.num_new == 2
        assert (objects_in(str(target)) if direction == "up" else files_in(Path(target))) == files_in(store)


def _wait_until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_at_the_target_is_never_replaced(store: Path, s3: Bucket, tmp_path: Path) -> None:
    other = make_traces(tmp_path / "other", num=60, seed=1)
    for target in (f"{s3.url}/a", tmp_path / "copy"):
        copy(store, target)
        assert copy(store, target).num_new == 0, "the same again"
        with pytest.raises(StoreExists, match=f"{target}: already exists"):
            copy(other, target)
    assert objects_in(f"{s3.url}/a") == files_in(tmp_path / "copy") == files_in(store)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "theirs").write_text("other")
    with pytest.raises(StoreExists, match="file"):
        copy(tmp_path / "theirs", tmp_path / "file")
    with pytest.raises(BadSetting, match="read only"):
        copy(store, "https://host/x")


def test_the_command_says_what_it_did(store: Path, tmp_path: Path) -> None:
    code, out, err = run_here("copy", store, tmp_path / "copy", "--json")
    assert code == 0 and '"num_new": 9' in out.replace(str(len(files_in(store))), "9") and "verified" in err
    code, out, err = run_here("copy", tmp_path / "nothing", tmp_path / "copy")
    assert code == 1 and len(err.splitlines()) == 1 and "nothing" in err
