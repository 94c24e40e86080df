"""The decorator ``kernel``, which declares a function that numba compiles.

Compiled code is cached between processes and discarded when any source file that goes into it has changed.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

from numba import njit
from numba.core.caching import FunctionCache

INLINE: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": True}
_PACKAGE = Path(__file__).parents[2]
_IMPORT = re.compile(rf"^from {_PACKAGE.name}([\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


@cache
def sources(file: Path) -> frozenset[Path]:
    """The file and the modules of this package that it imports, recursively: all that its kernels can inline."""
    found, waiting = {file}, [file]
    while waiting:
        for module, several, one in _IMPORT.findall(waiting.pop().read_text()):
            folder = _PACKAGE.joinpath(*module.split("."))
            names = re.findall(r"\w+", several or one)
            for path in (folder.with_suffix(".py"), *(folder / f"{name}.py" for name in names)):
                if path not in found and path.is_file():
                    found.add(path)
                    waiting.append(path)
    return frozenset(found)


@cache
def _digest(file: Path) -> str:
    return sha256(b"".join(path.read_bytes() for path in sorted(sources(file)))).hexdigest()


class _KernelCache(FunctionCache):
    """numba's cache of compiled code, keyed also by all sources; numba itself checks only the kernel's own file."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _digest(Path(self._py_func.__code__.co_filename)))


class Kernel:
    """A function with one signature, compiled or loaded from the cache at its first call.

    Compiling at import would make every caller wait for kernels that it does not need.
    """

    def __init__(self, signature: Any, function: Callable[..., Any], nogil: bool) -> None:
        self._signature = signature
        self._function = function
        self._nogil = nogil
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return self.compiled()(*args)

    def compiled(self) -> Callable[..., Any]:
        """The compiled function, for callers that call it often."""
        if self._compiled is None:
            dispatcher = _dispatcher(self._function, self._nogil)
            dispatcher.compile(self._signature)
            dispatcher.disable_compile()
            self._compiled = dispatcher
        return self._compiled


@overload
def kernel(signature: None = None, *, nogil: bool = ...) -> Callable[[Callable[..., Any]], Any]: ...
@overload
def kernel(signature: Any, *, nogil: bool = ...) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(signature: Any = None, *, nogil: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel: ``@kernel(types.void(I64, ARRAY))``, or ``@kernel()`` to compile for the types of each call.

    Other kernels can call one without a signature. A kernel that takes about a microsecond should keep the
    interpreter lock (``nogil=False``), because taking the lock back costs more.
    """
    return partial(_dispatcher, nogil=nogil) if signature is None else partial(Kernel, signature, nogil=nogil)


def _dispatcher(function: Callable[..., Any], nogil: bool) -> Any:
    dispatcher: Any = njit(nogil=nogil, error_model="numpy")(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher
