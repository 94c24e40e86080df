"""TLS: the server is checked, a client certificate is a login, and without TLS no password is sent."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import upriver
from upriver.client.blocking import connect
from upriver.errors import ConfigError, ConnectFailed
from upriver.testing import RunningNode, node


def openssl(at: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=at, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates signed by it for the server and for the client ``ada``."""
    at = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(at, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    (at / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "ada"):
        openssl(at, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
        openssl(at, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return at


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
        async with upriver.connect(secure[1], **login) as db:
            return len([change async for change in db.changes(end="now")])

    assert asyncio.run(read()) >= 2000


def test_a_client_certificate_is_a_login(secure: tuple[RunningNode, str], certificates: Path) -> None:
    files = {"ca_file": "ca.pem", "client_cert": "ada.pem", "client_key": "ada.key"}
    with connect(secure[1], **{name: str(certificates / file) for name, file in files.items()}) as db:
        db.set("by certificate", b"1")
        assert db.get("by certificate").value == b"1"


def test_a_server_that_nobody_vouches_for_is_refused(secure: tuple[RunningNode, str]) -> None:
    with pytest.raises(ConnectFailed, match="certificate verify failed"):
        connect(secure[1], username="ada", password="lovelace")


def test_an_authority_that_cannot_be_read_is_a_config_error(secure: tuple[RunningNode, str]) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        connect(secure[1], ca_file="/no/such/file.pem")


def test_without_tls_the_password_is_proved_not_sent(secure: tuple[RunningNode, str]) -> None:
    with connect(secure[0].connection_string, username="ada", password="lovelace") as db:
        assert db.topology.vbuckets == 4
