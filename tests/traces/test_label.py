"""Labelling a store: every rule, no verdict where something is missing, and never an incomplete file."""

import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream as ms
from millstream.errors import BadSource
from millstream.traces.kind import LabelSettings
from millstream.traces.label import label, score_chunk
from millstream.traces.rules import parse_rule, rule_of
from support.commands import run_here
from support.nursery import Nursery

PARIS = ["Paris", "City of Light"]
LONG = "I believe that the capital of France has for many centuries now been Paris"
DATA = Path(os.environ.get("MILLSTREAM_DATA", "")) / "triviaqa"


def write(path: Path, rows: Iterable[Mapping[str, object]], shard_records: int = 4) -> ms.Traces:
    with ms.TraceWriter(path, shard_records=shard_records) as writer:
        writer.extend({**row, "hidden": np.zeros(3, np.float16)} for row in rows)
    opened = ms.open(path)
    assert isinstance(opened, ms.Traces)
    return opened


def answered(*answers: str | None, aliases: object = None) -> list[dict[str, object]]:
    truth = PARIS if aliases is None else aliases
    return [{"question_id": f"q{i}", "generated_answer": text, "aliases": truth} for i, text in enumerate(answers)]


def verdicts(path: Path) -> list[str | None]:
    return pq.read_table(path / "labels.parquet").column("verdict").to_pylist()


ANSWERS = [
    "Paris.",
    "It is Paris",
    LONG,
    "The Light City",
    "I don't know",
    "London",
    None,
    "",
    " \n",
    "The.",
    "Paris\nQ: x",
]
BY_RULE = {
    "default": ["right", "right", "ambiguous", "wrong", "refused", "wrong", None, None, None, "wrong", "right"],
    "em": ["right", "wrong", "wrong", "wrong", "wrong", "wrong", None, None, None, "wrong", "right"],
    "f1@0.5": ["right", "right", "wrong", "right", "wrong", "wrong", None, None, None, "wrong", "right"],
    "rougeL@0.3": ["right", "right", "wrong", "right", "wrong", "wrong", None, None, None, "wrong", "right"],
}


@pytest.mark.parametrize("rule", BY_RULE)
def test_a_rule_gives_each_answer_its_verdict_and_counts_them(rule: str, tmp_path: Path):
    write(tmp_path / "s", answered(*ANSWERS))
    done = label(tmp_path / "s", rule=rule)
    assert verdicts(tmp_path / "s") == BY_RULE[rule]
    assert done.records == sum(done.counts.values()) == len(ANSWERS)
    for verdict, count in done.counts.items():
        assert BY_RULE[rule].count(None if verdict == "unlabelled" else verdict) == count
    assert done.conflicting == 0


def test_the_file_has_one_row_per_record_with_all_scores_and_the_rule_as_metadata(tmp_path: Path):
    traces = write(tmp_path / "s", answered(*ANSWERS))
    done = label(tmp_path / "s")
    table = pq.read_table(done.path)
    scores = ["em", "f1", "rouge_l", "contains", "num_tokens"]
    assert table.column_names == ["question_id", "verdict", "label", "source", *scores]
    assert table.column("question_id").to_pylist() == traces.ids
    assert table.schema.field("label").type == pa.int8()
    assert table.column("label").to_pylist() == [0, 0, None, 1, None, 1, None, None, None, 1, 0]
    assert table.select(scores).to_pylist()[1] == {
        "em": False,
        "f1": pytest.approx(0.5),
        "rouge_l": pytest.approx(0.5),
        "contains": True,
        "num_tokens": 3,
    }
    assert set(table.select(scores).to_pylist()[6].values()) == {None}
    about = {key.decode(): value.decode() for key, value in pq.read_metadata(done.path).metadata.items()}
    assert about["millstream.rule"] == "default"
    assert about["millstream.label_version"] == done.label_version
    assert json.loads(about["millstream.counts"]) == done.counts
    assert json.loads(about["millstream.threshold"]) is None
    assert about["millstream.store_fingerprint"] == traces.fingerprint


def test_label_versions_change_only_with_the_rules():
    versions = [parse_rule(rule).version for rule in ("default", "em", "f1@0.5", "rougeL@0.30", "scores")]
    assert versions == [
        "default-2-755413a7",
        "em-2-5d1fd7cf",
        "f1@0.5-2-31e66a6a",
        "rougeL@0.3-2-79675291",
        "scores@0.5-2-3069fb80",
    ]


@pytest.mark.parametrize("rule", ["best", "f1", "f1@", "f1@x", "f1@0", "f1@1.1", "f1@nan", "em@0.5", "rougel@0.3", ""])
def test_an_unknown_rule_is_a_value_error(rule: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"rule={re.escape(rule)}"):
        label(tmp_path, rule=rule)


@pytest.mark.parametrize("score", range(1, 11))
def test_a_score_equal_to_the_threshold_is_right(score: int, tmp_path: Path):
    said, rest = " ".join(f"w{i}" for i in range(10)), " ".join(f"v{i}" for i in range(10 - score))
    truth = " ".join([*(f"w{i}" for i in range(score)), rest])
    write(tmp_path / "s", answered(said, aliases=[truth]))
    for rule in ("f1", "rougeL"):
        label(tmp_path / "s", rule=f"{rule}@{score / 10}")
        assert verdicts(tmp_path / "s") == ["right"]


def test_a_refusal_that_matches_the_reference_is_right(tmp_path: Path):
    rows = answered("Unknown.", "I don't know", aliases=["unknown"])
    write(tmp_path / "s", [*rows, {**rows[0], "question_id": "q9", "aliases": PARIS}])
    label(tmp_path / "s")
    assert verdicts(tmp_path / "s") == ["right", "refused", "refused"]


def test_an_answer_of_12_words_that_contains_an_alias_is_right_and_one_of_13_is_ambiguous(tmp_path: Path):
    write(tmp_path / "s", answered("w " * 11 + "Paris", "w " * 12 + "Paris"))
    label(tmp_path / "s")
    assert verdicts(tmp_path / "s") == ["right", "ambiguous"]


def test_a_record_without_aliases_or_with_a_status_other_than_ok_has_no_verdict(tmp_path: Path):
    some = answered("Paris", "Paris", "Paris", "Paris", "The")
    for row, aliases, status in zip(
        some, (PARIS, None, ["", None], PARIS, ["A"]), ("ok", "ok", "ok", "error", "ok"), strict=True
    ):
        row.update(aliases=aliases, status=status)
    write(tmp_path / "s", some)
    for rule in ("default", "em"):
        label(tmp_path / "s", rule=rule)
        assert verdicts(tmp_path / "s") == ["right", None, None, None, "right"]


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        ("generated_answer_clean", "ground_truth_answers", PARIS),
        ("generated_text", "answer", "Paris"),
        ("generated_answer", "aliases", []),
    ],
)
def test_fields_of_old_stores_are_found_under_their_old_names(answer: str, truth: str, value: object, tmp_path: Path):
    write(tmp_path / "s", [{"question_id": i, answer: text, truth: value} for i, text in enumerate(["Paris", "Rome"])])
    label(tmp_path / "s")
    assert verdicts(tmp_path / "s") == (["right", "wrong"] if value else [None, None])


def test_a_store_without_answers_or_ids_is_rejected_with_the_missing_field(tmp_path: Path):
    write(tmp_path / "s", [{"question_id": "q", "aliases": PARIS}])
    with pytest.raises(ms.errors.BadSource, match=r"generated_answer.* question_id, aliases, hidden"):
        label(tmp_path / "s")
    write(tmp_path / "t", [{"generated_answer": "Paris", "aliases": PARIS}])
    with pytest.raises(ms.errors.BadSource, match="question_id"):
        label(tmp_path / "t")
    assert not list(tmp_path.glob("*/*labels*"))


def test_labelled_takes_verdicts_and_labels_from_the_file(tmp_path: Path):
    traces = write(tmp_path / "s", answered(*ANSWERS))
    label(tmp_path / "s")
    by_verdict = ms.labelled(traces, values={"right": 0, "wrong": 1}, column="verdict", missing="drop")
    assert by_verdict.column("question_id").to_pylist() == ["q0", "q1", "q3", "q5", "q9", "q10"]
    assert by_verdict.fetch(range(6), ["label"])["label"].tolist() == [0, 0, 1, 1, 1, 0]
    assert ms.labelled(traces, missing="drop").column("label").to_pylist() == [0, 0, 1, 1, 1, 0]
    with pytest.raises(ms.errors.MissingLabel, match="5 of 11"):
        ms.labelled(traces)


def test_records_with_the_same_id_keep_a_common_verdict_and_lose_conflicting_ones(tmp_path: Path):
    names = ["same", "other", "same", "other", "half", "half", "alone"]
    said = ["Paris", "Paris", "paris", "Rome", "Paris", None, "Rome"]
    rows = [{**row, "question_id": name} for row, name in zip(answered(*said), names, strict=True)]
    traces = write(tmp_path / "s", rows)
    done = label(tmp_path / "s")
    assert verdicts(tmp_path / "s") == ["right", None, "right", None, None, None, "wrong"]
    assert (done.conflicting, done.counts["unlabelled"]) == (4, 4)
    assert ms.labelled(traces, missing="drop").column("label").to_pylist() == [0, 0, 1]


def write_scores(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_scores_of_the_old_file_decide_by_threshold_and_missing_ones_give_no_verdict(tmp_path: Path):
    write(tmp_path / "s", answered("a1", "b1", "c1", "d1", "e1", None))
    text = "question_id,bleurt_score\nq0,0.5\nq1,0.49999\nq2,\nq3,nan\nq5,0.9\nother,1\n"
    file = write_scores(tmp_path / "ground_truth_scores.csv", text)
    done = label(tmp_path / "s", rule="scores", scores=file)
    assert verdicts(tmp_path / "s") == ["right", "wrong", None, None, None, None]
    assert pq.read_table(done.path).column("bleurt_score").to_pylist() == [0.5, 0.49999, None, None, None, 0.9]
    label(tmp_path / "s", rule="scores", scores=file, threshold=0.4)
    assert verdicts(tmp_path / "s")[:2] == ["right", "right"]
    assert pq.read_metadata(done.path).metadata[b"millstream.threshold"] == b"0.4"


def test_high_scores_can_mean_wrong(tmp_path: Path):
    write(tmp_path / "s", answered("a1", "b1", "c1"))
    file = write_scores(tmp_path / "f.csv", "question_id,risk\nq0,0.5\nq1,0.4\nq2,\n")
    done = label(tmp_path / "s", rule="scores", scores=file, positive="wrong")
    assert verdicts(tmp_path / "s") == ["wrong", "right", None]
    assert pq.read_table(done.path).column("label").to_pylist() == [1, 0, None]
    right = label(tmp_path / "s", rule="scores", scores=file, positive="right")
    assert verdicts(tmp_path / "s") == ["right", "wrong", None]
    assert right.label_version == label(tmp_path / "s", rule="scores", scores=file).label_version != done.label_version


def test_scores_decide_even_if_a_store_has_no_texts(tmp_path: Path):
    write(tmp_path / "s", [{"question_id": i, "status": "ok" if i else "error"} for i in range(4)])
    pq.write_table(pa.table({"question_id": [0, 1, 2], "judge": [1.0, 0.0, 1.0]}), tmp_path / "f.parquet")
    label(tmp_path / "s", rule="scores", scores=tmp_path / "f.parquet")
    assert verdicts(tmp_path / "s") == [None, "wrong", "right", None]


def test_the_columns_of_a_scores_file_are_kept_with_the_verdicts_unless_one_is_chosen(tmp_path: Path):
    write(tmp_path / "s", [{**row, "question_id": f"00{i}"} for i, row in enumerate(answered("Paris", "Rome"))])
    file = write_scores(tmp_path / "f.csv", ',question_id,bleurt_score,judge\n0,001,0.9,"no, really"\n1,1,0.8,yes\n')
    table = pq.read_table(label(tmp_path / "s", rule="scores", scores=file).path)
    assert table.column("verdict").to_pylist() == [None, "right"]
    assert table.column("judge").to_pylist() == [None, "no, really"]
    assert table.column("bleurt_score").to_pylist() == [None, 0.9]
    table = pq.read_table(label(tmp_path / "s", rule="scores", scores=file, column="bleurt_score").path)
    assert "judge" not in table.column_names


@pytest.mark.parametrize("row", ["other,1", "q0,", "q0,nan"])
def test_a_file_without_a_score_of_any_record_is_rejected_and_the_labels_are_kept(row: str, tmp_path: Path):
    write(tmp_path / "s", answered("Paris", "Rome"))
    label(tmp_path / "s")
    before = (tmp_path / "s" / "labels.parquet").read_bytes()
    file = write_scores(tmp_path / "f.csv", f"question_id,score\n{row}\n")
    why = "'q0'.*'other'" if row.startswith("other") else "missing or NaN"
    with pytest.raises(ms.errors.BadSource, match=rf"f\.csv.* 2 records.*{why}"):
        label(tmp_path / "s", rule="scores", scores=file)
    code, _, err = run(tmp_path / "s", "rule=scores", f"scores={file}")
    assert code == 1 and err.count("\n") == 1
    code, _, err = run(tmp_path / "s", f"scores={file}")
    assert code == 2 and "rule=scores" in err
    assert (tmp_path / "s" / "labels.parquet").read_bytes() == before


def test_correct_answers_can_be_given_after_extraction(tmp_path: Path):
    rows = [{**row, "aliases": None} for row in answered("Paris", "Rome", "Bern", "Oslo")]
    rows[3]["aliases"] = ["Oslo"]
    write(tmp_path / "s", rows, 3)
    write(tmp_path / "bare", [{"question_id": row["question_id"], "generated_answer": "Paris"} for row in rows])
    lines = [{"id": "q0", "question": "x", "answer": "Paris"}, {"id": "q1", "question": "x", "aliases": PARIS}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = label(tmp_path / "s", references=tmp_path / "q.jsonl", chunk_records=2)
    assert verdicts(tmp_path / "s") == ["right", "wrong", None, "right"]
    assert pq.read_metadata(done.path).metadata[b"millstream.references"] == str(tmp_path / "q.jsonl").encode()
    label(tmp_path / "bare", references=tmp_path / "q.jsonl")
    assert verdicts(tmp_path / "bare") == ["right", "right", None, None]
    (tmp_path / "gold.csv").write_text("nr,gold\nq2,Bern\nq2,Berne\nq1,Rome\n")
    label(tmp_path / "s", rule="em", references=tmp_path / "gold.csv", columns="id=nr,answer=gold")
    assert verdicts(tmp_path / "s") == [None, "right", "right", "right"]


def test_references_that_would_have_no_effect_are_rejected_and_the_labels_are_kept(tmp_path: Path):
    write(tmp_path / "s", answered("Paris"))
    label(tmp_path / "s")
    before = (tmp_path / "s" / "labels.parquet").read_bytes()
    file = write_scores(tmp_path / "f.csv", "id,answer,score\nother,Paris,1\n")
    empty = write_scores(tmp_path / "e.csv", "id,question\nq0,Capital?\n")
    for found, message in ((file, "'q0'.*'other'"), (empty, "e.csv"), (tmp_path / "none.csv", "none.csv")):
        with pytest.raises(ms.errors.BadSource, match=message):
            label(tmp_path / "s", references=found)
    with pytest.raises(ms.errors.BadSetting, match="references="):
        label(tmp_path / "s", rule="scores", scores=file, references=file)
    with pytest.raises(ms.errors.BadSetting, match="columns="):
        label(tmp_path / "s", columns="id=nr")
    assert (tmp_path / "s" / "labels.parquet").read_bytes() == before


def test_the_command_suggests_references_instead_of_training_if_nothing_can_be_labelled(tmp_path: Path):
    write(tmp_path / "s", [{**row, "aliases": None} for row in answered("Paris")])
    code, _, err = run(tmp_path / "s")
    assert code == 0 and "references=FILE" in err and "train" not in err


BAD_FILES = {
    "no id": ("id,score\nq0,1\n", None, "'question_id'.* id, score"),
    "no such column": ("question_id,score\nq0,1\n", "judge", "'judge'.* question_id, score"),
    "only ids": ("question_id\nq0\n", None, "question_id"),
    "empty": ("", None, "question_id"),
    "two scores": ("question_id,score\nq0,1\nq0,0\n", None, "'q0'"),
    "no numbers": ("question_id,score\nq0,good\n", None, "'good'"),
    "several": ("question_id,x,y\nq0,1,0\n", None, "x, y"),
    "short row": ("question_id,score\nq0\n", None, "row 2"),
    "our own name": ("question_id,f1\nq0,1\n", None, "'f1'"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_an_invalid_scores_file_is_rejected_with_the_offending_value(case: str, tmp_path: Path):
    text, column, message = BAD_FILES[case]
    write(tmp_path / "s", answered("Paris"))
    file = write_scores(tmp_path / "f.csv", text)
    with pytest.raises(ms.errors.BadSource, match=message) as caught:
        label(tmp_path / "s", rule="scores", scores=file, column=column)
    assert str(file) in str(caught.value)
    assert not (tmp_path / "s" / "labels.parquet").exists()


def test_a_missing_or_unreadable_scores_file_is_named(tmp_path: Path):
    write(tmp_path / "s", answered("Paris"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not")
    (tmp_path / "bad.csv").write_bytes(b"question_id,score\n\xff\xfe,1\n")
    for name in ("none.csv", "none.parquet", "bad.parquet", "bad.csv"):
        with pytest.raises(ms.errors.BadSource, match=name):
            label(tmp_path / "s", rule="scores", scores=tmp_path / name)


@pytest.mark.parametrize(
    "settings",
    [
        LabelSettings("scores"),
        LabelSettings(column="x"),
        LabelSettings("em", None, None, 0.5),
        LabelSettings("em", positive="wrong"),
        LabelSettings("em", "f.csv"),
        LabelSettings("scores", "f.csv", positive="yes"),
    ],
    ids=range(6),
)
def test_contradictory_settings_are_rejected(settings: LabelSettings):
    with pytest.raises(ValueError, match="="):
        rule_of(settings)


@pytest.mark.parametrize("shard_records", [1, 3, 100])
def test_labels_depend_neither_on_chunks_nor_on_shards_nor_on_where_chunks_are_scored(
    shard_records: int, tmp_path: Path
):
    rows = answered(*ANSWERS * 3)
    write(tmp_path / "s", rows, shard_records)
    label(tmp_path / "s")
    whole = pq.read_table(tmp_path / "s" / "labels.parquet")
    sizes: list[int] = []
    reported: list[int] = []

    def elsewhere(function: object, chunks: Iterable[pa.Table]) -> Iterable[pa.Table]:
        assert function is score_chunk
        for chunk in chunks:
            sizes.append(chunk.num_rows)
            yield score_chunk(chunk)

    label(tmp_path / "s", chunk_records=4, map=elsewhere, progress=lambda done, note="": reported.append(done))
    assert pq.read_table(tmp_path / "s" / "labels.parquet").equals(whole)
    assert max(sizes) <= 4 and sum(sizes) == len(rows)
    assert reported == [0, *np.cumsum(sizes).tolist()]


@pytest.mark.parametrize("step", ["rename", "fsync"])
def test_labels_are_unchanged_if_labelling_is_killed(step: str, nursery: Nursery, tmp_path: Path):
    write(tmp_path / "s", answered("Paris", "It is Paris"))
    label(tmp_path / "s")
    before = (tmp_path / "s" / "labels.parquet").read_bytes()
    code = (
        "import os, signal, sys; from millstream.traces.label import label\n"
        f"os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "label(sys.argv[1], rule='em')"
    )
    done = nursery.run(code, tmp_path / "s")
    assert done.code == -signal.SIGKILL, done.err
    assert (tmp_path / "s" / "labels.parquet").read_bytes() == before
    label(tmp_path / "s", rule="em")
    assert verdicts(tmp_path / "s") == ["right", "wrong"]
    assert len(ms.open(tmp_path / "s")) == 2


def run(*arguments: object) -> tuple[int, str, str]:
    return run_here("label", *arguments)


def test_the_command_prints_counts_the_file_and_the_next_step(tmp_path: Path):
    store = tmp_path / "s"
    write(store, answered(*ANSWERS))
    code, out, err = run(store)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["right", "3"],
        ["wrong", "3"],
        ["ambiguous", "1"],
        ["refused", "1"],
        ["unlabelled", "3"],
    ]
    rule = parse_rule("default")
    first, second, missing, following = err.splitlines()
    assert first == f"rule default: {rule.meaning}"
    assert second == f"{store}/labels.parquet: 11 records, rule default ({rule.version})"
    assert "split has" in missing and following == f"Next: millstream inspect {store}"  # too few for three splits
    code, out, _ = run(store, "rule=f1@0.5", "--json")
    assert code == 0
    assert json.loads(out)["counts"] == {"right": 4, "wrong": 4, "ambiguous": 0, "refused": 0, "unlabelled": 3}
    assert json.loads(out)["rule"] == "f1@0.5"


def test_the_command_takes_scores_and_reports_conflicting_ids(tmp_path: Path):
    store = tmp_path / "s"
    write(store, [{**row, "question_id": "same"} for row in answered("Paris", "Rome")])
    file = write_scores(tmp_path / "f.csv", "question_id,bleurt_score\nsame,0.6\n")
    code, out, err = run(store, "rule=scores", f"scores={file}", "threshold=0.7")
    assert (code, out.split()[:4]) == (0, ["right", "0", "wrong", "2"])
    _, out, err = run(store)
    assert out.split()[-1] == "2"
    assert "2 records are unlabelled" in err and "record_id" in err


@pytest.mark.parametrize(
    ("answers", "following"),
    [
        (["Paris", "Rome"] * 50, "train data="),
        (["Paris", "Rome"], "inspect "),
        (["Rome"], "inspect "),
        ([None], "inspect "),
    ],
)
def test_training_is_the_next_step_only_with_right_and_wrong_answers_in_each_split(
    answers: list[str | None], following: str, tmp_path: Path
):
    write(tmp_path / "s", answered(*answers))
    code, _, err = run(tmp_path / "s")
    assert code == 0 and err.splitlines()[-1] == f"Next: millstream {following}{tmp_path / 's'}"


@pytest.mark.parametrize("wrong", ["rule=best", "rul=em", "rule=scores", "threshold=high", "threshold=0.5", "em"])
def test_wrong_settings_exit_with_code_2(wrong: str, tmp_path: Path):
    write(tmp_path / "s", answered("Paris"))
    code, out, err = run(tmp_path / "s", wrong)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.skipif(not DATA.is_dir(), reason="MILLSTREAM_DATA names no folder with triviaqa in it")
def test_answers_to_real_questions_get_the_expected_verdicts(tmp_path: Path):
    rows = [json.loads(line) for line in (DATA / "dev.jsonl").read_text().splitlines()[:2000]]
    made = [
        lambda row, other: (row["aliases"][-1], {"right"}),
        lambda row, other: (f"I think it is {row['answer']}.", {"right", "wrong", "ambiguous"}),
        lambda row, other: ("I'm sorry, but I do not know.", {"refused"}),
        lambda row, other: (other["answer"], {"wrong", "right", "ambiguous"}),
    ]
    pairs = [made[i % 4](row, rows[i - 7]) for i, row in enumerate(rows)]
    ids = [{"question_id": row["id"], "aliases": row["aliases"]} for row in rows]
    write(tmp_path / "s", [{**name, "generated_answer": said} for name, (said, _) in zip(ids, pairs, strict=True)], 500)
    done = label(tmp_path / "s")
    found = verdicts(tmp_path / "s")
    assert all(verdict in allowed for verdict, (_, allowed) in zip(found, pairs, strict=True))
    assert found[1::4].count("right") > 480
    assert found[3::4].count("wrong") > 480
    assert done.counts["refused"] == 500


def test_verdicts_that_came_with_the_answers_are_labels(tmp_path: Path):
    given = ["right", "wrong", "ambiguous", None, "wrong"]
    rows = [{**row, "given_verdict": one} for row, one in zip(answered(*"abcd", None), given, strict=True)]
    write(tmp_path / "s", rows)
    done = label(tmp_path / "s", rule="given")
    assert verdicts(tmp_path / "s") == ["right", "wrong", "ambiguous", None, None]
    assert done.rule == "given" and done.counts["wrong"] == 1
    assert "rule=given" not in str(done.notes)


def test_a_store_of_given_verdicts_without_correct_answers_says_how_to_use_them(tmp_path: Path):
    write(tmp_path / "s", [{**row, "given_verdict": "wrong"} for row in answered("a", "b", aliases=[])])
    assert label(tmp_path / "s").notes == ("the answers came with verdicts: rule=given takes them",)
    write(tmp_path / "none", answered("a"))
    with pytest.raises(BadSource, match="no answer came with a verdict"):
        label(tmp_path / "none", rule="given")
