"""Small files that are replaced whole."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """Replace the content of a file: a crash, even of the machine, leaves the old or the new; on return, the new.

    A ``private`` file can be read by its owner only.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(temporary, "x", opener=_private if private else None) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """The content of a file is on disk when this returns; for its name see ``sync_folder``."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def sync_folder(path: Path) -> None:
    """The names in a folder are on disk when this returns: a new file is lost without its name."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
