"""Many writes to one node in one run: quiet SETs followed by a NOOP, so that only refusals are answered."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from struct import Struct

from upriver.model import vbucket_of
from upriver.protocol.topology import Address, Topology
from upriver.wire.constants import Magic, Opcode
from upriver.wire.keys import join_key
from upriver.wire.messages.session import Noop

_SET = Struct(">BBHBBHIIQII")  # the header, then flags and expiry
FENCE = 0xFFFF_FFFF


class SetRun:
    """Documents for one node; ``keys[opaque]`` is the key of a refused write."""

    fence = FENCE

    def __init__(self, prefix: bytes) -> None:
        self.keys: list[bytes] = []
        self._prefix = prefix
        self._parts: list[bytes] = []

    def add(self, key: bytes, value: bytes, vbucket: int) -> None:
        size = len(self._prefix) + len(key)
        head = _SET.pack(
            Magic.REQUEST, Opcode.SETQ, size, 8, 0, vbucket, 8 + size + len(value), len(self.keys), 0, 0, 0
        )
        self.keys.append(key)
        self._parts += (head, self._prefix, key, value)

    def __len__(self) -> int:
        return len(self.keys)

    def encode(self) -> bytes:
        return b"".join((*self._parts, Noop(opaque=FENCE).encode()))


def parts_of(documents: Iterable[tuple[bytes, bytes]], size: int) -> Iterator[list[tuple[bytes, bytes]]]:
    """Documents in parts of about ``size`` bytes; each part is one request with its own deadline."""
    part: list[tuple[bytes, bytes]] = []
    left = size
    for document in documents:
        part.append(document)
        left -= len(document[1])
        if left <= 0:
            yield part
            part, left = [], size
    if part:
        yield part


def set_runs(
    documents: Iterable[tuple[bytes, bytes]], topology: Topology, collection_id: int, bare: Container[Address] = ()
) -> tuple[dict[Address, SetRun], list[bytes]]:
    """Documents by the node that owns them, and the keys without an owner; ``bare`` nodes have no collections."""
    prefix = join_key(collection_id, b"")
    owners = [topology.active(vb) for vb in range(topology.vbuckets)]
    runs: dict[Address, SetRun] = {}
    unowned: list[bytes] = []
    for key, value in documents:
        vb = vbucket_of(key, len(owners))
        owner = owners[vb]
        if owner is None:
            unowned.append(key)
            continue
        if (run := runs.get(owner)) is None:
            run = runs[owner] = SetRun(b"" if owner in bare else prefix)
        run.add(key, value, vb)
    return runs, unowned
