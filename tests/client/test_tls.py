"""TLS: the server is checked, a client certificate is a login, and without TLS no password is sent."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upriver
from tests.client.loopback_dns import name_server
from tests.support.scripted_server import SEQNOS, VBUCKETS, Behaviour, everything, serving
from upriver.client.blocking import connect
from upriver.errors import ConfigError, ConnectFailed
from upriver.testing import RunningNode, node


def openssl(at: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=at, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates by it for the server, the client ``ada`` and another host; and a forged one."""
    at = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(at, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    for name, names in (("server", "IP:127.0.0.1,DNS:localhost"), ("ada", "DNS:ada"), ("elsewhere", "DNS:elsewhere")):
        (at / "extensions").write_text(f"subjectAltName={names}\n")
        openssl(at, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
        openssl(at, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    openssl(at, "req", "-x509", *key, "-keyout", "forged.key", "-out", "forged.pem", "-subj", "/CN=ada", "-days", "2")
    return at


def server_context(certificates: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[tuple[RunningNode, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    files = {"certificate": certificates / "server.pem", "private_key": certificates / "server.key"}
    options = {"tls_port": port, "client_ca": certificates / "ca.pem", "username": "ada", "password": "lovelace"}
    with node(vbuckets=4, lazy=True, **files, **options) as running:
        yield running, f"couchbases://127.0.0.1:{port}"


def test_documents_and_changes_travel_encrypted(secure: tuple[RunningNode, str], certificates: Path) -> None:
    login = {"username": "ada", "password": "lovelace", "ca_file": str(certificates / "ca.pem")}
    with connect(secure[1], **login) as db:
        for first in range(0, 2000, 500):
            db.set_many({b"tls:%d" % n: b"x" * 2000 for n in range(first, first + 500)})
        assert sum(batch.num_rows for batch in db.change_batches(end="now")) >= 2000

    async def read() -> int:
        async with upriver.aio.connect(secure[1], **login) as db:
            return len([change async for change in db.changes(end="now")])

    assert asyncio.run(read()) >= 2000


def test_a_client_certificate_is_a_login(secure: tuple[RunningNode, str], certificates: Path) -> None:
    files = {"ca_file": "ca.pem", "client_cert": "ada.pem", "client_key": "ada.key"}
    with connect(secure[1], **{name: str(certificates / file) for name, file in files.items()}) as db:
        db.set("by certificate", b"1")
        assert db.get("by certificate").value == b"1"


def test_an_untrusted_client_certificate_is_not_a_login(secure: tuple[RunningNode, str], certificates: Path) -> None:
    files = {"ca_file": "ca.pem", "client_cert": "forged.pem", "client_key": "forged.key"}
    given = {name: str(certificates / file) for name, file in files.items()}

    async def read() -> None:
        async with upriver.aio.connect(secure[1], **given):
            raise AssertionError

    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1"):
        connect(secure[1], **given)
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1"):
        asyncio.run(read())


def test_a_server_with_the_certificate_of_another_host_is_refused(certificates: Path) -> None:
    tls = server_context(certificates, "elsewhere")
    refused = pytest.raises(ConnectFailed, match="IP address mismatch")
    with serving(everything, Behaviour(), tls=tls) as connection, refused:
        connect(connection, ca_file=str(certificates / "ca.pem"))


def test_alternate_addresses_have_tls_ports_too(certificates: Path) -> None:
    def describe(port: int) -> dict[str, Any]:
        outside = {"hostname": "127.0.0.1", "ports": {"kvSSL": port}}
        return {"hostname": "127.1.2.3", "services": {"kv": 1, "kvSSL": 1}, "alternateAddresses": {"external": outside}}

    tls, ca_file = server_context(certificates, "server"), str(certificates / "ca.pem")
    gateway = serving(everything, Behaviour(13), describe=describe, tls=tls)
    with gateway as connection, connect(connection, ca_file=ca_file) as db:
        assert len(list(db.changes(end=dict.fromkeys(range(VBUCKETS), SEQNOS)))) == VBUCKETS * SEQNOS


def test_a_secure_cluster_is_found_by_its_name(secure: tuple[RunningNode, str], certificates: Path) -> None:
    port = int(secure[1].rpartition(":")[2])
    login = {"username": "ada", "password": "lovelace", "ca_file": str(certificates / "ca.pem")}
    records = {"_couchbases._tcp.cluster.test": [(0, 0, port, "localhost")]}
    with name_server(records) as dns, connect("couchbases://cluster.test", dns_nameserver=dns.address, **login) as db:
        assert db.topology.vbuckets == 4


def test_a_server_without_a_trusted_certificate_is_refused(secure: tuple[RunningNode, str]) -> None:
    with pytest.raises(ConnectFailed, match="certificate verify failed"):
        connect(secure[1], username="ada", password="lovelace")


def test_an_authority_that_cannot_be_read_is_a_config_error(secure: tuple[RunningNode, str]) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        connect(secure[1], ca_file="/no/such/file.pem")


def test_without_tls_the_password_is_proved_not_sent(secure: tuple[RunningNode, str]) -> None:
    with connect(secure[0].connection_string, username="ada", password="lovelace") as db:
        assert db.topology.vbuckets == 4
