"""Manifests on disk, each once and by uid; a vbucket's record says only which one it has.

The record of a vbucket is written with every commit. With a thousand collections in it that would be most of what is
written. A manifest stays as long as a vbucket refers to it: after a crash some may still have the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any

from upriver.errors import CorruptStore, InvalidArguments
from upriver.store.collections.manifest import Manifest
from upriver.store.disk.file import Disk
from upriver.store.disk.sealed import seal_record

_PREFIX = b"manifest"
_KEY = Struct(">8sQ")


def _nobody(damage: CorruptStore) -> None:
    """Vbuckets that refer to what is damaged say so themselves."""


def read(disk: Disk, on_damage: Callable[[CorruptStore], None] = _nobody) -> dict[int, Manifest]:
    """All that are kept and whole, by uid."""
    found: dict[int, Manifest] = {}
    with disk.read() as transaction:
        cursor = transaction.cursor(db=disk.meta)
        more = cursor.set_range(_PREFIX)
        while more and bytes(cursor.key()).startswith(_PREFIX):
            try:
                manifest = _parse(disk.bucket_record(bytes(cursor.key()), disk.value(cursor)), disk)
                found[manifest.uid] = manifest
            except CorruptStore as damage:
                on_damage(damage)
            more = cursor.next()
    return found


def _parse(fields: dict[str, Any], disk: Disk) -> Manifest:
    try:
        return Manifest.parse(fields["manifest"])
    except (KeyError, TypeError, InvalidArguments) as failure:
        raise CorruptStore(f"{disk.file}: a manifest is damaged: {failure}") from failure


def put(transaction: Any, disk: Disk, manifest: Manifest) -> None:
    key, fields = _KEY.pack(_PREFIX, manifest.uid), {"manifest": manifest.to_json().decode()}
    transaction.put(key, seal_record(key, fields), db=disk.meta)


def drop(transaction: Any, disk: Disk, uids: Iterable[int]) -> None:
    for uid in uids:
        transaction.delete(_KEY.pack(_PREFIX, uid), db=disk.meta)
