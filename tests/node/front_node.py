"""A real ``upriver serve`` process for tests of its front end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

UPRIVER = [sys.executable, "-c", "from upriver.cli import main; main()"]
READY_S = 120


@dataclass(frozen=True)
class Served:
    """Where a node listens, and the user that may log in."""

    kv_port: int
    http_port: int
    data: Path
    username: str = ""
    password: str = ""
    pid: int = 0

    @property
    def connection(self) -> str:
        return f"127.0.0.1:{self.kv_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def http(
        self, path: str, method: str = "GET", form: dict[str, Any] | None = None, auth: tuple[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:  # fmt: skip
        """Status and JSON of a request to the management port."""
        data = urlencode(form).encode() if form is not None else None
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        name, password = auth or (self.username, self.password)
        if name:
            request.add_header("Authorization", "Basic " + b64encode(f"{name}:{password}".encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                body = response.read()
                return response.status, json.loads(body) if body else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@contextmanager
def serve(data: Path, *arguments: str, username: str = "", password: str = "") -> Iterator[Served]:
    """A node on free ports. It must exit with 0; if it does not start, the error message has its log."""
    command = [*UPRIVER, "serve", "--data", str(data), "--kv-port", "0", "--vbuckets", "64", "--lazy", *arguments]
    if username:
        command += ["--username", username, "--password", password]
    with (data.parent / f"{data.name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            ports = _ports(process)
            assert ports, f"the node did not start: {_text(log)}"
            yield Served(ports["ready"], ports["management"], data, username, password, process.pid)
        finally:
            process.terminate()
            code = process.wait(60)
        assert code == 0, _text(log)
        assert "Traceback" not in _text(log), _text(log)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def make_certificates(at: Path, *clients: str) -> Path:
    """A CA, a server certificate for 127.0.0.1, and one for each client, as PEM files in a directory."""
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(at, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (at / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", *clients):
        _openssl(at, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        _openssl(at, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                 "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip
    return at


def tls_arguments(certificates: Path, port: int) -> list[str]:
    files = ["--certificate", str(certificates / "server.pem"), "--private-key", str(certificates / "server.key")]
    return ["--tls-port", str(port), *files, "--client-ca", str(certificates / "ca.pem")]


def _openssl(at: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=at, check=True, capture_output=True)


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


def _ports(process: subprocess.Popen[str]) -> dict[str, int]:
    """What the node prints when it serves: a word, and an address that ends with the port."""
    assert process.stdout is not None
    found: dict[str, int] = {}
    while not {"ready", "management"} <= found.keys():
        line = process.stdout.readline()
        if not line:
            return {}
        word, _, address = line.strip().partition(" ")
        found[word] = int(address.rpartition(":")[2])
    return found
