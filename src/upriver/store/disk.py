"""The LMDB file of one bucket: named trees, keys, transactions, and turning its failures into ours.

Trees: ``log`` (vbucket, last seqno) -> block of packed records; ``dead`` the same key -> the seqnos that the block's
records replaced; ``index`` (vbucket, generation) -> key table; ``meta`` everything small. Every transaction lasts for
one call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import IO, Any

import lmdb
import numpy as np
import numpy.typing as npt
import orjson

from upriver.errors import CorruptStore, DirectoryInUse, DiskFull, NotOurFile
from upriver.store import lmdbfile
from upriver.store.options import MIB, Durability, StoreOptions

Words = npt.NDArray[np.uint64]
Octets = npt.NDArray[np.uint8]

FORMAT = 2
READABLE = (1, 2)  # format 1 had one key table a vbucket
BUCKET = b"bucket"
BLOCK_KEY = Struct(">HQ")
VB_KEY = Struct(">H")
TABLE_KEY = Struct(">HI")
BLOCK = Struct("<IIQQQ")  # flags, records, first seqno, safe seqno, reserved
EXACT = 1  # block flag: nothing in it was deduplicated, so every seqno in it is a state that existed
NO_WORDS: Words = np.zeros(0, np.uint64)
NO_WORDS.flags.writeable = False  # as the tables that LMDB shows us: kernels are compiled for one kind
PRIVATE = 0o600  # mode of the files that hold documents
GROWTH = 64 * MIB  # the file is lengthened ahead of need in such steps


class Disk:
    """One open data file."""

    def __init__(self, path: Path, options: StoreOptions) -> None:
        lmdbfile.check(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = path / lmdbfile.DATA
        self.fresh = not self.file.exists()
        self._owner = claim(path)
        self._options = options
        self._env = self._open(options)
        self._trees = {name: self._tree(name) for name in (b"log", b"dead", b"index", b"meta")}
        self.log, self.dead, self.index, self.meta = self._trees.values()
        self._stuck = False  # the file could not grow when it was last tried

    def _open(self, options: StoreOptions) -> Any:
        _hide(self.file)
        size = options.map_bytes or max(64 * 1024 * MIB, shutil.disk_usage(self.path).total)
        try:
            return lmdb.open(
                str(self.path), map_size=size, max_dbs=8, max_readers=1024, meminit=False, readahead=False,
                metasync=options.durability is Durability.FSYNC, max_spare_txns=8, mode=PRIVATE,
            )  # fmt: skip
        except lmdb.Error as failure:
            raise _ours(failure, self.file) from failure

    def _tree(self, name: bytes) -> Any:
        try:
            return self._env.open_db(name)
        except lmdb.Error as failure:
            raise _ours(failure, self.file) from failure

    def close(self) -> None:
        self._env.close()
        self._owner.close()

    @contextmanager
    def write(self, expected_bytes: int = 0) -> Iterator[Any]:
        """A write transaction that is durable when the block ends; raises ``DiskFull`` and leaves no trace."""
        try:
            self._lengthen(2 * expected_bytes + MIB)
            with self._env.begin(write=True, buffers=True) as transaction:
                yield transaction
            self._lengthen(0)
        except (lmdb.Error, OSError) as failure:
            raise _ours(failure, self.file, self._is_cramped()) from failure

    def _is_cramped(self) -> bool:
        """LMDB calls a write that was cut short an input/output error; mostly it is a disk without room."""
        return self._stuck or shutil.disk_usage(self.path).free < GROWTH

    def read(self) -> Any:
        """A read transaction, which is its own context manager."""
        return self._env.begin(buffers=True)

    def _lengthen(self, ahead: int) -> None:
        """Keep the file as long as what is in use and some more, so that a short file at open always means damage."""
        info = self._env.info()
        used = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        if os.stat(self.file).st_size >= used + ahead or used + ahead > info["map_size"]:
            return
        try:
            os.truncate(self.file, used + ahead + (GROWTH if ahead > GROWTH // 8 else 0))
            self._stuck = False
        except OSError:
            if not ahead:
                raise  # a page in use lies behind the end
            self._stuck = True  # but there may be free pages inside: the commit will tell

    def tables(self, vbucket: int) -> list[Words]:
        """The key tables of a vbucket as of the last commit, oldest first.

        They stay where they are, and outlive the transaction that found them, until a commit takes them away and
        the next one begins: LMDB writes only to pages that nothing in the last commit refers to.
        """
        with self.read() as transaction:
            return [table for _, table in self.tables_in(transaction, vbucket)]

    def tables_in(self, transaction: Any, vbucket: int) -> list[tuple[bytes, Words]]:
        """(where, key table) as a transaction sees them."""
        found: list[tuple[bytes, Words]] = []
        cursor = transaction.cursor(db=self.index)
        more = cursor.set_range(VB_KEY.pack(vbucket))
        while more and (where := bytes(cursor.key())).startswith(VB_KEY.pack(vbucket)):
            found.append((where, np.frombuffer(cursor.value(), np.uint64)))
            more = cursor.next()
        return found

    def put_table(self, transaction: Any, vbucket: int, table: Words, instead: Iterable[bytes]) -> None:
        """Add a key table, as the newest; it takes the place of those at ``instead``."""
        tables = self.tables_in(transaction, vbucket)
        newest = int.from_bytes(tables[-1][0][VB_KEY.size :], "big") if tables else 0  # nothing there: format 1
        for where in instead:
            transaction.delete(where, db=self.index)
        transaction.put(TABLE_KEY.pack(vbucket, newest + 1), table.data, db=self.index)

    def erase_tables(self, transaction: Any, vbucket: int) -> None:
        for where, _ in self.tables_in(transaction, vbucket):
            transaction.delete(where, db=self.index)

    @property
    def size_bytes(self) -> int:
        info = self._env.info()
        return int((info["last_pgno"] + 1) * self._env.stat()["psize"])

    def erase(self, transaction: Any, vbucket: int, above: int = 0) -> None:
        """Delete the blocks of a vbucket that end above seqno ``above``."""
        erase_range(transaction, self.log, vbucket, above)
        erase_range(transaction, self.dead, vbucket, above)

    def identity(self) -> dict[str, Any] | None:
        """What the bucket record says; None in a new file."""
        with self.read() as transaction:
            found = transaction.get(BUCKET, db=self.meta)
            if found is None:
                if not self.fresh and self._env.stat()["entries"] > len(self._trees):
                    raise NotOurFile(f"{self.file} is an LMDB file of another program")
                return None
            return read_json(found, self.file)


def _hide(file: Path) -> None:
    """Documents are for the node's user alone, also in a file from before that was so."""
    if file.exists() and file.stat().st_mode & 0o077:
        file.chmod(PRIVATE)


def claim(path: Path) -> IO[bytes]:
    """One process, one bucket: two writers with a memory of their own would undo each other. Held until closed."""
    handle = (path / lmdbfile.OWNER).open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        handle.close()
        raise DirectoryInUse(f"{path} is open in another process; stop that one first") from failure
    return handle


def erase_range(transaction: Any, tree: Any, vbucket: int, above: int) -> None:
    """Delete the entries of a vbucket whose seqno is above ``above``."""
    cursor = transaction.cursor(db=tree)
    cursor.set_range(BLOCK_KEY.pack(vbucket, above + 1))
    while bytes(cursor.key()[:2]) == VB_KEY.pack(vbucket):
        cursor.delete()


def write_json(fields: dict[str, Any]) -> bytes:
    """The inverse of ``read_json``; arrays become lists."""
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def read_json(data: Any, file: Path) -> dict[str, Any]:
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as failure:
        raise CorruptStore(f"{file}: a meta record cannot be read") from failure
    if not isinstance(parsed, dict):
        raise CorruptStore(f"{file}: a meta record is not an object")
    return parsed


def _ours(failure: Exception, file: Path, cramped: bool = False) -> Exception:
    """Our error for what LMDB or the system said."""
    full = isinstance(failure, lmdb.MapFullError | lmdb.DiskError)
    full = full or (cramped and "Input/output error" in str(failure))
    if isinstance(failure, OSError):
        full = failure.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        if not full:
            return failure
    if full or any(text in str(failure) for text in ("No space left", "File too large", "Disk quota")):
        return DiskFull(f"{file}: {failure}; nothing was lost, free some space")
    if isinstance(failure, lmdb.InvalidError | lmdb.VersionMismatchError):
        return NotOurFile(f"{file} was not written by upriver: {failure}")
    if isinstance(failure, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.PanicError):
        return CorruptStore(f"{file} is damaged: {failure}")
    return CorruptStore(f"{file}: {failure}")
