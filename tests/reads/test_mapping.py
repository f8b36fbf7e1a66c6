"""Mappings: every kind of table a user may have, what is refused, and the taxa above classes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from millstream.errors import BadSource
from millstream.reads.mapping import (
    Classes,
    LabelMapping,
    classes_from_card,
    load_classes,
    load_mapping,
)
from millstream.reads.taxonomy import Taxon

COLUMNS = {"class_id": [7, 3, 5], "species": ["coli", "sapiens", "NA"], "genus": ["Escherichia", "Homo", None]}


class Frame:
    """The used part of pandas.DataFrame."""

    def __init__(self, columns: dict[str, list[object]]) -> None:
        self._columns = columns
        self.columns = list(columns)

    def to_dict(self, orient: str) -> dict[str, list[object]]:
        assert orient == "list"
        return self._columns


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def rows(mapping: LabelMapping) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in mapping.table.to_pylist()]


# -- kinds of tables


def test_a_tsv_is_sorted_by_class_id_and_gives_dense_labels(tmp_path: Path):
    path = write(tmp_path / "map.tsv", "class_id\tspecies\n7\tcoli, K-12\n3\tsapiens\n5\tNA\n")
    for mapping in (load_mapping(path), load_mapping(str(path))):
        assert (mapping.key, mapping.labels, mapping.num_classes) == ("class_id", ["species"], 3)
        assert rows(mapping) == [(3, "sapiens"), (5, "NA"), (7, "coli, K-12")]
        assert mapping.rows(np.array([7, 3, 7, 5])).tolist() == [2, 0, 2, 1]
        assert mapping.rows(np.array([], np.int64)).tolist() == []


def test_columns_of_numbers_may_have_gaps_and_others_are_text(tmp_path: Path):
    text = '\ufeffclass_id,tax_id,gc,name,empty\r\n\r\n2,NA,0.5,"a ""b"", c",\r\n1, 562 ,,NA,\r\n'
    mapping = load_mapping(write(tmp_path / "map.csv", text))
    assert mapping.table.drop_columns("empty").to_pylist() == [
        {"class_id": 1, "tax_id": 562, "gc": None, "name": "NA"},
        {"class_id": 2, "tax_id": None, "gc": 0.5, "name": 'a "b", c'},
    ]
    assert mapping.table.column("empty").null_count == 2


@pytest.mark.parametrize("name", ["map.tsv", "map.parquet"])
def test_loading_a_mapping_starts_no_thread_that_could_abort_a_short_command(tmp_path: Path, name: str):
    """Arrow's threads are not joined in time now and then when the process ends: exit 134."""
    write(tmp_path / "map.tsv", "class_id\tspecies\n7\tcoli\n")
    parquet.write_table(pa.table({"class_id": [7], "species": ["coli"]}), tmp_path / "map.parquet")
    code = f"""if True:
        import os
        from millstream.reads.mapping import load_mapping
        before = set(os.listdir("/proc/self/task"))
        load_mapping({str(tmp_path / name)!r})
        print(len(set(os.listdir("/proc/self/task")) - before))"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "0"


def test_a_csv_is_recognised_by_its_content(tmp_path: Path):
    for name in ("map.csv", "map.txt"):
        mapping = load_mapping(write(tmp_path / name, 'class_id,species\r\n2,"coli, K-12"\r\n1,sapiens\r\n'))
        assert rows(mapping) == [(1, "sapiens"), (2, "coli, K-12")]
    assert load_mapping(write(tmp_path / "tabs.csv", "class_id\tspecies\n1\ta,b\n")).labels == ["species"]
    assert load_mapping(write(tmp_path / "one.csv", "class_id\n1\n2\n")).labels == []


def test_parquet_arrow_frame_and_dict_give_the_same_mapping(tmp_path: Path):
    table = pa.table(COLUMNS)
    parquet.write_table(table, tmp_path / "map.bin")
    nan = {**COLUMNS, "genus": ["Escherichia", "Homo", float("nan")]}
    for source in (tmp_path / "map.bin", table, COLUMNS, Frame(COLUMNS), Frame(nan)):
        mapping = load_mapping(source)
        assert mapping.labels == ["species", "genus"]
        assert rows(mapping) == [(3, "sapiens", "Homo"), (5, "NA", None), (7, "coli", "Escherichia")]


def test_a_dict_of_ids_is_a_mapping_with_one_label():
    mapping = load_mapping({9606: "Homo sapiens", 562: "Escherichia coli"})
    assert (mapping.key, mapping.labels) == ("class_id", ["label"])
    assert rows(mapping) == [(562, "Escherichia coli"), (9606, "Homo sapiens")]


def test_small_integer_keys_become_int64():
    mapping = load_mapping(pa.table({"class_id": pa.array([2, 1], pa.uint8())}))
    assert mapping.ids.dtype == np.int64 and mapping.ids.tolist() == [1, 2]


# -- the key


def test_the_key_is_class_id_or_the_first_name_ending_in_id_or_the_first_column():
    assert load_mapping({"tax_id": [1], "class_id": [2]}).key == "class_id"
    assert load_mapping({"name": ["a"], "TaxID": [1], "other_id": [2]}).key == "TaxID"
    assert load_mapping({"number": [1], "name": ["a"]}).key == "number"


def test_class_ids_must_be_integers():
    with pytest.raises(BadSource, match=r"'class_id', found string.*n \(int64\)"):
        load_mapping({"class_id": ["a"], "n": [1]})
    with pytest.raises(BadSource, match="double"):
        load_mapping({"class_id": [1.5]})
    with pytest.raises(BadSource, match="1 rows without 'class_id'"):
        load_mapping({"class_id": [1, None]})
    with pytest.raises(BadSource, match="int64"):
        load_mapping(pa.table({"class_id": pa.array([2**63], pa.uint64())}))


# -- rows and unknown ids


@given(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30), st.data())
def test_the_label_of_an_id_is_its_rank_among_the_sorted_ids(ids: set[int], data: st.DataObject):
    mapping = load_mapping({number: str(number) for number in ids})
    wanted = data.draw(st.lists(st.sampled_from(sorted(ids))))
    assert mapping.rows(np.array(wanted, np.int64)).tolist() == [sorted(ids).index(number) for number in wanted]
    assert mapping.table.column("label").to_pylist() == [str(number) for number in sorted(ids)]


def test_unknown_ids_are_counted_and_listed():
    mapping = load_mapping(COLUMNS)
    mapping.check(np.array([3, 7]), where="reads.fa")
    with pytest.raises(BadSource, match=r"reads\.fa: 7 .*: 4, 8, 9, 10, 11 and 2 more"):
        mapping.check(np.array([3, 4, 8, 9, 10, 11, 12, 13, 4]), where="reads.fa")
    for unknown in (2, 4, 8):
        with pytest.raises(BadSource, match=rf"1 class_id .*: {unknown}\."):
            mapping.rows(np.array([3, unknown]))


# -- what is refused


def test_identical_rows_count_once_and_different_labels_for_an_id_are_refused():
    assert rows(load_mapping({"class_id": [2, 1, 2], "name": ["b", "a", "b"]})) == [(1, "a"), (2, "b")]
    with pytest.raises(BadSource, match=r" 2, 3\."):
        load_mapping({"class_id": [3, 2, 1, 2, 3, 1], "name": ["c", "b", "a", "B", "C", "a"]})


def test_a_source_that_is_not_a_table_is_refused(tmp_path: Path):
    with pytest.raises(BadSource, match=r"none\.tsv"):
        load_mapping(tmp_path / "none.tsv")
    with pytest.raises(BadSource, match=str(tmp_path)):
        load_mapping(tmp_path)
    with pytest.raises(BadSource, match=r"ragged\.tsv: .*line 2: .*2 columns.*3"):
        load_mapping(write(tmp_path / "ragged.tsv", "class_id\tname\n1\ta\tb\n"))
    with pytest.raises(BadSource, match=r"binary\.xlsx"):
        load_mapping(write(tmp_path / "binary.xlsx", "PK\x03\x04\0\0"))
    with pytest.raises(BadSource, match=r"broken\.parquet"):
        load_mapping(write(tmp_path / "broken.parquet", "PAR1 and no more"))
    with pytest.raises(BadSource, match="equal length"):
        load_mapping({"class_id": [1], "name": ["a", "b"]})
    with pytest.raises(BadSource, match="one type"):
        load_mapping({"class_id": [1, 2], "name": ["a", 2]})
    with pytest.raises(BadSource, match="list"):
        load_mapping([1, 2])  # type: ignore[arg-type]


def test_an_empty_table_is_refused(tmp_path: Path):
    for text in ("", "\n", "class_id\tname\n"):
        with pytest.raises(BadSource, match=r"empty\.tsv"):
            load_mapping(write(tmp_path / "empty.tsv", text))
    for source in ({}, {"class_id": []}, Frame({})):
        with pytest.raises(BadSource, match="no rows"):
            load_mapping(source)


def test_missing_and_repeated_column_names_are_refused(tmp_path: Path):
    with pytest.raises(BadSource, match=r"bare\.tsv: .*found 3\."):
        load_mapping(write(tmp_path / "bare.tsv", "3\tsapiens\n7\tcoli\n"))
    with pytest.raises(BadSource, match=r"twice\.tsv: .* name "):
        load_mapping(write(tmp_path / "twice.tsv", "class_id\tname\tname\n7\ta\tb\n"))


# -- classes and the taxa above them


NODES = [  # tax id, parent, rank, name
    (1, 1, "no rank", "root"),
    (131567, 1, "cellular root", "cellular organisms"),
    (2, 131567, "superkingdom", "Bacteria"),
    (1224, 2, "phylum", "Pseudomonadota"),
    (1236, 1224, "class", "Gammaproteobacteria"),
    (543, 1236, "family", "Enterobacteriaceae"),
    (561, 543, "genus", "Escherichia"),
    (562, 561, "species", "Escherichia coli"),
    (83333, 562, "strain", "Escherichia coli K-12"),
    (570, 543, "genus", "Klebsiella"),
    (573, 570, "species", "Klebsiella pneumoniae"),
    (10239, 1, "acellular root", "Viruses"),
    (10710, 10239, "species", "Lambdavirus lambda"),
]


def write_dump(folder: Path) -> Path:
    """In NCBI's format, with synonyms besides the scientific names."""
    folder.mkdir()
    nodes = [f"{own}\t|\t{parent}\t|\t{rank}\t|\t\t|\t0\t|\n" for own, parent, rank, _ in NODES]
    names = [f"{own}\t|\tbacillus {own}\t|\t\t|\tsynonym\t|\n" for own, *_ in NODES]
    names += [f"{own}\t|\t{name}\t|\t\t|\tscientific name\t|\n" for own, _, _, name in NODES]
    (folder / "nodes.dmp").write_text("".join(nodes))
    (folder / "names.dmp").write_text("".join(names))
    return folder


def taxa_of(classes: Classes, rank: str) -> list[str | None]:
    """The taxon of each class at a rank."""
    found = classes.rank(rank)
    assert found is not None
    return [found.taxa[number].name if number >= 0 else None for number in found.of_class.tolist()]


# -- the mapping alone


def test_columns_named_like_ranks_become_ranks_from_the_lowest():
    classes = load_classes(
        load_mapping(
            {
                "class_id": [7, 3, 5],
                "family": ["Enterobacteriaceae", "Vibrionaceae", "Enterobacteriaceae"],
                "species": ["Escherichia coli", "Vibrio cholerae", "Klebsiella pneumoniae"],
                "genus": ["Escherichia", "Vibrio", "Klebsiella"],
                "tax_id": [562, 666, 573],
                "genus_tax_id": [561, 662, None],
            }
        )
    )
    assert len(classes) == 3
    assert classes.taxa[0] == Taxon("Vibrio cholerae", 666)  # in order of class id
    assert [rank.name for rank in classes.ranks] == ["species", "genus", "family"]
    assert taxa_of(classes, "family") == ["Vibrionaceae", "Enterobacteriaceae", "Enterobacteriaceae"]
    assert list(classes.ranks[0].taxa) == list(classes.taxa)
    assert [taxon.tax_id for taxon in classes.ranks[1].taxa] == [662, 0, 561]
    assert classes.rank("order") is None


def test_a_class_without_a_genus_has_none():
    classes = load_classes(load_mapping({"class_id": [1, 2, 3], "name": list("abc"), "genus": ["G", None, ""]}))
    assert taxa_of(classes, "genus") == ["G", None, None]
    assert [taxon.name for taxon in classes.taxa] == ["a", "b", "c"]


def test_classes_are_named_by_the_best_column_or_their_ids():
    assert load_classes(load_mapping({"class_id": [1], "strain": ["K-12"], "species": ["coli"]})).taxa[0].name == "coli"
    assert load_classes(load_mapping({"class_id": [1], "host": ["gut"]})).taxa[0].name == "gut"
    assert load_classes(load_mapping({"class_id": [4], "size": [12]})).taxa[0] == Taxon("class 4", 0)
    assert load_classes(load_mapping({"class_id": [4, 5], "name": ["a", None]})).taxa[1].name == "class 5"


def test_tax_ids_must_be_integers():
    assert load_classes(load_mapping({"class_id": [1, 2], "taxid": [562, None]})).taxa[1].tax_id == 0
    with pytest.raises(BadSource, match="tax_id, found string"):
        load_classes(load_mapping({"class_id": [1], "tax_id": ["562"]}))


# -- the NCBI dump


def test_the_dump_gives_every_rank_and_a_superkingdom_is_a_domain(tmp_path: Path):
    mapping = load_mapping({"class_id": [0, 1, 2, 3], "tax_id": [562, 83333, 573, 10710], "name": list("abcd")})
    classes = load_classes(mapping, write_dump(tmp_path / "dump"))
    assert [rank.name for rank in classes.ranks] == ["species", "genus", "family", "class", "phylum", "domain"]
    assert taxa_of(classes, "species")[:2] == ["Escherichia coli", "Escherichia coli"]  # also that of a strain
    assert taxa_of(classes, "genus") == ["Escherichia", "Escherichia", "Klebsiella", None]
    assert taxa_of(classes, "domain") == ["Bacteria", "Bacteria", "Bacteria", "Viruses"]
    assert classes.ranks[-1].taxa[0] == Taxon("Bacteria", 2)
    assert [taxon.name for taxon in classes.taxa] == list("abcd")  # the names in the mapping


def test_a_tax_id_missing_from_the_dump_is_named(tmp_path: Path):
    dump = write_dump(tmp_path / "dump")
    with pytest.raises(BadSource, match=r"999 .*nodes\.dmp"):
        load_classes(load_mapping({"class_id": [0, 1], "tax_id": [562, 999]}), dump)
    with pytest.raises(BadSource, match="tax_id"):
        load_classes(load_mapping({"class_id": [0], "name": ["a"]}), dump)


def test_a_damaged_or_missing_dump_is_named_by_line_and_file(tmp_path: Path):
    mapping = load_mapping({"class_id": [0], "tax_id": [562]})
    with pytest.raises(BadSource, match=r"nodes\.dmp"):
        load_classes(mapping, tmp_path)
    dump = write_dump(tmp_path / "dump")
    (dump / "names.dmp").unlink()
    with pytest.raises(BadSource, match=r"names\.dmp"):
        load_classes(mapping, dump)
    lines = (dump / "nodes.dmp").read_text().splitlines(keepends=True)
    (dump / "nodes.dmp").write_text("".join(lines[:2]) + "<html>not found</html>\n")
    with pytest.raises(BadSource, match=r"nodes\.dmp: line 3 .*<html>not found"):
        load_classes(mapping, dump)


# -- the data card


def test_classes_can_be_restored_from_a_data_card(tmp_path: Path):
    mapping = load_mapping({"class_id": [4, 9, 11], "tax_id": [562, 573, 10710], "name": ["a", "b", "c"]})
    classes = load_classes(mapping, write_dump(tmp_path / "dump"))
    again = classes_from_card(json.loads(json.dumps(classes.card())))
    assert again.taxa == classes.taxa and again.mapping.ids.tolist() == [4, 9, 11]
    for one, other in zip(again.ranks, classes.ranks, strict=True):
        assert (one.name, one.taxa) == (other.name, other.taxa)
        assert np.array_equal(one.of_class, other.of_class)


def test_a_column_is_made_once_for_all_batches():
    mapping = load_mapping({7: "seven", 3: "three"})
    assert mapping.column("label") is mapping.column("label")
    assert mapping.column("label").to_pylist() == ["three", "seven"]
