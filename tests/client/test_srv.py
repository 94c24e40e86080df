"""A cluster found by its name in DNS, from a name server on this machine."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

import upriver
from tests.client.loopback_dns import name_server
from upriver.client.blocking import connect
from upriver.client.options import ConnectOptions
from upriver.client.srv import srv_seeds
from upriver.errors import ConfigError
from upriver.protocol.topology import Address
from upriver.testing import RunningNode

PLAIN, TLS = "_couchbase._tcp.cluster.test", "_couchbases._tcp.cluster.test"


def seeds(connection: str, nameserver: str, **options: object) -> tuple[Address, ...]:
    return srv_seeds(ConnectOptions.parse(connection, dns_nameserver=nameserver, **options))


def test_a_name_without_a_port_is_looked_up_and_the_cluster_is_read(
    server: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read() -> bytes:
        async with upriver.aio.connect("couchbase://cluster.test") as db:
            return (await db.get("by name")).value

    with name_server({PLAIN: [(0, 0, server.kv_port, "localhost")]}) as dns:
        monkeypatch.setenv("UPRIVER_DNS_NAMESERVER", dns.address)
        with connect("couchbase://cluster.test") as db:
            db.set("by name", b"1")
        assert asyncio.run(read()) == b"1"
        assert dns.asked == [PLAIN, PLAIN]


def test_records_are_tried_by_priority() -> None:
    records = [(20, 0, 3, "third"), (10, 0, 1, "first"), (15, 9, 2, "second")]
    with name_server({PLAIN: records}) as dns:
        found = seeds("couchbase://cluster.test", dns.address)
        assert found == (Address("first", 1), Address("second", 2), Address("third", 3))


def test_a_node_that_is_down_leaves_the_others(server: RunningNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = probe.getsockname()[1]
    records = [(0, 0, closed, "localhost"), (1, 0, server.kv_port, "localhost")]
    with name_server({PLAIN: records}) as dns, connect("couchbase://cluster.test", dns_nameserver=dns.address) as db:
        assert db.topology.vbuckets


def test_tls_has_records_of_its_own() -> None:
    with name_server({PLAIN: [(0, 0, 1, "plain")], TLS: [(0, 0, 2, "secure")]}) as dns:
        assert seeds("couchbases://cluster.test", dns.address) == (Address("secure", 2),)


@pytest.mark.parametrize(
    "text",
    ["couchbase://127.0.0.1", "couchbase://[::1]", "couchbase://localhost", "couchbase://a,b",
     "couchbase://cluster.test:11210", "couchbase://cluster.test?dns_srv=false"],
)  # fmt: skip
def test_an_address_a_port_or_several_hosts_are_not_looked_up(text: str) -> None:
    with name_server({PLAIN: [(0, 0, 1, "other")]}) as dns:
        assert seeds(text, dns.address) == ConnectOptions.parse(text).seeds
        assert dns.asked == []


def test_a_name_that_is_no_service_is_a_host() -> None:
    with name_server({TLS: [(0, 0, 0, "")]}) as dns:
        assert seeds("couchbase://cluster.test", dns.address) == (Address("cluster.test", 11210),)
        assert seeds("couchbases://cluster.test", dns.address) == (Address("cluster.test", 11207),), "not offered"
        assert dns.asked == [PLAIN, TLS]


def test_a_name_server_that_says_nothing_does_not_keep_us_waiting() -> None:
    with name_server({}, answers=False) as dns:
        assert seeds("couchbase://cluster.test", dns.address, connect_timeout_s=0.3)[0].host == "cluster.test"
        assert dns.was_asked.wait(60)


def test_a_name_server_needs_an_address() -> None:
    for wrong in ("not an address", "127.0.0.1:port", "name.test"):
        with pytest.raises(ConfigError, match="dns_nameserver"):
            seeds("couchbase://cluster.test", wrong)


def test_without_dnspython_a_name_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dns.resolver", None)
    options = ConnectOptions.parse("couchbase://cluster.test")
    assert srv_seeds(options) == options.seeds
    with pytest.raises(ConfigError, match=r"upriver\[srv\]"):
        seeds("couchbase://cluster.test", "127.0.0.1")
