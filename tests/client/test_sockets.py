"""Both shells against scripted producers behind real sockets: bytes one at a time, cuts anywhere, broken peers."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest

import upriver
from tests.support.scripted_producer import mutation
from tests.support.scripted_server import SEQNOS, VBUCKETS, Behaviour, Peer, everything, serving
from upriver.client.blocking import connect
from upriver.errors import ConnectFailed, RemoteProtocolError
from upriver.wire.messages.dcp import StreamRequest

ENDS = dict.fromkeys(range(VBUCKETS), SEQNOS)
ALL = sorted((vb, n) for vb in range(VBUCKETS) for n in range(1, SEQNOS + 1))


def read_blocking(connection: str, objects: bool) -> list[tuple[int, int]]:
    with connect(connection) as db:
        if objects:
            return [(c.vbucket, c.seqno) for c in db.changes(end=ENDS)]
        batches = list(db.change_batches(end=ENDS, rows=7))
        return [pair for b in batches for pair in zip(b["vbucket"].to_pylist(), b["seqno"].to_pylist(), strict=True)]


def read_async(connection: str, objects: bool) -> list[tuple[int, int]]:
    async def read() -> list[tuple[int, int]]:
        async with upriver.aio.connect(connection) as db:
            if objects:
                return [(c.vbucket, c.seqno) async for c in db.changes(end=ENDS)]
            batches = [batch async for batch in db.change_batches(end=ENDS, rows=7)]
        return [pair for b in batches for pair in zip(b["vbucket"].to_pylist(), b["seqno"].to_pylist(), strict=True)]

    return asyncio.run(read())


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("objects", [False, True], ids=["batches", "objects"])
@pytest.mark.parametrize("piece", [0, 1, 13])
def test_pieces_of_any_size_make_the_same_changes(read: Any, objects: bool, piece: int) -> None:
    with serving(everything, Behaviour(piece)) as connection:
        assert sorted(read(connection, objects)) == ALL


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("seed", range(6))
def test_connections_that_break_anywhere_lose_nothing_and_repeat_nothing(read: Any, seed: int) -> None:
    chance = random.Random(seed)
    cuts = [chance.randrange(1, 4000) for _ in range(5)]
    with serving(everything, Behaviour(0, cuts)) as connection:
        assert sorted(read(connection, objects=bool(seed % 2))) == ALL


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_a_producer_that_always_breaks_its_promise_is_given_up(read: Any) -> None:
    def lie(peer: Peer, request: StreamRequest) -> bytes:
        return peer.accepts(request) + mutation(request, 1)

    with serving(lie, Behaviour()) as connection, pytest.raises(RemoteProtocolError, match="outside its snapshot"):
        read(connection, objects=False)


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_a_producer_that_hangs_up_at_once_is_asked_again_with_growing_pauses(read: Any) -> None:
    with serving(everything, Behaviour(0, [1] * 4)) as connection:
        started = time.monotonic()
        assert sorted(read(connection, objects=True)) == ALL
        assert time.monotonic() - started >= 0.05 / 2


def behind_a_gateway(port: int) -> dict[str, Any]:
    """The inner address cannot be reached from here; the outer one is how we reached the node."""
    outside = {"hostname": "127.0.0.1", "ports": {"kv": port, "kvSSL": port}}
    inside = {"hostname": "127.1.2.3", "services": {"kv": 1, "kvSSL": 1}}
    return {**inside, "alternateAddresses": {"external": outside}}


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("query", ["", "?network=external"], ids=["by itself", "as told"])
def test_a_cluster_behind_a_gateway_is_read_by_its_alternate_addresses(read: Any, query: str) -> None:
    with serving(everything, Behaviour(), describe=behind_a_gateway) as connection:
        assert sorted(read(connection + query, objects=True)) == ALL


def test_network_default_uses_the_inner_addresses() -> None:
    with (
        serving(everything, Behaviour(), describe=behind_a_gateway) as connection,
        connect(connection + "?network=default") as db,
    ):
        db.operations.options = replace(db.options, request_timeout_s=0.1)  # it is tried so long
        with pytest.raises(ConnectFailed, match=r"127\.1\.2\.3:1"):
            db.manifest()
