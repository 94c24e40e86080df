"""Checks that a data file is ours and whole, from its first pages, before LMDB maps it.

LMDB trusts the page count in its meta page: a truncated file would kill the process with a bus error on the first read
past its end. So the length is checked here first.

LMDB has no checksums either. While the store is closed, a note keeps those of its first pages (both meta pages and the
roots of LMDB's own two trees): one wrong bit there could bring back the commit before the last.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from struct import Struct, error

from upriver.errors import CorruptStore, NotOurFile
from upriver.files import replace_file, sync_folder

DATA = "data.mdb"
OWNER = "owner.lock"
CLOSED = "closed.json"
MAGIC = 0xBEEFC0DE
VERSION = 1
PAGE_HEADER = 16
# After the page header: magic, version, address, map size, two trees of 48 bytes, last page, transaction.
META = Struct("<IIQQ48s48sQQ")
TREE_PAGE_SIZE = Struct("<I")  # the first tree's first word doubles as the page size
TREE_ROOT = Struct("<40xQ")


def check(path: Path) -> None:
    """Raise ``NotOurFile`` or ``CorruptStore`` if the data file at ``path`` must not be opened."""
    file = path / DATA
    if not file.exists():
        _refuse_foreign(path)
        return
    info = file.stat()
    if not stat.S_ISREG(info.st_mode):
        raise NotOurFile(f"{file} is not a regular file")
    if info.st_size == 0:
        raise CorruptStore(f"{file} is empty; delete the bucket's directory or restore it from a copy")
    with file.open("rb") as handle:
        head = handle.read(PAGE_HEADER + META.size)
        page_size, last_page = _newest(file, handle.fileno(), head)
    if info.st_size < (last_page + 1) * page_size:
        raise CorruptStore(f"{file} was cut short: {info.st_size} bytes where {(last_page + 1) * page_size} are in use")


def note_closed(path: Path) -> None:
    """Write the note; the file does not change any more."""
    replace_file(path / CLOSED, json.dumps({"pages": _beginnings(path / DATA)}))


def forget_closed(path: Path) -> None:
    """Delete the note before the file changes; durable on return."""
    with suppress(FileNotFoundError):
        (path / CLOSED).unlink()
        sync_folder(path)


def compare_note(path: Path) -> None:
    """Raise ``CorruptStore`` if the file has changed since it was closed; the caller holds the owner's lock."""
    note = path / CLOSED
    if not note.exists() or not (path / DATA).exists():
        return  # it was not closed cleanly
    try:
        noted = json.loads(note.read_text())["pages"]
    except (ValueError, KeyError, TypeError):
        noted = None
    if noted != _beginnings(path / DATA):
        raise CorruptStore(
            f"{path / DATA} is damaged: its first pages are not as {note} says they were when it was closed; restore "
            "both from one copy, or, if you know that the data file is right, delete the note"
        )


def _beginnings(file: Path) -> list[int]:
    """The CRC-32 of each page that the note covers."""
    with file.open("rb") as handle:
        head = handle.read(PAGE_HEADER + META.size)
        page_size, _ = _newest(file, handle.fileno(), head)
        pages = [os.pread(handle.fileno(), page_size, number * page_size) for number in (0, 1)]
        for trees in (META.unpack_from(page, PAGE_HEADER)[4:6] for page in list(pages)):
            for (root,) in map(TREE_ROOT.unpack, trees):
                pages.append(os.pread(handle.fileno(), page_size, root * page_size) if root < 1 << 48 else b"")
    return [zlib.crc32(page) for page in pages]


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise NotOurFile(f"{path} is not a directory")
    strangers = sorted(name for name in os.listdir(path) if name not in ("lock.mdb", OWNER, CLOSED))
    if strangers:
        raise NotOurFile(f"{path} holds {strangers[0]} but no {DATA}; it is not a bucket's directory")


def _newest(file: Path, descriptor: int, head: bytes) -> tuple[int, int]:
    """Page size and last used page of the newer of the two meta pages."""
    first = _meta(file, head)
    page_size = first[0]
    second = _meta(file, os.pread(descriptor, PAGE_HEADER + META.size, page_size))
    newest = max(first, second, key=lambda meta: meta[2])
    return page_size, newest[1]


def _meta(file: Path, page: bytes) -> tuple[int, int, int]:
    try:
        magic, version, _, _, tree, _, last_page, transaction = META.unpack_from(page, PAGE_HEADER)
    except error as short:
        raise CorruptStore(f"{file} is too short to be a store") from short
    if magic != MAGIC:
        raise NotOurFile(f"{file} was not written by upriver (no LMDB magic); move it away")
    if version != VERSION:
        raise NotOurFile(f"{file} has LMDB data version {version}; this build reads {VERSION}")
    return TREE_PAGE_SIZE.unpack_from(tree)[0], last_page, transaction
