"""Old trace files are converted exactly, resumably, and without running code in them."""

import gzip
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.errors import BadSource, ConfigMismatch, MillstreamError, SchemaMismatch, StoreError
from millstream.traces.convert import PROGRESS, RESTART, convert, expand, imported_records
from millstream.traces.store.inspect import compare, summarise
from millstream.traces.store.rewrite import drop_records
from support.remote_stores import SPOOL, remote
from support.s3_server import Bucket


def old_trace(g: int, *, batch: int = 4) -> dict[str, object]:
    """A trace as the newer old scripts wrote it."""
    rng = np.random.default_rng(g)
    tokens = 5 + g % 3
    return {
        "question_id": f"tc_{g}",
        "question": f"Question {g}?",
        "generated_answer_clean": "Ja, ñandú",
        "hidden_states": [rng.standard_normal((tokens, 64)).astype(np.float16) for _ in range(4)],
        "attentions": [rng.random((2, tokens, tokens)).astype(np.float16) for _ in range(4)],
        "tokens": list(range(tokens)),
        "prompt_length": 3,
        "ground_truth_answers": ["yes", "sí"],
        "example_id": g % batch,
        "global_example_id": g,
        "batch_number": g // batch,
    }


def write_old(folder: Path, num_files: int = 3, batch: int = 4) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files: list[Path] = []
    for b in range(num_files):
        traces = [old_trace(g) for g in range(b * batch, (b + 1) * batch)]
        file = folder / f"trivia_qa_traces_batch_{b:04d}.pkl"
        if b == 1:
            file = file.with_name(file.name + ".gz")
            file.write_bytes(gzip.compress(pickle.dumps(traces)))
        elif b == 2:
            file = file.with_suffix(".pt")
            torch.save(traces, file)
        else:
            file.write_bytes(pickle.dumps(traces))
        files.append(file)
    return files


def assert_converted(path: Path, count: int) -> None:
    traces = ms.open(path)
    assert len(traces) == count
    for g in range(count):
        old, new = old_trace(g), traces[g]
        assert np.array_equal(np.stack(old["hidden_states"]), new["hidden_states"])
        assert np.array_equal(np.stack(old["attentions"]), new["attentions"])
        assert new["hidden_states"].dtype == np.float16
        assert list(new["tokens"]) == old["tokens"]
        plain = ("question_id", "question", "ground_truth_answers", "global_example_id", "prompt_length")
        assert {name: new[name] for name in plain} == {name: old[name] for name in plain}


def test_every_kind_of_old_file_is_imported_exactly_into_a_shard_of_its_own(tmp_path: Path):
    files = write_old(tmp_path / "old")
    written = convert(expand([str(tmp_path / "old")]), tmp_path / "new")
    assert written.records == 12
    assert_converted(tmp_path / "new", 12)
    assert [shard.records for shard in ms.open(tmp_path / "new").shards] == [4, 4, 4]
    assert str(ms.open(tmp_path / "new").fields["attentions"]) == "float16[layer, head, query, key]"
    for file in files:
        found = compare(file, tmp_path / "new")
        assert (found.same, found.different, found.only_a, found.only_b) == (4, 0, 0, 8)
        found = compare(tmp_path / "new", file)
        assert (found.same, found.different, found.only_a, found.only_b) == (4, 0, 8, 0)


def test_classic_restores_the_layer_and_step_layout_of_the_first_scripts(tmp_path: Path):
    from millstream.classic import TraceBatchLoader

    def trace(g: int) -> dict[str, object]:
        rng = np.random.default_rng(g)
        steps = [5] + [1] * g  # the first trace has one step only
        hidden = [[rng.standard_normal((1, n, 64)).astype(np.float32) for n in steps] for _ in range(3)]
        return {"question": "?", "hidden_states": hidden, "tokens": [1, 2], "prompt_length": 1, "global_example_id": g}

    (tmp_path / "old.pkl").write_bytes(pickle.dumps([trace(g) for g in range(4)]))
    convert([tmp_path / "old.pkl"], tmp_path / "new")
    loader = TraceBatchLoader(tmp_path / "new")
    for g in range(4):
        got, want = loader.get_trace_by_global_id(g), trace(g)
        assert got is not None
        for layer_got, layer_want in zip(got["hidden_states"], want["hidden_states"], strict=True):
            assert [x.shape for x in layer_got] == [x.shape for x in layer_want]
            assert all(np.array_equal(a, b) for a, b in zip(layer_got, layer_want, strict=True))
        assert "hidden_states_steps" not in got


def convert_six(files: list[Path], out: Path) -> None:
    """A conversion that is interrupted in its second file."""

    class Stopped(Exception):
        pass

    def stop_in_second_file(done: int, note: str) -> None:
        if note.startswith(files[1].name) and note.endswith("trace 2"):
            raise Stopped

    with pytest.raises(Stopped):
        convert(files, out, progress=stop_in_second_file)
    assert len(ms.open(out)) == 6


def test_an_interrupted_conversion_resumes_where_it_stopped(tmp_path: Path):
    files = write_old(tmp_path / "old")

    convert_six(files, tmp_path / "new")
    before = {file.name: file.read_bytes() for file in (tmp_path / "new").glob("shard-*")}
    convert(files, tmp_path / "new")
    assert_converted(tmp_path / "new", 12)
    assert all((tmp_path / "new" / name).read_bytes() == data for name, data in before.items())
    convert(files, tmp_path / "new")
    assert_converted(tmp_path / "new", 12)


def test_a_conversion_to_a_url_resumes_on_another_machine(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files, out = write_old(tmp_path / "old"), remote(f"{s3.url}/new")
    monkeypatch.setenv(SPOOL, str(tmp_path / "first"))
    convert_six(files, out)
    monkeypatch.setenv(SPOOL, str(tmp_path / "second"))
    convert(files, out)
    assert_converted(out, 12)

    files = [tmp_path / "a.pkl", tmp_path / "b.pkl"]  # the second one has a field that the first lacks
    files[0].write_bytes(pickle.dumps([{"question": "a"}]))
    files[1].write_bytes(pickle.dumps([{"question": "b", "late": 1}]))
    convert(files, remote(f"{s3.url}/late"))
    assert ms.open(f"{s3.url}/late").column("late").to_pylist() == [None, 1]


def test_a_conversion_waits_for_records_that_another_process_is_recovering(tmp_path: Path):
    files, out = write_old(tmp_path / "old"), tmp_path / "new"
    convert_six(files, out)
    with ThreadPoolExecutor(1) as thread:
        with ms.TraceWriter(out) as recovering:
            recovering.append(list(imported_records(files[1]))[2])
            job = thread.submit(convert, files, out)
            with suppress(TimeoutError):
                job.result(timeout=0.3)
        assert job.result().records == 12
    assert_converted(out, 12)


def test_a_conversion_resumes_only_after_its_own_records(tmp_path: Path):
    files, out = write_old(tmp_path / "old"), tmp_path / "new"
    convert_six(files, out)
    fewer = shutil.copytree(out, tmp_path / "fewer")
    with ms.TraceWriter(out) as writer:
        writer.append(dict(ms.open(out)[0]))
    with pytest.raises(StoreError, match="'tc_0'"):
        convert(files, out)
    assert len(ms.open(out)) == 7
    drop_records(fewer, lambda traces: [0, 1, 2])
    with pytest.raises(StoreError, match="3 of the 4"):
        convert(files, fewer)


def test_a_damaged_file_keeps_the_traces_before_the_damage_and_resumes_once_restored(tmp_path: Path):
    files = write_old(tmp_path / "old", num_files=2)
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: int(len(whole) * 0.6)] + bytes(len(whole) - int(len(whole) * 0.6)))
    with pytest.raises(BadSource, match="trivia_qa_traces_batch_0000"):
        convert(files, tmp_path / "new")
    assert 0 < len(ms.open(tmp_path / "new")) < 4
    files[0].write_bytes(whole)
    convert(files, tmp_path / "new")
    assert_converted(tmp_path / "new", 8)


def test_files_with_the_same_name_in_two_folders_are_both_imported(tmp_path: Path):
    files = [*write_old(tmp_path / "a", num_files=1), *write_old(tmp_path / "b", num_files=1)]
    convert(files, tmp_path / "new")
    assert ms.open(tmp_path / "new").ids == 2 * [f"tc_{g}" for g in range(4)]
    convert(files, tmp_path / "new")
    assert len(ms.open(tmp_path / "new")) == 8


def test_other_files_into_the_same_store_are_rejected_with_the_difference(tmp_path: Path):
    files = write_old(tmp_path / "old")
    convert(files[:1], tmp_path / "new")
    with pytest.raises(ConfigMismatch, match="converted"):
        convert(files[1:], tmp_path / "new")


def test_traces_without_an_id_get_one_from_the_file_name_and_their_position(tmp_path: Path):
    (tmp_path / "some_batch.pkl").write_bytes(pickle.dumps([{"question": "a"}, {"question": "b"}]))
    convert([tmp_path / "some_batch.pkl"], tmp_path / "new")
    assert ms.open(tmp_path / "new").ids == ["some_batch:0", "some_batch:1"]


def test_a_field_that_a_trace_lacks_is_none_and_one_that_appears_later_is_kept(tmp_path: Path):
    files = [tmp_path / "a.pkl", tmp_path / "b.pkl"]
    files[0].write_bytes(
        pickle.dumps([{"question": "a", "cutoff": 3}, {"question": "b"}, {"question": "c", "late": 1}])
    )
    files[1].write_bytes(pickle.dumps([{"question": "d", "state": np.arange(4.0)}]))
    messages: list[str] = []
    convert(files, tmp_path / "new", notify=messages.append)
    traces = ms.open(tmp_path / "new")
    assert traces.ids == ["a:0", "a:1", "a:2", "b:0"]
    assert traces.column("cutoff").to_pylist() == [3, None, None, None]
    assert traces.column("late").to_pylist() == [None, None, 1, None]
    assert [traces[n]["state"] is None for n in range(4)] == [True, True, True, False]
    assert len(messages) == 1 and "'late'" in messages[0]
    convert(files, tmp_path / "new")
    assert len(ms.open(tmp_path / "new")) == 4


def test_a_removal_of_records_that_was_interrupted_is_completed(tmp_path: Path):
    files = write_old(tmp_path / "old")
    convert(files, tmp_path / "new")
    (tmp_path / "new" / "shard-00001.arrow").unlink()
    (tmp_path / "new" / PROGRESS).write_text(f'{{"{RESTART}": 0}}')
    convert(files, tmp_path / "new")
    assert_converted(tmp_path / "new", 12)


def test_a_file_and_its_compressed_copy_are_refused(tmp_path: Path):
    data = pickle.dumps([{"question": "a"}])
    (tmp_path / "a.pkl").write_bytes(data)
    (tmp_path / "a.pkl.gz").write_bytes(gzip.compress(data))
    with pytest.raises(BadSource, match=r"a\.pkl\.gz"):
        convert(expand([str(tmp_path)]), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_old_files_in_a_folder_are_found_whatever_the_case_of_their_names(tmp_path: Path):
    for number, name in enumerate(("a.pkl", "B.PKL", "c.Pkl.GZ")):
        data = pickle.dumps([{"question_id": f"q{number}", "x": 1.0}])
        (tmp_path / name).write_bytes(gzip.compress(data) if "GZ" in name else data)
    assert convert(expand([str(tmp_path)]), tmp_path / "store").records == 3


def test_a_field_that_changes_its_type_names_the_file_and_the_trace(tmp_path: Path):
    traces = [{"question_id": "q0", "x": 1.0}, {"question_id": "q1", "x": "text"}]
    (tmp_path / "old.pkl").write_bytes(pickle.dumps(traces))
    with pytest.raises(SchemaMismatch, match=r"old\.pkl: trace 'q1': field 'x'"):
        convert([tmp_path / "old.pkl"], tmp_path / "store")


def test_no_files_and_files_without_traces_are_rejected(tmp_path: Path):
    with pytest.raises(BadSource, match=r"\*\.pkl"):
        expand([str(tmp_path / "*.pkl")])
    (tmp_path / "empty.pkl").write_bytes(pickle.dumps([]))
    with pytest.raises(BadSource, match=r"empty\.pkl"):
        convert([tmp_path / "empty.pkl"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_compression_is_kept_on_resume(tmp_path: Path):
    files = write_old(tmp_path / "old")
    convert(files, tmp_path / "new", compression="zstd")
    assert ms.open(tmp_path / "new").compression == "zstd"
    assert_converted(tmp_path / "new", 12)


def test_a_list_of_different_types_is_one_of_our_errors_in_convert_and_inspect(tmp_path: Path):
    (tmp_path / "old.pkl").write_bytes(pickle.dumps([{"a": [1, "x"]}]))
    with pytest.raises(MillstreamError, match="'a'"):
        convert([tmp_path / "old.pkl"], tmp_path / "new")
    with pytest.raises(BadSource, match="'a'"):
        summarise(tmp_path / "old.pkl", examples=1)
