"""Reads everything that a bucket has on disk and reports damage. Changes nothing; the bucket may be in use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from upriver.errors import DamagedVbucket, InvalidArguments, StoreError
from upriver.store.collections.changes import read_manifests
from upriver.store.collections.manifest import Manifest
from upriver.store.disk import sealed
from upriver.store.disk.file import BLOCK_KEY, VB_KEY, Disk, meta_key
from upriver.store.disk.sealed import Damage
from upriver.store.options import StoreOptions


class StoreFinding(NamedTuple):
    """One finding of damage; ``vbucket`` is None if it concerns the whole bucket."""

    bucket: str
    vbucket: int | None
    file: str
    what: str


class CheckedAmount(NamedTuple):
    """How much was checked."""

    vbuckets: int = 0
    blocks: int = 0
    tables: int = 0
    size_bytes: int = 0

    def plus(self, other: CheckedAmount) -> CheckedAmount:
        return CheckedAmount(*(mine + its for mine, its in zip(self, other, strict=True)))


def check_bucket(path: Path, progress: Callable[[int, int], None]) -> tuple[CheckedAmount, list[StoreFinding]]:
    """Check one bucket; ``progress`` is called with the number of vbuckets done and their total."""
    looked, findings = CheckedAmount(), []
    try:
        disk = Disk(path, StoreOptions(), read_only=True)
    except StoreError as error:
        return looked, [StoreFinding(path.name, None, str(path / "data.mdb"), str(error))]
    try:
        vbuckets = _vbuckets(disk)
        manifests = read_manifests(
            disk, lambda damage: findings.append(StoreFinding(path.name, None, str(disk.file), str(damage)))
        )
        for done, number in enumerate(vbuckets):
            at_this, found = VbucketCheck(disk, number, manifests).run()
            looked = looked.plus(at_this)
            findings += [StoreFinding(path.name, number, str(disk.file), what) for what in found]
            progress(done + 1, len(vbuckets))
    except StoreError as error:
        findings.append(StoreFinding(path.name, None, str(disk.file), str(error)))
    finally:
        disk.close()
    return looked, findings


def _vbuckets(disk: Disk) -> list[int]:
    """The vbuckets that the bucket should have."""
    identity = disk.identity()
    if identity is None:
        return []
    try:
        if identity["manifest"]:
            Manifest.parse(identity["manifest"])
    except (InvalidArguments, KeyError) as error:
        raise StoreError(f"{disk.file}: the manifest cannot be read: {error}") from error
    with disk.read() as transaction:
        present = disk.present(transaction)
        return present if present is not None else sorted(_owners(disk, transaction))


def _owners(disk: Disk, transaction: Any) -> Iterator[int]:
    for key, _ in transaction.cursor(db=disk.meta):
        if bytes(key[:1]) == b"v":
            yield VB_KEY.unpack(key[1:])[0]


class VbucketCheck:
    """Checks one vbucket, in one transaction; continues after damage."""

    def __init__(self, disk: Disk, number: int, manifests: Container[int]) -> None:
        self._disk, self._number, self._manifests = disk, number, manifests
        self._found: list[str] = []
        self._looked = CheckedAmount(vbuckets=1)

    def run(self) -> tuple[CheckedAmount, list[str]]:
        try:
            with self._disk.read(self._number) as transaction:
                record = self._disk.get(transaction, meta_key(self._number), self._number)
                fields = self._disk.vbucket_record(self._number, record)
                manifest = fields.get("manifest")
                if isinstance(manifest, int) and manifest not in self._manifests:
                    self._found.append(f"its manifest {manifest:x} is missing or damaged")
                for part in (self._check_blocks, self._check_dead, self._check_tables):
                    try:
                        part(transaction, fields)
                    except DamagedVbucket as damage:
                        self._found.append(damage.what)
        except DamagedVbucket as damage:
            self._found.append(damage.what)
        return self._looked, self._found

    def _each(self, transaction: Any, tree: Any) -> Iterator[tuple[int, Any]]:
        cursor = transaction.cursor(db=tree)
        more = cursor.set_range(BLOCK_KEY.pack(self._number, 0))
        while more:
            owner, last = BLOCK_KEY.unpack(cursor.key())
            if owner != self._number:
                return
            yield last, self._disk.value(cursor, self._number)
            more = cursor.next()

    def _check_blocks(self, transaction: Any, fields: dict[str, Any]) -> None:
        blocks = records = reached = 0
        for last, value in self._each(transaction, self._disk.log):
            try:
                block = sealed.open_block(self._number, last, value, self._disk.strict)
                records += block.records
                if block.link not in (None, reached):
                    self._found.append(f"the block after seqno {reached} is missing")
            except Damage as damage:
                self._found.append(str(damage))
            blocks, reached = blocks + 1, last
            self._looked = self._looked.plus(CheckedAmount(blocks=1, size_bytes=len(value)))
        if reached != fields.get("log_end", reached):
            self._found.append(f"the log ends at seqno {reached}, not at {fields['log_end']}")
        if not self._found and "log_end" in fields and [blocks, records] != fields["content"][:2]:
            self._found.append(f"it has {blocks} blocks and {records} records, not {fields['content'][:2]}")

    def _check_dead(self, transaction: Any, fields: dict[str, Any]) -> None:
        count = 0
        for last, value in self._each(transaction, self._disk.dead):
            count += self._disk.dead_list(self._number, last, value).size
            self._looked = self._looked.plus(CheckedAmount(size_bytes=len(value)))
        if "log_end" in fields and count != fields["content"][2]:
            self._found.append(f"{count} seqnos are listed as replaced, not {fields['content'][2]}")

    def _check_tables(self, transaction: Any, fields: dict[str, Any]) -> None:
        tables = self._disk.tables_in(transaction, self._number, guarded=True)
        self._looked = self._looked.plus(
            CheckedAmount(tables=len(tables), size_bytes=sum(table.nbytes for _, table in tables))
        )
        self._disk.check_tables(transaction, self._number, tables)
