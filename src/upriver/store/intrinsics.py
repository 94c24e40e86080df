# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Unaligned little-endian loads, stores and copies in byte arrays and at addresses, for numba kernels.

Unlike byte by byte assembly these are one instruction each. The caller answers for the bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _loader(bits, result):
    def typer(typingctx, data, at):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            wide = ir.IntType(bits)
            word = builder.load(builder.bitcast(pointer, wide.as_pointer()), align=1)
            return word if bits == 64 else builder.zext(word, ir.IntType(64))

        return result(data, types.intp), codegen

    return intrinsic(typer)


def _storer(bits):
    def typer(typingctx, data, at, value):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = builder.gep(array.data, [args[1]])
            wide = ir.IntType(bits)
            word = args[2] if bits == 64 else builder.trunc(args[2], wide)
            builder.store(word, builder.bitcast(pointer, wide.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(data, types.intp, types.uint64), codegen

    return intrinsic(typer)


load64 = _loader(64, types.uint64)
load32 = _loader(32, types.int64)
load16 = _loader(16, types.int64)
store64 = _storer(64)
store32 = _storer(32)


def _copy(typingctx, target, target_at, source, source_at, count):
    """memcpy between two byte arrays."""

    def codegen(context, builder, signature, args):
        to = context.make_array(signature.args[0])(context, builder, args[0])
        of = context.make_array(signature.args[2])(context, builder, args[2])
        pointer_type = ir.IntType(8).as_pointer()
        to_at = builder.bitcast(builder.gep(to.data, [args[1]]), pointer_type)
        of_at = builder.bitcast(builder.gep(of.data, [args[3]]), pointer_type)
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, pointer_type, ir.IntType(64), ir.IntType(1)])
        copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer_type, pointer_type, ir.IntType(64)], kind)
        builder.call(copy, [to_at, of_at, args[4], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.none(target, types.intp, source, types.intp, types.intp), codegen


copy_bytes: Any = intrinsic(_copy)


def _load_at(typingctx, address):
    """The word at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.uint64(types.uint64), codegen


def _prefetch(typingctx, address):
    """Begin to fetch what is at an address; harmless wherever it points."""

    def codegen(context, builder, signature, args):
        pointer_type, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer_type], kind)
        pointer = builder.inttoptr(args[0], pointer_type)
        builder.call(fetch, [pointer, ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)])
        return context.get_dummy_value()

    return types.none(types.uint64), codegen


load_at: Any = intrinsic(_load_at)
prefetch: Any = intrinsic(_prefetch)
