"""Compiled kernels: kept between processes, and forgotten when anything that they are made of changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import upriver

ENCODE = """
from upriver.wire import packed
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer
print(PackedEncoder(FrameOptions()).encode(packed.pack(0, b"\\0k", seqno=1), SendBuffer()).records_sent)
"""


def compiled_after_a_run(home: Path) -> dict[Path, int]:
    """Run the encoder of the package in ``home``; what the kernel cache then has, and since when."""
    environment = os.environ | {"PYTHONPATH": str(home), "NUMBA_CACHE_DIR": str(home / "cache")}
    done = subprocess.run([sys.executable, "-c", ENCODE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
    return {path: path.stat().st_mtime_ns for path in (home / "cache").rglob("*.nbc")}


def test_kernels_are_compiled_once_and_again_only_after_a_change(tmp_path: Path) -> None:
    package = Path(upriver.__file__).parent
    shutil.copytree(package, tmp_path / "upriver", ignore=shutil.ignore_patterns("__pycache__"))
    first = compiled_after_a_run(tmp_path)
    assert len(first) == 1  # encoding compiles nothing that decoding needs
    assert compiled_after_a_run(tmp_path) == first
    with (tmp_path / "upriver" / "wire" / "kernels" / "intrinsics.py").open("a") as inlined:
        inlined.write("# inlined into every kernel, though no kernel's own file has changed\n")
    assert len(compiled_after_a_run(tmp_path)) == 2
