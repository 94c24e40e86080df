"""A STAT request as its group of statistics sees it, and what several groups share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments
from upriver.model import VbucketState

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

Figures = Iterator[tuple[str, object]]
_HEX = re.compile(r"(0x)?([0-9a-fA-F]{1,8})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Query:
    """One STAT request: the connection, the words after the group's name, and the JSON value."""

    conn: ClientConnection
    arguments: list[str]
    options: dict[str, object]

    @property
    def bucket(self) -> NodeBucket:
        return self.conn.require_bucket()

    def vbuckets(self) -> list[VBucket]:
        """The vbucket that the request names, or all."""
        if not self.arguments:
            return list(self.bucket.store.existing())
        return [self.bucket.store.vbucket(vbucket_number(self.arguments[0]))]


def vbucket_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 0xFFFF):
        raise InvalidArguments(f"{text[:20]!r} is not a vbucket number")
    return int(text)


def hex_id(text: str) -> int:
    """An id as the statistics show it: hexadecimal, with or without 0x."""
    found = _HEX.fullmatch(text)
    if found is None:
        raise InvalidArguments(f"{text[:20]!r} is not an id: write up to 8 hexadecimal digits")
    return int(found[2], 16)


def shown_high_seqno(vb: VBucket) -> int:
    """The high seqno as clients see it: of a vbucket that is not active, the end of the snapshot that it receives."""
    return vb.high_seqno if vb.state is VbucketState.ACTIVE else max(vb.high_seqno, vb.snapshot[1])
