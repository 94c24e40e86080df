"""Compiled kernels are cached between processes and compiled again when any of their sources changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import upriver
from upriver.wire.kernels.kernel import sources

PACKAGE = Path(upriver.__file__).parent
ENCODE = """
from upriver.wire import packed
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer
print(PackedEncoder(FrameOptions()).encode(packed.pack(0, b"\\0k", seqno=1), SendBuffer()).records_sent)
"""
LOCATE = """
import numpy as np
from upriver.store.log.kernels import runs
from upriver.wire import packed
run = np.frombuffer(packed.pack(0, b"\\0k", seqno=1) + packed.pack(0, b"\\0l", seqno=2), np.uint8)
print(runs.locate(run, 0, run.size, np.uint64(2)) // (packed.HEADER_SIZE + 2))
"""


def compiled_after_a_run(home: Path, script: str) -> dict[Path, int]:
    """Run a script with the package in ``home``; returns the files of the kernel cache and their times."""
    environment = os.environ | {"PYTHONPATH": str(home), "NUMBA_CACHE_DIR": str(home / "cache")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
    return {path: path.stat().st_mtime_ns for path in (home / "cache").rglob("*.nbc")}


@pytest.mark.parametrize("inlined", ["wire/kernels/intrinsics.py", "wire/packed.py"])
@pytest.mark.parametrize("script", [ENCODE, LOCATE], ids=["a kernel of the wire", "a kernel of the store"])
def test_kernels_are_compiled_once_and_again_only_after_a_change(tmp_path: Path, script: str, inlined: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "upriver", ignore=shutil.ignore_patterns("__pycache__"))
    first = compiled_after_a_run(tmp_path, script)
    assert len(first) == 1  # encoding compiles nothing that decoding needs
    assert compiled_after_a_run(tmp_path, script) == first
    with (tmp_path / "upriver" / inlined).open("a") as file:
        file.write("# inlined into every kernel; no kernel's own file changes\n")
    assert len(compiled_after_a_run(tmp_path, script)) == 2


def test_a_kernel_is_made_of_its_own_module_and_of_those_it_imports() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in sources(PACKAGE / "store/log/kernels/surveys.py")}
    assert found == {
        "store/disk/kernels/checksum.py",  # through the index, whose hash uses it
        "store/index/kernels.py",
        "store/log/kernels/surveys.py",
        "wire/kernels/intrinsics.py",
        "wire/kernels/kernel.py",
        "wire/packed.py",
    }


def test_every_kernel_is_declared_by_the_one_decorator() -> None:
    """A plain ``njit(cache=True)`` would run stale code after a change in another file."""
    caching = [
        path.name for path in PACKAGE.rglob("*.py") if "njit(" in path.read_text() and "cache=" in path.read_text()
    ]
    assert caching == []
