"""The building blocks of kernels: unaligned loads, stores and copies, at raw addresses and in byte arrays.

Each is one or two machine instructions. Byte loops in numba are five times slower, and NumPy views cannot express
"a big-endian u64 at any byte". At addresses every number is an ``int64``: mixing signed and unsigned makes numba use
floats. In arrays, 64-bit words are unsigned: they are seqnos, CAS values and hashes. Nothing here checks bounds; the
caller must.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I64 = types.int64
ARRAY = types.Array(types.int64, 1, "C")
_I64 = ir.IntType(64)


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(bits: int, swap: bool) -> Any:
    """A function ``address -> value`` that reads ``bits`` as an unsigned number (u64 wraps into the sign)."""

    def typed(typingctx, address):
        def generate(context, builder, signature, args):
            number = builder.load(_pointer(builder, args[0], ir.IntType(bits)), align=1)
            if swap:
                number = builder.bswap(number)
            return number if bits == 64 else builder.zext(number, _I64)

        return types.int64(types.int64), generate

    return intrinsic(typed)


def _store(bits: int, swap: bool) -> Any:
    """A function ``(address, value)`` that writes the low ``bits`` of ``value``."""

    def typed(typingctx, address, value):
        def generate(context, builder, signature, args):
            number = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            if swap:
                number = builder.bswap(number)
            builder.store(number, _pointer(builder, args[0], ir.IntType(bits)), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(typed)


load8 = _load(8, False)
load_be16, load_be32, load_be64 = _load(16, True), _load(32, True), _load(64, True)
load_le16, load_le32, load_le64 = _load(16, False), _load(32, False), _load(64, False)
store8 = _store(8, False)
store_be16, store_be32, store_be64 = _store(16, True), _store(32, True), _store(64, True)
store_le16, store_le32, store_le64 = _store(16, False), _store(32, False), _store(64, False)


def _element(builder: Any, args: Any, bits: int) -> Any:
    """The address of element ``args[2]`` of column ``args[1]`` of the address table at ``args[0]``."""
    slot = builder.add(args[0], builder.mul(args[1], _I64(8)))
    column = builder.load(_pointer(builder, slot, _I64), align=8)
    return _pointer(builder, builder.add(column, builder.mul(args[2], _I64(bits // 8))), ir.IntType(bits))


def _get(bits: int) -> Any:
    """A function ``(table, column, row) -> value``."""

    def typed(typingctx, table, column, row):
        def generate(context, builder, signature, args):
            number = builder.load(_element(builder, args, bits), align=1)
            return number if bits == 64 else builder.zext(number, _I64)

        return types.int64(types.int64, types.int64, types.int64), generate

    return intrinsic(typed)


def _put(bits: int) -> Any:
    """A function ``(table, column, row, value)``."""

    def typed(typingctx, table, column, row, value):
        def generate(context, builder, signature, args):
            number = args[3] if bits == 64 else builder.trunc(args[3], ir.IntType(bits))
            builder.store(number, _element(builder, args, bits), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return intrinsic(typed)


# Tables and columns are passed as addresses: numba counts references to arrays at every call, which doubles the time
# per row. These are intrinsics because functions would be specialised per constant, which takes seconds to compile.
get8, get16, get32, get64 = _get(8), _get(16), _get(32), _get(64)
put8, put16, put32, put64 = _put(8), _put(16), _put(32), _put(64)


def _word(typingctx, table, n):
    """Number ``n`` of the table of 64-bit numbers at an address."""

    def generate(context, builder, signature, args):
        slot = builder.add(args[0], builder.mul(args[1], _I64(8)))
        return builder.load(_pointer(builder, slot, _I64), align=8)

    return types.int64(types.int64, types.int64), generate


word: Any = intrinsic(_word)


def _copy(typingctx, target, source, size):
    """``memcpy``: exactly ``size`` bytes."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8)
        cgutils.raw_memcpy(
            builder, _pointer(builder, args[0], byte), _pointer(builder, args[1], byte), args[2], 1, align=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


copy: Any = intrinsic(_copy)


def _block(size: int) -> Any:
    """A function ``(target, source)`` that always copies ``size`` bytes, in vector registers."""

    def typed(typingctx, target, source):
        def generate(context, builder, signature, args):
            block = ir.VectorType(ir.IntType(8), size)
            loaded = builder.load(_pointer(builder, args[1], block), align=1)
            builder.store(loaded, _pointer(builder, args[0], block), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(typed)


copy32, copy128 = _block(32), _block(128)


# ---- in byte arrays ----


def _in_array(context: Any, builder: Any, kind: types.Type, array: Any, at: Any, element: ir.Type) -> Any:
    """A pointer to byte ``at`` of an array, typed as ``element``."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), element.as_pointer())


def _array_load(bits: int, result: types.Type) -> Any:
    """A function ``(array, at) -> value`` that reads a little-endian number."""

    def typed(typingctx, data, at):
        def generate(context, builder, signature, args):
            pointer = _in_array(context, builder, signature.args[0], args[0], args[1], ir.IntType(bits))
            number = builder.load(pointer, align=1)
            return number if bits == 64 else builder.zext(number, _I64)

        return result(data, types.intp), generate

    return intrinsic(typed)


def _array_store(bits: int) -> Any:
    """A function ``(array, at, value)`` that writes the low ``bits`` of ``value``."""

    def typed(typingctx, data, at, value):
        def generate(context, builder, signature, args):
            number = args[2] if bits == 64 else builder.trunc(args[2], ir.IntType(bits))
            pointer = _in_array(context, builder, signature.args[0], args[0], args[1], ir.IntType(bits))
            builder.store(number, pointer, align=1)
            return context.get_dummy_value()

        return types.none(data, types.intp, types.uint64), generate

    return intrinsic(typed)


load16, load32, load64 = _array_load(16, types.int64), _array_load(32, types.int64), _array_load(64, types.uint64)
store32, store64 = _array_store(32), _array_store(64)


def _copy_bytes(typingctx, target, target_at, source, source_at, size):
    """``memcpy`` between two byte arrays."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8)
        to = _in_array(context, builder, signature.args[0], args[0], args[1], byte)
        of = _in_array(context, builder, signature.args[2], args[2], args[3], byte)
        cgutils.raw_memcpy(builder, to, of, args[4], 1, align=1)
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp, types.intp), generate


copy_bytes: Any = intrinsic(_copy_bytes)


# ---- at unsigned addresses ----


def _load_word(typingctx, address):
    """The unsigned word at an address, which need not be aligned."""

    def generate(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], _I64), align=1)

    return types.uint64(types.uint64), generate


def _bytes_at(typingctx, address):
    """An address as a pointer to bytes."""

    def generate(context, builder, signature, args):
        return _pointer(builder, args[0], ir.IntType(8))

    return types.CPointer(types.uint8)(types.uint64), generate


def _prefetch(typingctx, address):
    """Start fetching the memory at an address into the cache; harmless for any address."""

    def generate(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(fetch, [_pointer(builder, args[0], ir.IntType(8)), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(types.uint64), generate


load_word: Any = intrinsic(_load_word)
pointer: Any = intrinsic(_bytes_at)
prefetch: Any = intrinsic(_prefetch)
