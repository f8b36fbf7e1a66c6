"""The view of a classified sample: every row counts, from a file of any size, even one that is being written."""

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.core.console import ignore_message
from millstream.errors import BadSetting, BadSource
from millstream.reads.kind import ROW_COLUMNS, is_output
from millstream.reads.view.sample import SampleCounts
from millstream.view import Query, View, plain
from millstream.view.server import views_of
from support.classifying import make_run

Row = tuple[str, str, str, str, str, str]
TAXA = (("7", "562", "Escherichia coli", "species"), ("9", "573", '"K." pneumoniae', "species"))
GENUS, NONE = ("", "561", "Escherichia", "genus"), ("", "0", "unclassified", "")


def write_sample(path: Path, num: int, *, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    taxa = [(*TAXA, GENUS, NONE)[place] for place in rng.choice(4, num, p=[0.5, 0.2, 0.1, 0.2])]
    rows = [(f"read{at}", *taxon, f"{p:.4f}") for at, (taxon, p) in enumerate(zip(taxa, rng.random(num), strict=True))]
    text = "".join("\t".join(row) + "\n" for row in (ROW_COLUMNS, *rows)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return rows


def ask(view: View, name: str, **values: object) -> Any:
    return plain(view.answers[name](Query({key: str(value) for key, value in values.items()})))


def view_of(path: Path) -> View:
    (view,) = views_of(path, notify=ignore_message)
    while not ask(view, "overview")["is_done"]:
        pass
    return view


def reads_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {row["taxon"]: row["reads"] for row in rows}


@pytest.mark.parametrize("name", ["sample.tsv", "sample.tsv.gz"])
def test_every_row_is_counted(tmp_path: Path, name: str):
    rows = write_sample(tmp_path / name, 3000)
    view = view_of(tmp_path / name)
    taxa = Counter(row[3] for row in rows)
    unclassified = taxa.pop("unclassified")
    found = ask(view, "overview")
    assert (found["reads"], found["unclassified"], found["taxa"]) == (3000, unclassified, 3)
    assert dict(found["ranks"]) == {"species": sum(taxa.values()) - taxa["Escherichia"], "genus": taxa["Escherichia"]}
    listed = ask(view, "taxa")
    assert reads_of(listed["rows"]) == taxa and listed["rows"][0]["taxon"] == "Escherichia coli"
    assert listed["most_reads"] == taxa["Escherichia coli"]
    bars = ask(view, "confidence")
    sure = np.array([float(row[-1]) for row in rows if row[4]], np.float32)
    assert bars["count"] == np.histogram(sure, len(bars["count"]), (0, 1))[0].tolist()


def test_taxa_are_searched_by_name_and_by_id_and_chosen_by_rank(tmp_path: Path):
    write_sample(tmp_path / "a.tsv", 200)
    view = view_of(tmp_path / "a.tsv")
    assert set(reads_of(ask(view, "taxa", search="COLI")["rows"])) == {"Escherichia coli"}
    assert set(reads_of(ask(view, "taxa", search="561")["rows"])) == {"Escherichia"}
    assert set(reads_of(ask(view, "taxa", rank="genus")["rows"])) == {"Escherichia"}
    page = ask(view, "taxa", first=1, count=1)
    assert page["found"] == 3 and set(reads_of(page["rows"])) == {'"K." pneumoniae'}
    assert ask(view, "taxa", search="zebra")["rows"] == []


def test_a_file_is_counted_block_by_block_and_shown_as_far_as_it_is_known(tmp_path: Path):
    rows = write_sample(tmp_path / "a.tsv", 500)
    whole = SampleCounts(tmp_path / "a.tsv")
    pieces = SampleCounts(tmp_path / "a.tsv", block_bytes=1 << 10)
    assert whole.summary(None) == pieces.summary(None) and whole.taxa() == pieces.taxa()
    steps = pieces._count()  # again, in steps
    seen = []
    for _ in steps:
        found = pieces.summary(None)
        seen.append(found["reads"])
    assert len(seen) > 10 and seen == sorted(set(seen)) and seen[-1] == 2 * len(rows)


def test_the_row_that_is_being_written_is_left_out(tmp_path: Path):
    rows = write_sample(tmp_path / "a.tsv", 300)
    whole = (tmp_path / "a.tsv").read_bytes()
    (tmp_path / "a.tsv").write_bytes(whole[: -len("\t".join(rows[-1])) + 4])
    assert ask(view_of(tmp_path / "a.tsv"), "overview")["reads"] == 299


def test_samples_that_are_truncated_or_missing_are_named(tmp_path: Path):
    write_sample(tmp_path / "sample.tsv.gz", 3000)
    whole = (tmp_path / "sample.tsv.gz").read_bytes()
    (tmp_path / "sample.tsv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadSource, match=r"sample\.tsv\.gz: cannot be read to its end"):
        view_of(tmp_path / "sample.tsv.gz")
    with pytest.raises(BadSource, match=r"nothing\.tsv: no such file"):
        view_of(tmp_path / "nothing.tsv")


def test_what_classify_writes_is_shown_with_its_report(tmp_path: Path):
    (file, *_), run = make_run(tmp_path)
    out = tmp_path / "out" / "sample[1].tsv"
    out.parent.mkdir()
    done = ms.classify(run, file, out, report=out.parent / "sample[1].kreport", index_dir=tmp_path / "indexes")
    assert is_output(out) and not is_output(file) and not is_output(out.parent / "sample[1].kreport")
    view = view_of(out)
    found = ask(view, "overview")
    assert (found["reads"], found["unclassified"]) == (done.num_rows, done.num_unclassified)
    assert found["report"] == "sample[1].kreport"
    tree = ask(view, "tree")["rows"]
    assert tree[0] == {"depth": 0, "name": "root", "code": "R", "tax_id": "1", "reads": done.num_classified, "own": 0}
    below = [row for row in tree if row["depth"] == 1]
    assert sum(row["reads"] for row in below) == done.num_classified
    with pytest.raises(BadSetting, match="--run"):
        views_of(out, run=run, notify=ignore_message)


def test_abundances_are_those_of_the_file_beside_it(tmp_path: Path):
    write_sample(tmp_path / "a.tsv", 100)
    head = "class\ttax_id\ttaxon\trank\tgenome_length\treads\testimated_reads\tread_share\tabundance\tlow\thigh\n"
    row = "7\t562\tEscherichia coli\tspecies\t5000000\t50\t61.5\t0.615\t0.6\t0.5\t0.7\n"
    (tmp_path / "a.abundance.tsv").write_text(f"{head}{row}\t0\tunclassified\t\t\t20\t20\t0.2\t\t\t\n")
    (tmp_path / "a.txt").write_text("notes\n")
    view = view_of(tmp_path / "a.tsv")
    assert ask(view, "overview")["abundance"] == "a.abundance.tsv" and ask(view, "tree") is None
    rows = {row["taxon"]: row for row in ask(view, "taxa")["rows"]}
    assert [rows["Escherichia coli"][name] for name in ("abundance", "low", "high")] == [0.6, 0.5, 0.7]
    assert "abundance" not in rows["Escherichia"]


def test_a_large_tree_is_cut_to_the_taxa_with_the_most_reads(tmp_path: Path):
    write_sample(tmp_path / "a.tsv", 10)
    lines = ["100.00\t1000\t0\tR\t1\troot"] + [f"  1.00\t{1000 - i}\t1\tS\t{i + 2}\t  taxon {i}" for i in range(500)]
    (tmp_path / "a.kreport").write_text("\n".join(lines) + "\n")
    tree = ask(view_of(tmp_path / "a.tsv"), "tree")
    assert tree["of"] == 501 and len(tree["rows"]) == 300 and tree["rows"][-1]["name"] == "taxon 298"
