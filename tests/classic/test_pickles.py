"""Old trace files: every trace is read exactly, one at a time, and nothing in a file is ever run."""

import copyreg
import gzip
import io
import os
import pickle
import struct
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from millstream.classic.pickles import read_traces
from millstream.classic.records import restore_steps, to_record
from millstream.errors import BadSource, UnsafePickle
from support.effort import num_examples
from support.old_files import Call, f16, new_trace, old_trace, same, torch_bytes, torch_trace

SETTINGS = settings(deadline=None, max_examples=num_examples(150))


def traces_of_all_kinds() -> list[dict[str, object]]:
    return [make(number) for number in range(3) for make in (new_trace, old_trace, torch_trace)]


def write(folder: Path, data: bytes) -> Path:
    path = folder / "traces.bin"  # the kind is detected from the content
    path.write_bytes(data)
    return path


def never(message: str) -> None:
    raise AssertionError(message)


# -- reading


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "wrap", [list, lambda t: {"traces": t}, lambda t: {"model": {"name": "m"}, "traces": t, "n": 9}]
)
def test_a_pickled_list_comes_back_exactly_and_streams(tmp_path, protocol, zipped, wrap):
    traces = traces_of_all_kinds()
    data = pickle.dumps(wrap(traces), protocol)
    path = write(tmp_path, gzip.compress(data, 1) if zipped else data)
    assert same(list(read_traces(path, notify=never)), traces)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "wrap", [list, lambda t: {"traces": t}, lambda t: {"model": {"name": "m"}, "traces": t, "n": 9}]
)
def test_a_torch_file_comes_back_exactly_and_streams(tmp_path, legacy, wrap):
    traces = traces_of_all_kinds()
    path = write(tmp_path, torch_bytes(wrap(traces), legacy=legacy))
    assert same(list(read_traces(path, notify=never)), traces)


@pytest.mark.parametrize("save", [pickle.dumps, torch_bytes, lambda t: torch_bytes(t, legacy=True)])
def test_a_single_dict_is_one_trace(tmp_path, save):
    trace = old_trace(0) | torch_trace(0)
    assert same(list(read_traces(write(tmp_path, save(trace)))), [trace])


@pytest.mark.parametrize("save", [pickle.dumps, torch_bytes])
@pytest.mark.parametrize("wrap", [dict, lambda t: {"model": "m", "traces": t}])
def test_a_dict_of_traces_by_id_gives_every_trace(tmp_path, save, wrap):
    own, without = new_trace(0), {name: value for name, value in new_trace(1).items() if name != "question_id"}
    path = write(tmp_path, save(wrap({"a": own, 7: without})))
    assert same(list(read_traces(path)), [own, {**without, "question_id": "7"}])


def test_ids_that_are_not_text_and_preprocessed_data_in_a_plain_pickle_are_refused(tmp_path):
    for value, word in (
        ({b"a": new_trace(0)}, "b'a'"),
        ({"sequences": [f16(3, 8)], "labels": [1.0], "question_ids": ["a"]}, "preprocessed"),
        ({"sequences": [f16(3, 8)], "epoch": 3}, "'sequences' without 'labels' and 'question_ids'"),
    ):
        with pytest.raises(BadSource, match=word):
            list(read_traces(write(tmp_path, pickle.dumps(value))))


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.binary()
arrays = hnp.arrays(st.sampled_from(["f2", "<f4", ">i4", "u1", "?", "U3"]), hnp.array_shapes(min_side=0))
names = st.text(max_size=3)
values = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(names, inner),
    max_leaves=6,
)


@SETTINGS
@given(
    traces=st.lists(st.dictionaries(names, values, max_size=4), max_size=5),
    protocol=st.sampled_from([2, 3, 4, 5]),
)
def test_reading_gives_what_pickle_loads_gives(tmp_path_factory, traces, protocol):
    data = pickle.dumps(traces, protocol)
    assert same(list(read_traces(write(tmp_path_factory.getbasetemp(), data))), pickle.loads(data))


@pytest.mark.parametrize("dumps", [pickle.dumps, pickle._dumps], ids=["C", "Python"])
@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0, 1, 1, 0], [1001, 1000, 2001, 1], [1] * 1001, [2] * 2001])
def test_dicts_and_lists_of_any_size_are_split_into_the_right_traces(tmp_path, dumps, sizes):
    traces = [{f"field{i}": {"a": i} for i in range(size)} for size in sizes]
    for value in (traces, {"traces": traces}):
        path = write(tmp_path, dumps(value, 4))
        assert same(list(read_traces(path, notify=never)), traces)


def test_files_written_with_numpy_1_are_read(tmp_path):
    trace = {"x": f16(3, 4), "s": np.int64(3)}
    old = pickle.dumps([trace], 2).replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy.core.multiarray" in old
    assert same(list(read_traces(write(tmp_path, old))), [trace])


def test_views_of_one_large_storage_are_read_without_the_rest_of_it(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    path = write(tmp_path, torch_bytes([{"row": row, "column": row[::2]} for row in whole]))
    traces = list(read_traces(path, notify=never))
    assert [trace["row"].tolist() for trace in traces] == whole.tolist()
    assert traces[3]["column"].tolist() == [18, 20, 22]
    assert traces[3]["row"].untyped_storage().nbytes() == 24


# -- memory


@cache
def large_traces(layout: str) -> list[dict[str, object]]:
    if layout == "few large arrays":
        return [{"hidden_states": [f16(128, 1024) for _ in range(16)], "number": i} for i in range(6)]
    return [old_trace(i, num_steps=60, hidden=3072) for i in range(6)]


@pytest.mark.parametrize(
    "save",
    [
        lambda t: pickle.dumps(t, 2),
        lambda t: pickle.dumps(t, 4),
        lambda t: pickle.dumps(t, 5),
        lambda t: gzip.compress(pickle.dumps(t, 4), 0),
        torch_bytes,
    ],
    ids=["protocol 2", "protocol 4", "protocol 5", "gzip", "torch"],
)
@pytest.mark.parametrize("layout", ["few large arrays", "many small arrays"])
def test_reading_keeps_fewer_than_three_traces_in_memory(tmp_path, save, layout):
    traces = large_traces(layout)
    one, path = pickle.dumps(traces[0]), write(tmp_path, save(traces))
    tracemalloc.start()
    try:
        trace = pickle.loads(one)
        trace_bytes = tracemalloc.get_traced_memory()[0]
        del trace
        tracemalloc.reset_peak()
        assert sum(1 for _ in read_traces(path, notify=never)) == 6
        assert tracemalloc.get_traced_memory()[1] < 3 * trace_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_trace_the_caller_drops_is_freed_before_the_next_is_read(tmp_path, protocol):
    reading = read_traces(write(tmp_path, pickle.dumps([new_trace(i) for i in range(3)], protocol)))
    array = weakref.ref(next(reading)["tokens"])
    next(reading)
    assert array() is None


def test_settings_shared_by_all_traces_do_not_prevent_streaming(tmp_path):
    config, shape = {"model": "llama", "beams": 5}, (32, 4096)
    traces = [new_trace(i) | {"config": config, "shape": shape, "batch": np.int64(3)} for i in range(4)]
    assert same(list(read_traces(write(tmp_path, pickle.dumps(traces)), notify=never)), traces)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_array_shared_between_traces_is_detected_and_every_trace_is_read_once(tmp_path, protocol):
    array = f16(50, 50)
    traces = [new_trace(i) | ({"shared": array} if i in (1, 3) else {}) for i in range(6)]
    messages: list[str] = []
    path = write(tmp_path, pickle.dumps(traces, protocol))
    assert same(list(read_traces(path, notify=messages.append)), traces)
    assert len(messages) == 1
    assert "trace 3 shares" in messages[0]
    assert same(list(read_traces(path)), traces)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_sharing_is_detected_in_torch_files_too(tmp_path, legacy):
    array = f16(50, 50)
    traces = [torch_trace(i) | {"shared": array} for i in range(3)]
    assert same(list(read_traces(write(tmp_path, torch_bytes(traces, legacy=legacy)))), traces)


def test_a_repeated_dict_and_a_list_that_contains_itself_are_read(tmp_path):
    trace = new_trace(0)
    assert same(list(read_traces(write(tmp_path, pickle.dumps([trace] * 4)))), [trace] * 4)
    listed = [{"a": 1}, {"b": 2}]
    path = write(tmp_path, pickle.dumps({"traces": listed, "again": listed}))
    assert list(read_traces(path)) == listed
    listed[0]["all"] = listed
    first, second = read_traces(write(tmp_path, pickle.dumps(listed)))
    assert (first["a"], second) == (1, {"b": 2})
    assert first["all"] == [first, second]


# -- broken files


def kinds_of_files(traces: list[dict[str, object]]) -> dict[str, bytes]:
    files = {f"protocol {protocol}": pickle.dumps(traces, protocol) for protocol in (2, 3, 4, 5)}
    files["dict"] = pickle.dumps({"n": 1, "traces": traces}, 4)
    files["gzip"] = gzip.compress(pickle.dumps(traces, 4))
    files["zip"] = torch_bytes(traces)
    files["legacy"] = torch_bytes(traces, legacy=True)
    files["shared"] = pickle.dumps([trace | {"shared": SHARED} for trace in traces], 4)
    return files


SHARED = f16(4, 4)
WHOLE = [new_trace(0), old_trace(1), torch_trace(2), new_trace(3)]
FILES = kinds_of_files(WHOLE)


@pytest.mark.parametrize("kind", FILES)
@SETTINGS
@given(data=st.data())
def test_a_truncated_file_gives_its_whole_traces_and_then_names_the_broken_one(tmp_path_factory, kind, data):
    whole = [trace | {"shared": SHARED} for trace in WHOLE] if kind == "shared" else WHOLE
    cut = data.draw(st.integers(0, len(FILES[kind]) - 1))
    path = write(tmp_path_factory.getbasetemp(), FILES[kind][:cut])
    reading = read_traces(path)
    for number in range(len(whole) + 1):
        try:
            assert same(next(reading), whole[number])
        except BadSource as error:
            broken = str(error)
            break
    assert broken.startswith(f"{path}: ") and f"trace {number}: " in broken


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_trace_before_the_cut_is_read(tmp_path, protocol):
    data = pickle.dumps(WHOLE, protocol)
    cut = data.index(b"Who wrote book 3")
    reading = read_traces(write(tmp_path, data[:cut]))
    assert same([next(reading) for _ in range(3)], WHOLE[:3])
    with pytest.raises(BadSource, match="trace 3"):
        next(reading)


@pytest.mark.parametrize("kind", FILES)
@settings(deadline=None, max_examples=num_examples(300))
@given(data=st.data())
def test_flipped_bits_give_data_or_one_of_our_errors(tmp_path_factory, kind, data):
    flipped = bytearray(FILES[kind])
    for at in data.draw(st.lists(st.integers(0, len(flipped) * 8 - 1), min_size=1, max_size=3)):
        flipped[at // 8] ^= 1 << at % 8
    with suppress(BadSource, UnsafePickle):
        for trace in read_traces(write(tmp_path_factory.getbasetemp(), bytes(flipped))):
            restore_steps(to_record(trace))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"question,answer\n",
        pickle.dumps([1, 2]),
        pickle.dumps("text"),
        pickle.dumps([{}, [{}]]),
        pickle.dumps([({}, {})]),
        pickle.dumps([{}]) + b"more",
        b"\x80\x04].more",
        gzip.compress(torch_bytes([{}])),
    ],
)
def test_what_is_not_a_list_of_dicts_is_a_bad_source(tmp_path, data):
    path = write(tmp_path, data)
    with pytest.raises(BadSource, match=str(path)):
        list(read_traces(path))


def test_a_zip_that_torch_did_not_write_is_a_bad_source(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, x=np.zeros(3))
    with pytest.raises(BadSource, match=r"arrays\.npz"):
        list(read_traces(path))


@pytest.mark.parametrize("opcode", [b"B" + struct.pack("<I", 2**32 - 1), b"X" + struct.pack("<I", 2**32 - 1)]
                         + [code + struct.pack("<Q", 2**40) for code in (b"\x8e", b"\x8d", b"\x96")])  # fmt: skip
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_a_length_beyond_the_end_of_the_file_allocates_no_memory(tmp_path, opcode, zipped):
    data = b"\x80\x04]}\x8c\x01x" + opcode + b"abc"
    path = write(tmp_path, gzip.compress(data) if zipped else data)
    tracemalloc.start()
    try:
        with pytest.raises(BadSource, match=str(path)):
            list(read_traces(path))
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tensor_that_is_larger_than_its_storage_is_refused(tmp_path, legacy):
    data = torch_bytes([{"x": torch.zeros(77)}], legacy=legacy)
    larger = data.replace(b"K\x4d", b"K\xff")  # BININT1 77 is the number of elements, in the storage and in the shape
    assert larger != data
    with pytest.raises(BadSource, match="storage"):
        list(read_traces(write(tmp_path, larger)))


def test_a_key_that_would_overflow_the_stack_when_hashed_is_refused(tmp_path):
    nested = b"\x80\x04]})" + b"\x85" * 500_000 + b"Nsa."
    with pytest.raises(BadSource, match="key"):
        list(read_traces(write(tmp_path, nested)))


# -- small files of much data


def nested_references(depth: int) -> list[object]:
    value: list[object] = ["x"]
    for _ in range(depth):
        value = [value] * 10
    return value


# Made when they are needed: in memory of every test process, hundreds of megabytes would slow down all its forks.
AMPLIFIED: dict[str, Callable[[], bytes]] = {
    "references to references": lambda: pickle.dumps([{"x": nested_references(10)}]),
    "empty traces": lambda: b"\x80\x04](" + b"}" * 100_000 + b"e.",
    "empty traces, gzip": lambda: gzip.compress(b"\x80\x04]" + b"(}\x94e" * 100_000 + b".", 1),
    "one trace many times": lambda: b"\x80\x04](}q\x01" + b"h\x01" * 100_000 + b"e.",
    "one trace many times, in a tuple": lambda: b"\x80\x04(}q\x01" + b"h\x01" * 100_000 + b"t.",
    "one text in a list": lambda: pickle.dumps([{"x": ["x" * 4000] * 50_000}]),
    "one text in every trace": lambda: pickle.dumps([{"x": text} for text in ["x" * 4000] * 50_000]),
    "empty dicts, gzip": lambda: gzip.compress(b"\x80\x04](}\x8c\x01x(" + b"}" * 20_000_000 + b"e.", 1),
    "zeros, gzip": lambda: gzip.compress(pickle.dumps([{"x": bytes(200_000_000)}], 5), 1),
    "strides of 0": lambda: torch_bytes([{"x": torch.zeros(1).expand(10**10)}]),
    "strides of 0, legacy": lambda: torch_bytes([{"x": torch.zeros(1).expand(10**10)}], legacy=True),
    "strides of 0, plain": lambda: pickle.dumps([{"x": torch.zeros(1).expand(10**10)}]),
    "tensors of one storage": lambda: torch_bytes([{"x": [*torch.zeros(250_000).expand(5_000, 250_000)]}]),
    "copies of one text": lambda: b"\x80\x04]}\x8c\x01x](X" + struct.pack("<I", 10**6) + b"a" * 10**6
    + b"\x94c_codecs\nencode\n\x94\x8c\x06latin1\x94" + b"h\x01h\x00h\x02\x86R" * 1_000 + b"esa.",
}  # fmt: skip


@pytest.mark.parametrize("name", AMPLIFIED)
def test_a_small_file_that_decodes_to_far_more_is_refused(tmp_path, name):
    path = write(tmp_path, AMPLIFIED[name]())
    tracemalloc.start()
    try:
        with pytest.raises(BadSource, match=r"decodes to more than|are too many"):
            for trace in read_traces(path):
                to_record(trace)
        assert tracemalloc.get_traced_memory()[1] < 400e6
    finally:
        tracemalloc.stop()


LARGE: dict[str, Callable[[], bytes]] = {
    "empty dicts": lambda: b"\x80\x04]}\x8c\x01x](" + b"}" * 400_000 + b"esa.",
    "bytes": lambda: pickle.dumps([{"x": bytes(48_000_000)}], 5),
    "many texts": lambda: pickle.dumps([{"x": [f"{number:060000}" for number in range(800)]}]),
    "torch": lambda: torch_bytes([{"x": torch.zeros(12_000_000)}]),
    "torch legacy": lambda: torch_bytes([{"x": torch.zeros(12_000_000)}], legacy=True),
    "gzip": lambda: gzip.compress(pickle.dumps([{"x": np.random.default_rng(0).bytes(4_000_000) * 12}], 5), 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_trace_larger_than_the_memory_is_refused_and_a_smaller_one_is_kept(tmp_path, name):
    path = write(tmp_path, LARGE[name]())
    tracemalloc.start()  # torch's memory is not traced
    try:
        with pytest.raises(BadSource, match=r"more than 20\.0 MB.*--memory"):
            list(read_traces(path, memory=20_000_000))
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()
    assert len(list(read_traces(path, memory=2_000_000_000))) == 1


@pytest.mark.parametrize("value", [{1: 2}, {b"x": 1}, {None: 1}])
def test_a_key_that_is_not_text_is_refused(tmp_path, value):
    with pytest.raises(BadSource, match="key"):
        list(read_traces(write(tmp_path, pickle.dumps([value]))))


@pytest.mark.parametrize("nested", [b"]" * 100_000 + b"a" * 99_999, b")" + b"\x85" * 100_000])
def test_a_value_nested_too_deep_is_refused(tmp_path, nested):
    with pytest.raises(BadSource, match="deep"):
        list(read_traces(write(tmp_path, b"\x80\x04]}\x8c\x01x" + nested + b"sa.")))


def test_an_array_of_strings_without_characters_is_refused(tmp_path):
    state = (
        b"(K\x01\x8a\x06" + (2**40).to_bytes(6, "little") + b"\x85" + DTYPE + text("U0") + b"\x89\x88\x87R\x89C\x00tb"
    )
    with pytest.raises(BadSource, match="shape"):
        list(read_traces(write(tmp_path, b"\x80\x04]}" + text("x") + ARRAY + state + b"sa.")))


# -- hostile files


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def malicious(command: str) -> dict[str, tuple[bytes, str]]:
    """Pickles that run `command` in a trace after a harmless one, and the name in the refusal of each."""
    code = f"__import__('os').system({command!r})"
    head = b"\x80\x04](}" + text("fine") + b"\x88s}" + text("x")
    tail = b"se."
    posix = f"'{os.system.__module__}.system'"

    def of(value: object, protocol: int = 4) -> bytes:
        return pickle.dumps([{"fine": True}, {"x": value}], protocol)

    return {
        "reduce, protocol 2": (of(Call(os.system, command), 2), posix),
        "reduce, protocol 4": (of(Call(os.system, command)), posix),
        "eval": (of(Call(eval, code)), "'builtins.eval'"),
        "eval, protocol 2": (of(Call(eval, code), 2), "'__builtin__.eval'"),
        "GLOBAL": (head + b"cposix\nsystem\n" + text(command) + b"\x85R" + tail, "'posix.system'"),
        "STACK_GLOBAL": (
            head + text("posix") + text("system") + b"\x93" + text(command) + b"\x85R" + tail,
            "'posix.system'",
        ),
        "INST": (head + b"(" + text(command) + b"iposix\nsystem\n" + tail, "'posix.system'"),
        "OBJ": (head + b"(cposix\nsystem\n" + text(command) + b"o" + tail, "'posix.system'"),
        "EXT1": (head + b"\x82\xf0" + text(command) + b"\x85R" + tail, "extension 240"),
        "EXT4": (head + b"\x84\xf0\x00\x00\x00" + text(command) + b"\x85R" + tail, "extension 240"),
        "BUILD of a callable": (
            head
            + b"cfunctools\npartial\ncposix\nsystem\n\x85R(cposix\nsystem\n"
            + text(command)
            + b"\x85}Ntb)R"
            + tail,
            "'functools.partial'",
        ),
        "array of objects": (of(np.array([Call(os.system, command)])), "'numpy.dtype'"),
        "array of objects, protocol 2": (of(np.array([Call(os.system, command)]), 2), "'numpy.dtype'"),
        "inside a tensor": (
            of(Call(torch.storage._load_from_bytes, torch_bytes(Call(os.system, command), legacy=True))),
            posix,
        ),
        "a tensor inside a tensor": (
            of(
                Call(
                    torch.storage._load_from_bytes,
                    torch_bytes(
                        Call(torch.storage._load_from_bytes, torch_bytes(Call(os.system, command), legacy=True)),
                        legacy=True,
                    ),
                )
            ),
            "'torch.storage._load_from_bytes'",
        ),
        "torch zip": (torch_bytes([{"fine": True}, {"x": Call(os.system, command)}]), posix),
        "torch legacy": (torch_bytes([{"fine": True}, {"x": Call(os.system, command)}], legacy=True), posix),
        "gzip": (gzip.compress(of(Call(os.system, command))), posix),
    }


@contextmanager
def extension_240():
    copyreg.add_extension("posix", "system", 240)
    try:
        yield
    finally:
        copyreg.remove_extension("posix", "system", 240)


@pytest.mark.parametrize("name", malicious("true"))
def test_malicious_code_is_not_run_and_is_named(tmp_path, name):
    marker = tmp_path / "ran"
    data, refused = malicious(f"touch {marker}")[name]
    path = write(tmp_path, data)
    with extension_240():
        reading = read_traces(path)
        if name != "torch legacy":  # it is scanned once before the first trace
            assert next(reading) == {"fine": True}
        with pytest.raises(UnsafePickle) as caught:
            list(reading)
    assert str(caught.value).startswith(f"{path}: ")
    assert refused in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("name", malicious("true"))
def test_pickle_and_torch_do_run_this_malicious_code(tmp_path, name):
    marker = tmp_path / "ran"
    data, _ = malicious(f"touch {marker}")[name]
    with extension_240():
        if name.startswith("torch"):
            torch.load(io.BytesIO(data), weights_only=False)
        else:
            pickle.loads(gzip.decompress(data) if name == "gzip" else data)
    assert marker.exists()


DTYPE = b"cnumpy\ndtype\n"
F2 = DTYPE + text("f2") + b"\x89\x88\x87R"
ARRAY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        (DTYPE + b"}" + text("evil") + b"Nsb", "'numpy.dtype'"),
        (b"}}" + text("__class__") + b"Nsb", "a dict"),
        (b"]}" + text("append") + b"Nsb", "a list"),
        (b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R", "'numpy.ndarray'"),
        (b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85C\x01b\x87R", "'numpy.dtype'"),
        (DTYPE + text("O8") + b"\x89\x88\x87R", "'O8'"),
        (DTYPE + text("V8") + b"\x89\x88\x87R", "'V8'"),
        (DTYPE + text("i4,O") + b"\x89\x88\x87R", "'i4,O'"),
        (DTYPE + DTYPE + b"\x89\x88\x87R", "'numpy.dtype'"),
        (F2 + b"(K\x03" + text("<") + b"N" + text("a") + b"\x85}K\x02K\x01K\x3ftb", "'numpy.dtype'"),
        (ARRAY + b"(K\x01K\x01\x85" + F2 + b"\x89]Natb", "fill an array"),
        (b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R", "'_codecs.encode'"),
        (b"csubprocess\nPopen\n)\x81", "'subprocess.Popen'"),
        (b"ccollections\nOrderedDict.fromkeys\n", "'collections.OrderedDict.fromkeys'"),
        (b"Pposix.system\n", "persistent id"),
        (text("posix.system") + b"Q", "persistent id"),
        (text("posix.system") + text("x") + b"\x85R", "call 'posix.system'"),
    ],
)
def test_allowed_globals_cannot_be_misused(tmp_path, program, refused):
    path = write(tmp_path, b"\x80\x04]}" + text("x") + program + b"sa.")
    with pytest.raises(UnsafePickle) as caught:
        list(read_traces(path))
    assert refused in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        ARRAY + b"(K\x01K\x09\x85" + F2 + b"\x89C\x02abtb",
        ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + F2 + b"\x89C\x02abtb",
        b"cnumpy._core.multiarray\nscalar\n" + F2 + b"C\x01a\x86R",
        b"cnumpy._core.numeric\n_frombuffer\n(C\x02ab" + F2 + b"K\x02\x85" + text("C") + b"tR",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x02\x85K\x01\x85\x89NtR",
        DTYPE + text("f3") + b"\x89\x88\x87R",
        DTYPE + b")R",
        b"ctorch.storage\n_load_from_bytes\nC\x02ab\x85R",
        b"\x96" + struct.pack("<Q", 2) + b"ab(K\x01e",
        b"j\xff\xff\xff\xff",
        b"2",
    ],
)
def test_an_invalid_program_is_a_bad_source(tmp_path, program):
    with pytest.raises(BadSource, match="trace 0"):
        list(read_traces(write(tmp_path, b"\x80\x04]}" + text("x") + program + b"sa.")))


def test_dtype_flags_in_the_file_are_ignored(tmp_path):
    state = b"(K\x03" + text("|") + b"NNNK\x08K\x01K\x3ft"  # flags 63: "these are object pointers"
    dtype = DTYPE + text("S8") + b"\x89\x88\x87R" + state + b"b"
    path = write(tmp_path, b"\x80\x04]}" + text("x") + ARRAY + b"(K\x01K\x01\x85" + dtype + b"\x89C\x08AAAAAAAAtbsa.")
    [trace] = read_traces(path)
    assert trace["x"].dtype == np.dtype("S8")
    assert not trace["x"].dtype.hasobject
    assert trace["x"].dtype.flags == np.dtype("S8").flags


def test_a_zip_member_beyond_the_end_is_a_bad_source(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps([{}], 2))
    with pytest.raises(BadSource, match=r"a/data\.pkl"):
        list(read_traces(path))
