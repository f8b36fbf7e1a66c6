"""One of each kind that `millstream copy` takes, and whether a copy of it is whole and opens where it is."""

from pathlib import Path

import pytest

import millstream as ms
from millstream.core.copy import copy
from support.commands import run_here
from support.making_run import make_run
from support.making_small import write_traces

KINDS = ["store", "run", "pack", "reads.fa", "rows.jsonl"]


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with something of every kind, by name."""
    folder = tmp_path_factory.mktemp("kinds")
    write_traces(folder / "store", (f"q{number}" for number in range(7)))
    made = tmp_path_factory.mktemp("made")
    make_run(made, models=("lstm",), num_test=20, seeds=1).rename(folder / "run")
    (folder / "reads.fa").write_text("".join(f">r{number}\nACGT\n" for number in range(20)))
    assert len(ms.open(folder / "reads.fa")) == 20
    assert run_here("pack", folder / "reads.fa", folder / "pack")[0] == 0
    (folder / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    return folder


def check_copies(kinds: Path, kind: str, there: str, tmp_path: Path) -> None:
    """Copy something of a kind to a folder or a URL and back."""
    target = f"{there}/{kind}"
    assert copy(kinds / kind, target).num_new > 0
    assert copy(kinds / kind, target).num_new == 0
    (tmp_path / "back").mkdir()
    copy(target, tmp_path / "back" / kind)
    names = [kind, *([f"{kind}.millstream"] if kind == "reads.fa" else [])]
    assert contents(tmp_path / "back") == {n: data for n, data in contents(kinds).items() if n.split("/")[0] in names}
    if kind != "run":
        assert len(ms.open(target)) == {"store": 7, "rows.jsonl": 2}.get(kind, 20)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
