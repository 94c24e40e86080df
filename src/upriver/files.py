"""Small files that are replaced whole."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """A crash at any moment, of the machine too, leaves the old content or the new; when this returns, the new.

    A ``private`` file is for its owner's eyes only.
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


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def sync_folder(path: Path) -> None:
    """That the new file has the name is part of the folder, which has to reach the disk too."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
