"""Instructions that numba has no words for, for kernels to call with an array and an index, which is not checked."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from millstream.core.kernels import require_numba


def _ir() -> Any:
    return import_module("llvmlite.ir")  # without types


def _refuse(*arguments: object) -> Any:
    require_numba()


def _instruction(build: Callable[..., Any], *, result: str) -> Callable[..., Any]:
    """`build(builder, address, *numbers)` emits it for the address of an element."""
    if not find_spec("numba"):
        return _refuse
    from numba import types
    from numba.extending import intrinsic

    def typed(array: Any, index: Any, *numbers: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, values[0]).data
            built = build(builder, builder.gep(data, [values[1]]), *values[2:])
            return context.get_dummy_value() if result == "void" else built

        return getattr(types, result)(array, index, *numbers), emit

    # numba looks at the names of the arguments.
    def one(typingctx: Any, array: Any, index: Any) -> Any:
        return typed(array, index)

    def two(typingctx: Any, array: Any, index: Any, number: Any) -> Any:
        return typed(array, index, number)

    return intrinsic(two if build.__code__.co_argcount == 3 else one)  # pyright: ignore


def _prefetch(builder: Any, address: Any) -> None:
    ir = _ir()

    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [builder.bitcast(address, byte), number(0), number(3), number(1)])


def _load_word(builder: Any, address: Any) -> Any:
    ir = _ir()

    return builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()), align=1)


def _store_word(builder: Any, address: Any, word: Any) -> None:
    builder.store(word, builder.bitcast(address, _ir().IntType(64).as_pointer()), align=1)


def _store_bases(builder: Any, address: Any, codes: Any) -> None:
    ir = _ir()

    byte = ir.IntType(8)
    many = ir.VectorType(byte, 32)

    def all_of(*values: int) -> Any:
        return ir.Constant(many, [*values] * (32 // len(values)))

    four_times = ir.Constant(ir.VectorType(ir.IntType(32), 32), [place // 4 for place in range(32)])
    bytes_of = builder.bitcast(codes, ir.VectorType(byte, 8))
    code = builder.shuffle_vector(bytes_of, ir.Constant(ir.VectorType(byte, 8), ir.Undefined), four_times)
    code = builder.and_(builder.lshr(code, all_of(0, 2, 4, 6)), all_of(3))
    builder.store(_bases_of(builder, code), builder.bitcast(address, many.as_pointer()), align=1)


def _codes_of(builder: Any, address: Any) -> tuple[Any, Any, Any]:
    """32 bytes as vectors: their codes as bases, the bases of these codes, and the bytes."""
    ir = _ir()
    byte = ir.IntType(8)
    many = ir.VectorType(byte, 32)
    letters = builder.load(builder.bitcast(address, many.as_pointer()), align=1)
    codes = builder.and_(builder.lshr(letters, ir.Constant(many, [1] * 32)), ir.Constant(many, [3] * 32))
    return codes, _bases_of(builder, codes), letters


def _bases_of(builder: Any, codes: Any) -> Any:
    ir = _ir()
    many = ir.VectorType(ir.IntType(8), 32)
    is_t = builder.zext(builder.icmp_unsigned("==", codes, ir.Constant(many, [2] * 32)), many)
    base = builder.add(builder.add(codes, codes), builder.mul(is_t, ir.Constant(many, [15] * 32)))
    return builder.add(base, ir.Constant(many, [65] * 32))


def _find_others(builder: Any, address: Any) -> Any:
    ir = _ir()
    _, again, letters = _codes_of(builder, address)
    return builder.zext(builder.bitcast(builder.icmp_unsigned("!=", again, letters), ir.IntType(32)), ir.IntType(64))


def _pack_bases(builder: Any, address: Any) -> Any:
    ir = _ir()
    codes, _, _ = _codes_of(builder, address)
    for lanes, bits, shift, mask in ((16, 16, 6, 0xF), (8, 32, 12, 0xFF)):
        kind = ir.VectorType(ir.IntType(bits), lanes)
        codes = builder.bitcast(codes, kind)
        codes = builder.or_(codes, builder.lshr(codes, ir.Constant(kind, [shift] * lanes)))
        codes = builder.and_(codes, ir.Constant(kind, [mask] * lanes))
    return builder.bitcast(builder.trunc(codes, ir.VectorType(ir.IntType(8), 8)), ir.IntType(64))


def _find_controls(builder: Any, address: Any) -> Any:
    ir = _ir()

    many = ir.VectorType(ir.IntType(8), 64)
    block = builder.load(builder.bitcast(address, many.as_pointer()), align=1)
    # As signed bytes, those from 128 on are negative, too.
    found = builder.icmp_signed("<=", block, ir.Constant(many, [32] * 64))
    found = builder.or_(found, builder.icmp_signed("==", block, ir.Constant(many, [127] * 64)))
    return builder.bitcast(found, ir.IntType(64))


def _count_zeros(builder: Any, address: Any, word: Any) -> Any:
    ir = _ir()

    return builder.cttz(word, ir.IntType(1)(0))


def _copier() -> Callable[..., Any]:
    if not find_spec("numba"):
        return _refuse
    ir = _ir()
    from numba import types
    from numba.extending import intrinsic

    many = ir.VectorType(ir.IntType(8), 32)

    def copy(typingctx: Any, source: Any, start: Any, out: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            places: list[Any] = []
            for which in (0, 2):
                data = context.make_array(signature.args[which])(context, builder, values[which]).data
                places.append(builder.bitcast(builder.gep(data, [values[which + 1]]), many.as_pointer()))
            builder.store(builder.load(places[0], align=1), places[1], align=1)
            return context.get_dummy_value()

        return types.void(source, start, out, at), emit

    return intrinsic(copy)  # pyright: ignore


copy_32 = _copier()
"""copy_32(source, i, out, j): 32 bytes."""
prefetch = _instruction(_prefetch, result="void")
"""prefetch(array, i): the cache line of an element, without waiting for it."""
load_word = _instruction(_load_word, result="uint64")
"""load_word(array, i): eight bytes from an element on, aligned or not."""
store_word = _instruction(_store_word, result="void")
"""store_word(array, i, word): eight bytes from an element on."""
find_others = _instruction(_find_others, result="uint64")
"""find_others(array, i): which of 32 bytes from an element on are not A, C, G or T, one bit each."""
pack_bases = _instruction(_pack_bases, result="uint64")
"""pack_bases(array, i): the codes of these 32 bases, two bits each."""
store_bases = _instruction(_store_bases, result="void")
"""store_bases(array, i, codes): the letters of 32 codes of two bits, of A, C, T, G."""
find_controls = _instruction(_find_controls, result="uint64")
"""find_controls(array, i): of 64 bytes, one bit each: set for those up to 32, and from 127 on."""
count_zeros = _instruction(_count_zeros, result="uint64")
"""count_zeros(array, i, word): the zero bits below the lowest one that is set."""
