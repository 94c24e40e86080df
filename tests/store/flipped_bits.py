"""Flips bits of a store one by one and reads everything back; runs as a separate process, which must not crash.

Prints a line of JSON for each bit: its place and the outcome, which is "harmless" (everything read is what was
written), the error that was raised, or the wrong data that no error announced.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.store.old_formats import make_old
from tests.store.store_support import SMALL, changes, open_bucket
from upriver.errors import KeyNotFound, StoreError
from upriver.model import VbucketState
from upriver.store.index import keyindex

keyindex.WORTH_A_TABLE = 64
VBUCKETS = 3
KEYS = [b"document-%d" % number for number in range(400)]
MANIFEST = b'{"uid":"1","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"},' \
    b'{"name":"other","uid":"8"}]}]}'  # fmt: skip


def make(path: Path) -> None:
    """A store with every structure: large and small blocks, dead lists, tables, records, and reused pages."""
    with open_bucket(path, SMALL, VBUCKETS) as bucket:
        bucket.apply_manifest(MANIFEST)
        for number in range(VBUCKETS):
            vb = bucket.set_state(number, VbucketState.ACTIVE)
            for turn in range(5):
                chosen = KEYS[number::VBUCKETS][turn * 20 :]
                vb.bulk.set_many(chosen, [b"%d of %d " % (turn, number) * (8 + turn * 3)] * len(chosen))
                bucket.flush()
            vb.bulk.delete_many(KEYS[number::VBUCKETS][:7])
            vb.documents.set(b"large", bytes(20_000))
            vb.documents.set(b"elsewhere", b"v", 8)
            bucket.flush()
        bucket.compact(1)
        bucket.vbucket(2).documents.set(b"small", b"1")


class Reader:
    """Reads everything in a store and collects errors: one in one vbucket does not excuse wrong data in another."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def ask(self, question: Any) -> Any:
        try:
            return question()
        except KeyNotFound:
            return "not found"
        except StoreError as error:
            self.errors.append(str(error))
            return StoreError

    def vbucket(self, vb: Any) -> dict[str, Any]:
        said: dict[str, Any] = {
            "state": vb.state, "log": [tuple(entry) for entry in vb.failover_log], "items": vb.item_count,
            "high": vb.high_seqno, "dead": vb.tombstone_count,
        }  # fmt: skip
        for key in [*KEYS[:40], *KEYS[-40:], b"large", b"small", b"new"]:
            said[f"get {key!r}"] = self.ask(
                lambda key=key: (vb.documents.get(key).value, vb.documents.get(key).rev_seqno)
            )
        for start in (0, vb.high_seqno // 2):
            said[f"stream {start}"] = self.ask(lambda start=start: changes(vb.stream(start, vb.high_seqno)))
        return said

    def bucket(self, path: Path) -> dict[Any, Any]:
        said: dict[Any, Any] = {}
        with open_bucket(path, SMALL, VBUCKETS) as bucket:
            said["manifest"] = bucket.manifest.to_json()
            said["vbuckets"] = sorted([*bucket.unreadable, *(vb.id for vb in bucket.existing())])
            for number in bucket.unreadable:
                said[number] = said[number, "later"] = self.ask(lambda number=number: bucket.vbucket(number))
            for vb in bucket.existing():
                said[vb.id] = self.vbucket(vb)
            for vb in bucket.existing():
                self.ask(lambda vb=vb: vb.documents.set(b"new", b"written"))
            self.ask(bucket.flush)
            bucket.trim_memory()
            for vb in bucket.existing():
                said[vb.id, "later"] = self.vbucket(vb)
        return said


def forget_time(said: dict[Any, Any]) -> dict[Any, Any]:
    """Remove record heads: new records have the CAS of the moment."""
    return {
        key: {name: [each._replace(head=None) for each in value] if isinstance(value, list) and "stream" in name
              else value for name, value in part.items()} if isinstance(part, dict) else part
        for key, part in said.items()
    }  # fmt: skip


def try_bit(path: Path, data: bytes, at: int, bit: int, expected: dict[Any, Any]) -> str:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    (path / "data.mdb").write_bytes(damaged)
    reader = Reader()
    said = reader.ask(lambda: forget_time(reader.bucket(path)))
    if said is not StoreError:
        for key, part in expected.items():
            if said.get(key) is StoreError:  # an unreadable vbucket that reports an error
                continue
            for name, value in part.items() if isinstance(part, dict) else [("", part)]:
                found = said.get(key, "nothing") if name == "" else said.get(key, {}).get(name, "nothing")
                if found is not StoreError and found != value and not (reader.errors and "later" in str(key)):
                    return f"WRONG: {key} {name}: {str(found)[:200]} instead of {str(value)[:200]}"
    if any("data.mdb" not in error for error in reader.errors):
        return f"WRONG: an error that names no file: {reader.errors}"
    return reader.errors[0] if reader.errors else "harmless"


def places(data: bytes, seed: int, count: int) -> list[tuple[int, int]]:
    """Half of the bits anywhere in used pages, half in page heads and in the first pages, where harm is greatest."""
    chance = random.Random(seed)
    used = len(data.rstrip(b"\0"))
    found = [(chance.randrange(used), chance.randrange(8)) for _ in range(count // 2)]
    pages = range(0, used, 4096)
    found += [(chance.choice(pages) + chance.randrange(64), chance.randrange(8)) for _ in range(count // 4)]
    return found + [(chance.choice(pages[:12]) + chance.randrange(200), chance.randrange(8)) for _ in range(count // 4)]


def main(folder: Path, seed: int, count: int, old: bool) -> None:
    make(folder / "made")
    if old:
        make_old(folder / "made", 2)
    shutil.copytree(folder / "made", folder / "plain")
    reader = Reader()
    expected = forget_time(reader.bucket(folder / "plain"))
    assert not reader.errors, reader.errors
    data = (folder / "made" / "data.mdb").read_bytes()
    for at, bit in places(data, seed, count):
        shutil.rmtree(folder / "tried", ignore_errors=True)
        shutil.copytree(folder / "made", folder / "tried")
        print(json.dumps({"at": at, "bit": bit, "start": True}), flush=True)
        came = try_bit(folder / "tried", data, at, bit, expected)
        print(json.dumps({"at": at, "bit": bit, "came": came}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "old" in sys.argv)
