"""Durable file writes: replace a small file atomically, and sync files and folders to disk."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file's content atomically and durably.

    A crash, even of the machine, leaves either the old or the new content; after the return, the new. Only its owner
    can read a ``private`` file.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(temporary, "x", opener=_open_private if private else None) as file:
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
    """Write a file's content to disk; ``sync_folder`` does the same for its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def sync_folder(path: Path) -> None:
    """Write a folder's file names to disk: without its name, a new file is lost in a crash."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
