"""The LMDB file of one bucket: its trees, keys and transactions, and LMDB's failures as our errors.

Trees: ``log`` (vbucket, last seqno) -> block of packed records; ``dead`` the same key -> the seqnos that the block's
records replaced; ``index`` (vbucket, generation) -> key table; ``meta`` small records. Every transaction lasts for one
call. Everything read is checked (``sealed``): damage raises ``DamagedVbucket``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import IO, Any

import lmdb
import numpy as np

from upriver.errors import CorruptStore, DamagedVbucket, DirectoryInUse, DiskFull, NotOurFile
from upriver.store.disk import lmdbfile, sealed
from upriver.store.disk.kernels.nodes import file_begin, value_end
from upriver.store.disk.sealed import EXACT, NO_WORDS, Block, Damage, Octets, Words
from upriver.store.options import MIB, Durability, StoreOptions

__all__ = ["EXACT", "NO_WORDS", "Block", "Disk", "Octets", "Words"]

FORMAT = 3
READABLE = (1, 2, 3)  # format 1: one key table per vbucket; formats 1 and 2: no checksums
BUCKET = b"bucket"
PRESENT = b"present"  # which vbuckets have a record
VB_META = b"v"
BLOCK_KEY = Struct(">HQ")
VB_KEY = Struct(">H")
TABLE_KEY = Struct(">HI")
FAILURES = (lmdb.Error, struct.error)  # what reading a damaged page can raise
PRIVATE = 0o600  # mode of the files that hold documents
GROWTH = 64 * MIB  # the file grows ahead of need in steps of this size
SLACK = MIB // 4  # behind the last page: with a damaged page LMDB may read there, and the file must cover it


class Disk:
    """One open data file."""

    def __init__(self, path: Path, options: StoreOptions, *, read_only: bool = False) -> None:
        """Open or create the file. ``read_only``: claim and change nothing; another process may have it open."""
        lmdbfile.check(path)
        self.path = path
        self.file = path / lmdbfile.DATA
        self.fresh = not self.file.exists()
        self._read_only = read_only
        self._owner: IO[bytes] | None = None
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
            self._owner = claim(path)
        try:
            lmdbfile.compare_note(path)
        except BaseException:
            self._release()
            raise
        self._env = self._open(options)
        self.strict = True  # everything has a checksum; False in a store that an older version began
        self.damage: dict[int, DamagedVbucket] = {}  # the first damage found, by vbucket
        self.on_damage: Callable[[DamagedVbucket], None] | None = None  # in any thread
        self._stuck = False  # the last attempt to grow the file failed
        self._page_size = int(self._env.stat()["psize"])
        self._length = self.measure()
        self._begin: np.uint64 | None = None
        try:
            self._trees = self._open_trees()
        except BaseException:
            self.close()
            raise
        self.log, self.dead, self.index, self.meta = self._trees.values()

    def _open(self, options: StoreOptions) -> Any:
        if not self._read_only:
            _hide(self.file)
        size = options.map_bytes or max(64 * 1024 * MIB, shutil.disk_usage(self.path).total)
        try:
            return lmdb.open(
                str(self.path), map_size=size, max_dbs=8, max_readers=1024, meminit=False, readahead=False,
                metasync=options.durability is Durability.FSYNC, max_spare_txns=8, mode=PRIVATE,
                readonly=self._read_only,
            )  # fmt: skip
        except lmdb.Error as failure:
            self._release()
            raise _ours(failure, self.file) from failure

    def _open_trees(self) -> dict[bytes, Any]:
        """Open the four trees, or create them in a new file: one with a damaged name must not pass for an empty one."""
        names = (b"log", b"dead", b"index", b"meta")
        try:
            found: dict[bytes, Any] = {}
            for name in names:
                try:
                    found[name] = self._env.open_db(name, create=False)
                except lmdb.NotFoundError:
                    continue
            with self._env.begin() as transaction:
                used = any(transaction.stat(tree)["entries"] for tree in found.values())
                odd = [name for name, tree in found.items() if any(tree.flags(transaction).values())]
            if odd or ((used or self._read_only) and len(found) < len(names)):
                missing = odd or [name for name in names if name not in found]
                raise CorruptStore(f"{self.file} is damaged: the tree {missing[0].decode()} is missing or wrong")
            return {name: found.get(name) or self._env.open_db(name) for name in names}
        except lmdb.Error as failure:
            raise _ours(failure, self.file) from failure

    def close(self, clean: bool = False) -> None:
        """Close the file; ``clean``: everything is written, so note checksums of its first pages."""
        self._env.close()
        if clean:
            lmdbfile.note_closed(self.path)
        self._release()

    def _release(self) -> None:
        if self._owner is not None:
            self._owner.close()

    # ---- damage ----

    def damaged(self, vbucket: int, what: object) -> DamagedVbucket:
        """Note the damage, call ``on_damage`` if it is the vbucket's first, and return the error to raise."""
        error = DamagedVbucket(vbucket, str(self.file), str(what))
        if vbucket not in self.damage:
            self.damage[vbucket] = error
            if self.on_damage is not None:
                self.on_damage(error)
        return error

    def block(self, vbucket: int, last: int, value: Any) -> Block:
        """The block, checked."""
        try:
            return sealed.open_block(vbucket, last, value, self.strict)
        except Damage as damage:
            raise self.damaged(vbucket, damage) from damage

    def dead_list(self, vbucket: int, last: int, value: Any) -> Words:
        try:
            return sealed.open_dead(vbucket, last, value, self.strict)
        except Damage as damage:
            raise self.damaged(vbucket, damage) from damage

    def vbucket_record(self, vbucket: int, value: Any) -> dict[str, Any]:
        if value is None:
            raise self.damaged(vbucket, "its record is missing")
        try:
            return sealed.open_record(meta_key(vbucket), value, self.strict)
        except Damage as damage:
            raise self.damaged(vbucket, f"its record {damage}") from damage

    def bucket_record(self, key: bytes, value: Any) -> dict[str, Any]:
        try:
            return sealed.open_record(key, value, self.strict)
        except Damage as damage:
            name = key.decode("ascii", "backslashreplace")
            raise CorruptStore(f"{self.file} is damaged: the record '{name}' {damage}") from damage

    def begin_writing(self) -> None:
        """To be called before the first change."""
        lmdbfile.forget_closed(self.path)

    @contextmanager
    def write(self, expected_bytes: int = 0) -> Iterator[Any]:
        """A write transaction, durable when the ``with`` ends; if it raises ``DiskFull``, nothing was written."""
        try:
            self._lengthen(2 * expected_bytes + MIB)
            with self._env.begin(write=True, buffers=True) as transaction:
                yield transaction
            self._lengthen(0)
        except (lmdb.Error, OSError) as failure:
            raise _ours(failure, self.file, self._is_cramped()) from failure

    def _is_cramped(self) -> bool:
        """Whether an input/output error probably means a full disk: LMDB reports incomplete writes that way."""
        return self._stuck or shutil.disk_usage(self.path).free < GROWTH

    def begin(self) -> Any:
        """A plain read transaction; the caller handles ``FAILURES``."""
        return self._env.begin(buffers=True)

    def read(self, vbucket: int | None = None) -> Reading:
        """A context manager with a read transaction; ``vbucket`` is the one to blame damage on."""
        return Reading(self, self._env.begin(buffers=True), vbucket)

    def value(self, cursor: Any, vbucket: int | None = None) -> Any:
        """The value at a cursor of a read transaction, after checking that all of it is in the file."""
        key = cursor.key()
        end = int(value_end(np.frombuffer(key, np.uint8), self._page_size)) if len(key) else 1 << 62
        if end > self._length and end > self.measure():  # it may have grown
            what = "a value extends beyond the end of the file"
            raise self.damaged(vbucket, what) if vbucket is not None else CorruptStore(f"{self.file}: {what}")
        return cursor.value()

    @property
    def place(self) -> tuple[np.uint64, int, int]:
        """The address of the file in memory, the size of its pages, and its length."""
        if self._begin is None:
            self._begin = self._find_begin()
        return self._begin, self._page_size, self._length

    def _find_begin(self) -> np.uint64:
        """The address of the file in memory, computed from two pages in case one is damaged."""
        begins = []
        with self.read() as transaction:
            for tree in (None, self.meta):
                cursor = transaction.cursor(db=tree) if tree is not None else transaction.cursor()
                if not cursor.first():
                    raise CorruptStore(f"{self.file} is damaged: a tree is empty")
                begins.append(file_begin(np.frombuffer(cursor.key(), np.uint8), self._page_size))
        if begins[0] != begins[1]:
            raise CorruptStore(f"{self.file} is damaged: a page is not in its place")
        return np.uint64(begins[0])

    def measure(self) -> int:
        """The current length of the file."""
        self._length = os.stat(self.file).st_size
        return self._length

    def get(self, transaction: Any, key: bytes, vbucket: int | None = None) -> Any:
        """The record of this name in the meta tree, or None."""
        cursor = transaction.cursor(db=self.meta)
        return self.value(cursor, vbucket) if cursor.set_key(key) else None

    def vbucket_value(self, cursor: Any, number: int) -> Any:
        """A vbucket's sealed record, by a cursor of the meta tree; None if it is missing."""
        return self.value(cursor, number) if cursor.set_key(meta_key(number)) else None

    def _lengthen(self, ahead: int) -> None:
        """Keep the file longer than the pages in use, so that a short file always means damage."""
        info = self._env.info()
        used = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        ahead += SLACK
        if os.stat(self.file).st_size >= used + ahead or used + ahead > info["map_size"]:
            return
        try:
            os.truncate(self.file, used + ahead + (GROWTH if ahead > GROWTH // 8 else 0))
            self._stuck = False
        except OSError:
            if os.stat(self.file).st_size < used:
                raise  # a page in use is behind the end of the file
            self._stuck = True  # the commit may still find free pages inside

    def tables(self, vbucket: int) -> list[Words]:
        """The key tables of a vbucket as of the last commit, oldest first.

        They outlive the read transaction. They stay valid until a commit removes them and the next one begins: LMDB
        writes only to pages that the last commit does not refer to.
        """
        with self.read(vbucket) as transaction:
            found = self.tables_in(transaction, vbucket, guarded=True)
            self.check_tables(transaction, vbucket, found)
            return [table for _, table in found]

    def check_tables(self, transaction: Any, vbucket: int, found: list[tuple[int, Words]]) -> None:
        """Raise unless these are exactly the tables that the vbucket's record lists, and whole."""
        value = self.get(transaction, meta_key(vbucket), vbucket)
        known = self.vbucket_record(vbucket, value).get("tables") if value is not None or found else []
        if known is not None and known != [generation for generation, _ in found]:
            raise self.damaged(vbucket, f"its key tables are {[each for each, _ in found]}, not {known}")
        for generation, table in found:
            self.check_table(vbucket, generation, table)

    def check_table(self, vbucket: int, generation: int, table: Words) -> None:
        try:
            sealed.check_table(vbucket, generation, table, self.strict)
        except Damage as damage:
            raise self.damaged(vbucket, damage) from damage

    def tables_in(self, transaction: Any, vbucket: int, guarded: bool = False) -> list[tuple[int, Words]]:
        """(generation, key table) as a transaction sees them, unchecked.

        ``guarded`` checks that they are inside the file. That is for read transactions: the changes of a write
        transaction are not in the file yet.
        """
        found: list[tuple[int, Words]] = []
        cursor = transaction.cursor(db=self.index)
        more = cursor.set_range(VB_KEY.pack(vbucket))
        while more and (where := bytes(cursor.key())).startswith(VB_KEY.pack(vbucket)):
            value = self.value(cursor, vbucket) if guarded else cursor.value()
            if len(value) % 8:
                raise self.damaged(vbucket, "a key table has the wrong length")
            generation = int.from_bytes(where[VB_KEY.size :], "big")  # nothing there: format 1
            found.append((generation, np.frombuffer(value, np.uint64)))
            more = cursor.next()
        return found

    def put_table(self, transaction: Any, vbucket: int, table: Words, instead: Iterable[int]) -> None:
        """Add a key table as the newest; it replaces those of the generations ``instead``."""
        tables = self.tables_in(transaction, vbucket)
        generation = (tables[-1][0] if tables else 0) + 1
        for old in instead:
            self._delete_table(transaction, vbucket, old)
        sealed.seal_table(vbucket, generation, table)
        transaction.put(TABLE_KEY.pack(vbucket, generation), table.data, db=self.index)

    def _delete_table(self, transaction: Any, vbucket: int, generation: int) -> None:
        if not transaction.delete(TABLE_KEY.pack(vbucket, generation), db=self.index):
            transaction.delete(VB_KEY.pack(vbucket), db=self.index)  # format 1

    def generations(self, transaction: Any, vbucket: int) -> list[int]:
        return [generation for generation, _ in self.tables_in(transaction, vbucket)]

    def erase_tables(self, transaction: Any, vbucket: int) -> None:
        for generation, _ in self.tables_in(transaction, vbucket):
            self._delete_table(transaction, vbucket, generation)

    def dead_in(self, transaction: Any, vbucket: int, upto: int, guarded: bool = False) -> Words:
        """Seqnos that records up to ``upto`` have replaced, unsorted; ``guarded`` as in ``tables_in``."""
        found: list[Words] = []
        cursor = transaction.cursor(db=self.dead)
        more = cursor.set_range(BLOCK_KEY.pack(vbucket, 0))
        while more:
            owner, last = BLOCK_KEY.unpack(cursor.key())
            if owner != vbucket or last > upto:
                break
            value = self.value(cursor, vbucket) if guarded else cursor.value()
            found.append(self.dead_list(vbucket, last, value))
            more = cursor.next()
        return np.concatenate(found) if found else NO_WORDS

    def last_block(self, transaction: Any, vbucket: int) -> int:
        """The seqno at which the newest block of a vbucket ends, 0 if there is none."""
        cursor = transaction.cursor(db=self.log)
        behind = cursor.set_range(VB_KEY.pack(vbucket + 1)) if vbucket < 0xFFFF else False
        if not (cursor.prev() if behind else cursor.last()):
            return 0
        owner, last = BLOCK_KEY.unpack(cursor.key())
        return int(last) if owner == vbucket else 0

    @property
    def size_bytes(self) -> int:
        info = self._env.info()
        return int((info["last_pgno"] + 1) * self._env.stat()["psize"])

    def erase(self, transaction: Any, vbucket: int, above: int = 0) -> None:
        """Delete the blocks of a vbucket that end above seqno ``above``."""
        erase_range(transaction, self.log, vbucket, above)
        erase_range(transaction, self.dead, vbucket, above)

    def identity(self) -> dict[str, Any] | None:
        """The fields of the bucket's record; None in a new file."""
        with self.read() as transaction:
            found = self.get(transaction, BUCKET)
            if found is None:
                if not self.fresh and self._env.stat()["entries"] > len(self._trees):
                    raise NotOurFile(f"{self.file} is an LMDB file of another program")
                if any(transaction.stat(tree)["entries"] for tree in self._trees.values()):
                    raise CorruptStore(f"{self.file} is damaged: the record 'bucket' is missing")
                return None
            self.strict = bytes(found[:1]) != b"{"  # an older version wrote "{": then nothing need be sealed
            fields = self.bucket_record(BUCKET, found)
            self.strict = bool(fields.get("sealed"))
            return fields

    # ---- the list of vbuckets ----

    def present(self, transaction: Any) -> list[int] | None:
        """The vbuckets that have a record; None in a store of an older version, which kept no list."""
        value = self.get(transaction, PRESENT)
        if value is None:
            if self.strict:
                raise CorruptStore(f"{self.file} is damaged: the record 'present' is missing")
            return None
        return list(self.bucket_record(PRESENT, value)["vbuckets"])

    def put_present(self, transaction: Any, vbuckets: Iterable[int]) -> None:
        transaction.put(PRESENT, sealed.seal_record(PRESENT, {"vbuckets": sorted(vbuckets)}), db=self.meta)


class Reading:
    """A read transaction for a ``with``; LMDB's failures inside it are reported as damage."""

    __slots__ = ("_disk", "_transaction", "_vbucket")

    def __init__(self, disk: Disk, transaction: Any, vbucket: int | None) -> None:
        self._disk, self._transaction, self._vbucket = disk, transaction, vbucket

    def __enter__(self) -> Any:
        return self._transaction.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.__exit__(kind, failure, trace)
        if isinstance(failure, FAILURES):
            if self._vbucket is None:
                raise CorruptStore(f"{self._disk.file} is damaged: {failure}") from failure
            raise self._disk.damaged(self._vbucket, failure) from failure


def _hide(file: Path) -> None:
    """Make the file readable only for the node's user; older versions did not."""
    if file.exists() and file.stat().st_mode & 0o077:
        file.chmod(PRIVATE)


def claim(path: Path) -> IO[bytes]:
    """Lock the directory for this process until the handle is closed: two writers would undo each other's work."""
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


def meta_key(vbucket: int) -> bytes:
    """The key of a vbucket's record in the meta tree."""
    return VB_META + VB_KEY.pack(vbucket)


def seal_vbucket(vbucket: int, fields: dict[str, Any]) -> bytes:
    """The inverse of ``Disk.vbucket_record``."""
    return sealed.seal_record(meta_key(vbucket), fields)


def _ours(failure: Exception, file: Path, cramped: bool = False) -> Exception:
    """The error of ours for a failure of LMDB or of the system."""
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
