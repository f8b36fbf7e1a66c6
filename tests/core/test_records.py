"""Kinds of values: inferred from a value, parsed from a string, refined later; and tensors as flat bytes."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.record import (
    TORCH_ONLY,
    Kind,
    Tensor,
    as_tensor,
    from_bytes,
    infer_kind,
    infer_schema,
    parse_schema,
    refine,
)
from millstream.errors import SchemaMismatch

# -- inferring


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "string"),
        ("", "string"),
        (b"bytes", "binary"),
        (7, "int64"),
        (0.5, "double"),
        (True, "bool"),
        (None, "null"),
        ([1, None, 2], "list<item: int64>"),
        ([], "list<item: null>"),
        ([None], "list<item: null>"),
        ((1.5, 2.5), "list<item: double>"),
        ([["a"], []], "list<item: list<item: string>>"),
        ({"a": 1, "b": ["x"]}, "struct<a: int64, b: list<item: string>>"),
        (np.float32(0.5), "double"),
        (np.int8(3), "int64"),
        (np.bool_(True), "bool"),
        ([np.int64(3)], "list<item: int64>"),
        ({"a": np.float16(1)}, "struct<a: double>"),
        (np.zeros((), np.int16), "int16[]"),
        (np.zeros(3, np.uint64), "uint64[axis0]"),
        (np.zeros((3, 4), ">f4"), "float32[axis0, axis1]"),
        (np.zeros((2, 3, 4), np.float16), "float16[layer, axis1, axis2]"),
        (np.zeros((2, 3, 4, 5), bool), "bool[layer, axis1, axis2, axis3]"),
        (torch.zeros(2, 3), "float32[axis0, axis1]"),
        (torch.zeros(1, 2, 3, dtype=torch.bfloat16), "bfloat16[layer, axis1, axis2]"),
        (torch.zeros(1).to(torch.float8_e5m2), "float8_e5m2[axis0]"),
        (torch.nn.Parameter(torch.zeros(2)), "float32[axis0]"),
    ],
)
def test_the_kind_of_a_value_is_inferred(value: object, kind: str) -> None:
    assert str(infer_kind("field", value)) == kind


@pytest.mark.parametrize(
    "value",
    [
        object(),
        1j,
        [1, "two"],
        {1: 2},
        2**70,
        [2**70],
        np.longdouble(1),
        [torch.zeros(2)],
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "i4")]),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_a_value_that_cannot_be_stored_is_an_error_that_names_its_field(value: object) -> None:
    with pytest.raises(SchemaMismatch, match="field 'odd'"):
        infer_kind("odd", value)


def test_text_that_is_not_unicode_is_an_error_that_names_its_field() -> None:
    with pytest.raises(SchemaMismatch, match="field 'odd'"):
        infer_kind("odd", "half a pair: \ud800")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).to(torch.float8_e4m3fnuz),
        torch.eye(2).to_sparse(),
    ],
    ids=["float8_e4m3fnuz", "sparse"],
)
def test_a_torch_tensor_that_cannot_be_stored_is_an_error_that_names_its_field(tensor: torch.Tensor) -> None:
    with pytest.raises(SchemaMismatch, match="field 'odd'"):
        infer_kind("odd", tensor)


def test_the_shape_of_a_torch_tensor_is_a_list_of_numbers() -> None:
    assert infer_kind("shape", torch.zeros(2, 3).shape) == pa.list_(pa.int64())


@pytest.mark.parametrize("name", ["", "_x", "_crc32c", "_offset"])
def test_reserved_field_names_are_an_error(name: str) -> None:
    with pytest.raises(SchemaMismatch, match="start with '_'") as error:
        infer_schema({"fine": 1, name: 2}, {})
    assert repr(name) in str(error.value)
    with pytest.raises(SchemaMismatch, match="start with '_'"):
        infer_schema({"fine": 1, name: 2}, parse_schema({name: "int64"}))


def test_a_given_schema_overrides_inferred_kinds_and_fields_keep_their_order() -> None:
    record = {"b": 1, "hidden": np.zeros((2, 3, 4), np.float16), "a": None}
    given = parse_schema({"a": "string", "b": "float32", "hidden": "float16[block, token, dim]"})
    schema = infer_schema(record, given)
    assert list(schema) == ["b", "hidden", "a"]
    assert schema == given


def test_a_field_of_the_given_schema_that_the_first_record_lacks_is_named() -> None:
    with pytest.raises(SchemaMismatch, match="'missing'"):
        infer_schema({"here": 1}, parse_schema({"missing": "int64"}))


# -- strings


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("float16[layer, token, dim]", Tensor("float16", ("layer", "token", "dim"))),
        ("bfloat16[layer,token]", Tensor("bfloat16", ("layer", "token"))),
        ("float8_e4m3fn[x]", Tensor("float8_e4m3fn", ("x",))),
        ("int64[]", Tensor("int64", ())),
        ("string", pa.string()),
        ("float64", pa.float64()),
        ("int64", pa.int64()),
        ("bool", pa.bool_()),
        ("binary", pa.binary()),
        ("list<string>", pa.list_(pa.string())),
        ("list<list<int32>>", pa.list_(pa.list_(pa.int32()))),
        (pa.uint8(), pa.uint8()),
        (Tensor("int8", ("x",)), Tensor("int8", ("x",))),
    ],
)
def test_a_kind_is_parsed_from_its_string(text: str | Kind, kind: Kind) -> None:
    assert parse_schema({"field": text}) == {"field": kind}


@pytest.mark.parametrize(
    "text",
    ["", "strin", "float17[x]", "list<strin>", "float16[x", "float16[a-b]", "str[x]", "object[x]"],
)
def test_an_invalid_kind_is_an_error_that_names_its_field(text: str) -> None:
    with pytest.raises(SchemaMismatch, match="field 'odd'") as error:
        parse_schema({"fine": "int64", "odd": text})
    assert repr(text.removeprefix("list<").removesuffix(">")) in str(error.value)


@pytest.mark.parametrize(("alias", "dtype"), [("float", "float64"), ("half", "float16"), ("f4", "float32")])
def test_numpy_aliases_of_a_dtype_are_accepted(alias: str, dtype: str) -> None:
    assert parse_schema({"x": f"{alias}[token]"}) == {"x": Tensor(dtype, ("token",))}


@given(
    st.sampled_from(["float16", "bool", "uint8", "complex64", *TORCH_ONLY]),
    st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), max_size=4),
)
def test_the_string_of_a_tensor_kind_parses_to_the_same_kind(dtype: str, axes: list[str]) -> None:
    kind = Tensor(dtype, tuple(axes))
    assert parse_schema({"x": str(kind)}) == {"x": kind}


def test_a_list_of_tensors_is_not_a_kind() -> None:
    with pytest.raises(SchemaMismatch, match=r"'list<float16\[x\]>'"):
        parse_schema({"odd": "list<float16[x]>"})


def test_no_schema_is_an_empty_schema() -> None:
    assert parse_schema(None) == {}


# -- refining

NULL = pa.null()
FLOATS = Tensor("float16", ("layer", "token", "dim"))


@pytest.mark.parametrize(
    ("old", "new", "refined"),
    [
        (NULL, pa.string(), pa.string()),
        (NULL, FLOATS, FLOATS),
        (FLOATS, NULL, FLOATS),
        (pa.string(), NULL, pa.string()),
        (pa.list_(NULL), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.list_(NULL), pa.list_(pa.int64())),
        (
            pa.struct([("a", NULL), ("b", pa.string())]),
            pa.struct([("a", pa.bool_()), ("b", NULL)]),
            pa.struct([("a", pa.bool_()), ("b", pa.string())]),
        ),
        (pa.string(), pa.int64(), None),
        (pa.int64(), pa.float64(), None),
        (pa.list_(pa.int64()), pa.list_(pa.string()), None),
        (pa.list_(pa.int64()), pa.int64(), None),
        (pa.struct([("a", NULL)]), pa.struct([("b", pa.bool_())]), None),
        (pa.struct([("a", NULL), ("b", pa.bool_())]), pa.struct([("a", pa.int8()), ("b", pa.int8())]), None),
        (FLOATS, pa.string(), None),
        (pa.string(), FLOATS, None),
        (FLOATS, Tensor("float32", FLOATS.axes), None),
        (FLOATS, Tensor("float16", ("layer", "token")), None),
    ],
)
def test_unknown_parts_of_a_kind_are_filled_in_and_known_ones_must_agree(
    old: Kind, new: Kind, refined: Kind | None
) -> None:
    assert refine(old, new) == refined


Leaves = st.sampled_from([pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.binary()])
Types = st.recursive(
    Leaves,
    lambda inner: (
        inner.map(pa.list_)
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{i}", k) for i, k in enumerate(kinds)])
        )
    ),
    max_leaves=6,
)


@given(Types, st.data())
def test_a_partly_unknown_type_is_refined_to_the_full_type(whole: pa.DataType, data: st.DataObject) -> None:
    def forget(kind: pa.DataType) -> pa.DataType:
        if data.draw(st.booleans()):
            return pa.null()
        if pa.types.is_list(kind):
            return pa.list_(forget(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([(field.name, forget(field.type)) for field in kind])
        return kind

    part = forget(whole)
    assert refine(part, whole) == whole
    assert refine(whole, part) == whole


# -- tensors as bytes


def test_only_arrays_that_are_not_contiguous_are_copied() -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    raw = as_tensor("x", array)
    assert raw is not None and raw.shape == (2, 3, 4) and raw.kind.dtype == "int32"
    assert np.shares_memory(raw.data, array)

    for other in (array[:, ::2], array.T, array[::-1], array.astype(">i4")):
        raw = as_tensor("x", other)
        assert raw is not None and raw.shape == other.shape
        assert not np.shares_memory(raw.data, array)
        assert raw.data.tobytes() == other.astype("<i4").tobytes()


def test_a_contiguous_torch_tensor_is_not_copied() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    raw = as_tensor("x", tensor)
    assert raw is not None and raw.kind == Tensor("bfloat16", ("axis0", "axis1"))
    assert raw.data.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.from_numpy(np.empty(0, np.float32)),
        torch.ones(1).expand(0),
        torch.arange(7.0).reshape(1, 7)[:, 3],
        torch.arange(7, dtype=torch.bfloat16)[::7],
    ],
    ids=["empty, from numpy", "empty, expanded", "a column of one row", "one of seven"],
)
def test_a_torch_tensor_of_odd_strides_can_be_stored(tensor: torch.Tensor) -> None:
    raw = as_tensor("x", tensor)
    assert raw is not None and raw.shape == tuple(tensor.shape)
    assert raw.data.tobytes() == tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def test_a_torch_tensor_that_needs_a_gradient_can_be_stored() -> None:
    raw = as_tensor("x", torch.ones(3, requires_grad=True) * 2)
    assert raw is not None and raw.data.view(np.float32).tolist() == [2, 2, 2]


def test_lazily_conjugated_and_negated_torch_tensors_are_stored_by_value() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    raw = as_tensor("x", conjugate)
    assert raw is not None and raw.data.view(np.complex64).tolist() == [1 - 2j, 3 + 4j]
    raw = as_tensor("x", conjugate.imag)
    assert raw is not None and raw.data.view(np.float32).tolist() == [-2, 4]


@pytest.mark.parametrize(
    "value",
    [None, 1, 1.5, "text", b"bytes", [1, 2], {"a": 1}, np.float32(1)],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_other_values_are_not_tensors(value: object) -> None:
    assert as_tensor("x", value) is None


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from(["bool", "int8", "uint16", "int64", "float16", "float64", "complex128", *TORCH_ONLY]),
    st.lists(st.integers(0, 3), max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_tensor_made_from_bytes_shares_their_memory(dtype: str, shape: list[int], random) -> None:
    kind = Tensor(dtype, tuple(f"axis{i}" for i in range(len(shape))))
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    data = np.frombuffer(bytearray(random.choices([0, 1], k=size)), np.uint8)
    tensor = from_bytes(kind, shape, data)
    assert isinstance(tensor, torch.Tensor) == (dtype in TORCH_ONLY)
    assert str(tensor.dtype).removeprefix("torch.") == dtype
    assert tuple(tensor.shape) == tuple(shape)
    raw = as_tensor("x", tensor)
    assert raw is not None and raw.kind.dtype == dtype
    assert raw.data.tobytes() == data.tobytes()
    if size:
        assert raw.data.ctypes.data == data.ctypes.data
