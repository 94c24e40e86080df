"""What numba kernels are made of: unaligned loads, stores and copies at raw addresses, and ``kernel`` itself.

Each is one or two machine instructions. Byte loops in numba are five times slower, and NumPy views cannot express
"a big-endian u64 at any byte". Everything is an ``int64``: mixing signed and unsigned makes numba fall into floats.
The caller answers for the addresses; nothing here checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

I64 = types.int64
ARRAY = types.Array(types.int64, 1, "C")
INLINE: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": True}
_I64 = ir.IntType(64)


@cache
def _sources_digest() -> str:
    here = Path(__file__).parent
    sources = (*sorted(here.glob("*.py")), here.parent / "packed.py")
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


class _KernelCache(FunctionCache):
    """numba's cache of compiled code, which forgets a kernel when any file that it is made of has changed.

    numba itself looks only at the file of the kernel, not at those of the functions that are inlined into it.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _sources_digest())


class Kernel:
    """A function with one signature, compiled or loaded from the cache when it is first called.

    Compiling at import would make every user wait for kernels that others need.
    """

    def __init__(self, signature: Any, function: Callable[..., Any], nogil: bool = True) -> None:
        self._signature = signature
        self._function = function
        self._nogil = nogil
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.compiled()(*args)

    def compiled(self) -> Callable[..., Any]:
        """The function itself, for who calls it often."""
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Callable[..., Any]:
        dispatcher: Any = njit(nogil=self._nogil, error_model="numpy")(self._function)
        dispatcher._cache = _KernelCache(self._function)
        dispatcher.compile(self._signature)
        dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]


def kernel(signature: Any, nogil: bool = True) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel: ``@kernel(types.void(I64, ARRAY))``.

    One that is done in a microsecond keeps the interpreter lock, which is dear to get back.
    """
    return partial(Kernel, signature, nogil=nogil)


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
# of a row. That these are intrinsics and not functions saves seconds of compiling, one specialisation per constant.
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
