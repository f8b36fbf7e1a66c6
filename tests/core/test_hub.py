"""hf:// paths: datasets are read by ranges at one commit, and copied with few commits, by the real huggingface_hub."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import millstream as ms
from millstream.core.copy import copy
from millstream.core.remote import RemoteFile, RemotePath, to_path
from millstream.errors import AccessDenied, BadSetting, ObjectMissing, RemoteError, StoreExists
from support.commands import run_here
from support.copied_kinds import KINDS, check_copies, kinds
from support.extras import need
from support.faulty_proxy import Fault, faulty_proxy
from support.hub_server import TOKEN, Hub, hub
from support.making_traces import make_traces

need("huggingface_hub")

__all__ = ["hub", "kinds"]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # huggingface_hub's own

DATA = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "5")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_traces(tmp_path_factory.mktemp("hub") / "traces", tier="full", layers=8)


def remote(url: str) -> RemotePath:
    path = to_path(url)
    assert isinstance(path, RemotePath)
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_files_of_a_dataset_are_listed_and_read_by_ranges(hub: Hub) -> None:
    hub.commit("me/lists", {"a/b.arrow": DATA, "a/c d%.txt": b"text", "README.md": b"hello"})
    root = remote("hf://datasets/me/lists")
    assert [path.name for path in root.iterdir()] == ["README.md", "a"]
    assert sorted(root.walk_files()) == ["README.md", "a/b.arrow", "a/c d%.txt"]
    assert (root / "a").is_dir() and (root / "a/b.arrow").is_file()
    assert not (root / "x").exists() and not (root / "a/x").is_file()
    assert (root / "a/c d%.txt").read_text() == "text"
    file = RemoteFile(root / "a/b.arrow")
    for start in range(0, 50_000, 10_000):
        assert file.read(start, 77) == DATA[start : start + 77]
    assert hub.num_requests("GET", "/resolve/") == 2, "the address of a large file is asked for once"
    assert [seen.has_token for seen in hub.seen if "/cdn/" in seen.path] == [False] * 5, "the token stays at the hub"


def test_a_store_is_read_at_one_commit(hub: Hub, store: Path, tmp_path: Path) -> None:
    hub.commit("me/read", {f"v1/{name}": data for name, data in files_in(store).items()})
    other = make_traces(tmp_path / "other", num=7, seed=1)
    traces = ms.open("hf://datasets/me/read/v1")
    hub.commit("me/read", {f"v1/{name}": data for name, data in files_in(other).items()})
    local = ms.open(store)
    assert [traces[n]["tokens"].tolist() for n in (0, 119)] == [local[n]["tokens"].tolist() for n in (0, 119)]
    pinned = ms.open(f"hf://datasets/me/read@{1:040x}/v1")
    assert len(pinned) == len(local)


def test_commands_and_forked_processes_read_a_dataset(hub: Hub, store: Path) -> None:
    hub.commit("me/forked", files_in(store))
    code, out, _ = run_here("inspect", "hf://datasets/me/forked")
    assert code == 0 and "120 records, 3 shards" in out
    assert run_here("verify", "hf://datasets/me/forked")[0] == 0
    traces = ms.open("hf://datasets/me/forked", cache=0)
    if not (pid := os.fork()):
        status = 1
        try:
            status = 0 if traces[7]["tokens"].tolist() == ms.open(store)[7]["tokens"].tolist() else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_bit_that_flips_on_the_way_from_the_hub_is_noticed(hub: Hub, store: Path, tmp_path: Path) -> None:
    hub.commit("me/flips", files_in(store))
    with faulty_proxy(hub.address) as proxy:
        hub.large_at = proxy.address
        proxy.program(Fault(flip_at=500), match="/cdn/", times=2)
        copy("hf://datasets/me/flips", tmp_path / "copy")
    assert files_in(tmp_path / "copy") == files_in(store)


def test_reads_are_read(hub: Hub, tmp_path: Path) -> None:
    hub.commit("me/reads", {"r.fa": b">a\nAC\n>b\nGT\n"})
    reads = ms.open("hf://datasets/me/reads/r.fa", index_dir=tmp_path)
    assert [read.name for read in reads] == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_copied_and_opens_there(kinds: Path, kind: str, hub: Hub, tmp_path: Path) -> None:
    check_copies(kinds, kind, f"hf://datasets/me/a-{kind.partition('.')[0]}", tmp_path)


def test_a_store_is_copied_in_two_commits_and_back(hub: Hub, store: Path, tmp_path: Path) -> None:
    copied = copy(store, "hf://datasets/me/copied")
    assert hub.num_requests("POST", "/commit/") == 2 and copied.num_new == copied.num_files
    files = dict(hub.files("me/copied"))
    card = files.pop("README.md").decode()
    assert files == files_in(store)
    settings = yaml.safe_load(card.split("---")[1])
    assert [(one["config_name"], one["data_files"]) for one in settings["configs"]] == [
        ("default", "shard-*.parquet"),
        ("labels", "labels.parquet"),
    ]
    assert "120 traces in 3 shards" in card and "| `hidden` | float16[layer, token, dim] |" in card
    assert copy(store, "hf://datasets/me/copied").num_new == 0
    assert hub.num_requests("POST", "/commit/") == 2, "nothing to commit"
    copy("hf://datasets/me/copied", tmp_path / "back")
    (tmp_path / "back/README.md").unlink()
    assert files_in(tmp_path / "back") == files_in(store)
    assert len(ms.open("hf://datasets/me/copied")) == 120
    with pytest.raises(StoreExists):
        copy(make_traces(tmp_path / "other", num=7, seed=1), "hf://datasets/me/copied")


def test_a_copy_to_the_hub_resumes_at_the_last_commit(hub: Hub, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.core.copy._COMMIT_FILES", 3)
    hub.broken_after = 1
    with pytest.raises(RemoteError):
        copy(store, "hf://datasets/me/resumed")
    assert len(hub.files("me/resumed")) == 3
    hub.broken_after = None
    uploaded = {seen.path for seen in hub.seen if seen.method == "PUT"}
    hub.seen.clear()
    assert copy(store, "hf://datasets/me/resumed").num_new == len(files_in(store)) - 3
    assert uploaded.isdisjoint(seen.path for seen in hub.seen if seen.method == "PUT")
    assert set(hub.files("me/resumed")) == {*files_in(store), "README.md"}


def test_the_card_has_the_types_of_fields_that_are_none_in_some_shards(hub: Hub, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "notes", shard_records=2, config={"model": "a|b", "k": 1}) as writer:
        for number in range(4):
            note = None if number < 2 else "x"
            writer.append({"question_id": f"q{number}", "note": note, "parts": [{"of": 0.5}]})
    copy(tmp_path / "notes", "hf://datasets/me/notes/deep")
    card = hub.files("me/notes")["README.md"].decode()
    settings = yaml.safe_load(card.split("---")[1])
    assert settings["dataset_info"][0]["features"][1:3] == [
        {"name": "note", "dtype": "string"},
        {"name": "parts", "list": [{"name": "of", "dtype": "float64"}]},
    ]
    assert settings["configs"] == [{"config_name": "default", "data_files": "deep/shard-*.parquet"}]
    assert "4 traces of a\\|b in 2 shards" in card and "| `model` | a\\|b |" in card
    if find_spec("datasets") is not None:
        from datasets import load_dataset

        clone = str(hub.save("me/notes", tmp_path / "clone"))
        rows = load_dataset(clone, split="train", cache_dir=str(tmp_path / "loaded"))
        assert rows["note"][:] == [None, None, "x", "x"]


def test_the_sidecars_are_a_dataset(hub: Hub, store: Path, tmp_path: Path) -> None:
    if find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    from datasets import load_dataset

    copy(store, "hf://datasets/me/loaded")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = load_dataset(str(hub.save("me/loaded", tmp_path / "clone")), split="train", cache_dir=str(tmp_path))
        labels = load_dataset(str(tmp_path / "clone"), "labels", split="train", cache_dir=str(tmp_path))
    assert rows["question_id"] == labels["question_id"] == [f"q{number}" for number in range(120)]
    assert rows[7]["question"] == "Who mills 7?" and rows[7]["hidden"]["shape"][0] == 9


def test_what_is_not_there_or_not_allowed_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("me/denied", {"a.txt": b"text"})
    told: list[str] = []
    with pytest.raises(ObjectMissing, match="no such dataset") as caught:
        ms.open("hf://datasets/me/nowhere")
    told.append(str(caught.value))
    with pytest.raises(ObjectMissing, match="no such file"):
        remote("hf://datasets/me/denied/b.txt").read_bytes()
    with pytest.raises(BadSetting, match="must be a dataset"):
        remote("hf://models/me/denied/a.txt").read_bytes()
    with pytest.raises(BadSetting, match="incomplete"):
        remote("hf://datasets/me").read_bytes()
    with pytest.raises(RemoteError, match="millstream copy"):
        remote("hf://datasets/me/denied/b.txt").write_text("x")
    hub.broken += [403]
    with pytest.raises(AccessDenied, match="hf auth login") as caught:
        remote("hf://datasets/me/denied/a.txt").read_bytes()
    told.append(str(caught.value))
    hub.broken[:] = [503, 503]
    assert remote("hf://datasets/me/denied/a.txt").read_bytes() == b"text"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE") as caught:
        remote("hf://datasets/me/other/a.txt").read_bytes()
    told.append(str(caught.value))
    assert not any("\n" in text or TOKEN in text for text in told)
