"""Trouble with the disk: a full disk is logged, and a wait for the disk ends with its connection."""

from __future__ import annotations

import logging

import pytest

from tests.node.raw import ready
from tests.support.node_thread import eventually
from upriver.errors import Status
from upriver.store import Durability, StoreOptions
from upriver.wire.messages import cluster, kv, session

FULL_SOON = StoreOptions(durability=Durability.LAZY, flush_delay_s=0.01, map_bytes=2 << 20)


def test_a_full_disk_is_in_the_log(make_node, caplog: pytest.LogCaptureFixture):
    node = make_node(store=FULL_SOON, vbuckets=2)
    with caplog.at_level(logging.WARNING), ready(node.port) as raw:
        number = 0
        while raw.ask(kv.Set(key=b"k%d" % number, value=bytes(50_000))).specific == Status.SUCCESS:
            number += 1
        lines = eventually(lambda: [line for line in caplog.messages if line.startswith("event=disk_trouble ")])
    assert len(lines) == 1
    assert "bucket=default" in lines[0]
    assert "data.mdb" in lines[0]


def test_a_wait_for_a_seqno_that_never_comes_ends_with_its_connection(node):
    waits = node.node.buckets.get("default").waits
    for _ in range(3):
        with ready(node.port) as raw:
            raw.send(cluster.SeqnoPersistence(1 << 40))
            eventually(lambda: node.call(lambda: sum(map(len, waits._waiting.values()))) == 1)
        eventually(lambda: not node.call(lambda: sum(map(len, waits._waiting.values()))))
    with ready(node.port) as raw:
        assert raw.ask(session.Noop()).specific == Status.SUCCESS
        assert raw.ask(cluster.SeqnoPersistence(0)).specific == Status.SUCCESS
