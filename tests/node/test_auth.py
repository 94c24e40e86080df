"""Logging in: SASL over a real socket, the users file, clear passwords, TLS and client certificates."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.node.front_node import UPRIVER, Served, free_port, make_certificates, serve, tls_arguments
from tests.node.raw import ALL, Raw
from upriver.errors import ConfigError, Status
from upriver.node.access import auth as node_auth
from upriver.node.access import users
from upriver.protocol.scram import SCRAM_MECHANISMS, ScramClient, encode_plain
from upriver.wire import Frame, Opcode
from upriver.wire.constants import OpenFlag
from upriver.wire.messages import dcp, kv, session
from upriver.wire.messages.session import SaslAuth

S = Status


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("auth") / "data", username="ann", password="secret") as served:
        yield served


@pytest.fixture
def raw(node: Served) -> Iterator[Raw]:
    with Raw(node.kv_port) as connection:
        connection.hello(*ALL)
        yield connection


def auth(raw: Raw, mechanism: str, value: bytes) -> Frame:
    return raw.ask(SaslAuth(mechanism.encode(), value))


def step(raw: Raw, mechanism: str, value: bytes) -> Frame:
    frame = SaslAuth(mechanism.encode(), value).frame()
    frame.opcode = Opcode.SASL_STEP
    return raw.ask(frame.encode())


def scram(raw: Raw, mechanism: str, username: str, password: str) -> tuple[Status, ScramClient, bytes]:
    """Run a whole exchange; returns the last status, the client, and the server's final message."""
    client = ScramClient(mechanism, username, password, "spaces are allowed")
    challenge = auth(raw, mechanism, client.first())
    assert challenge.specific == S.AUTH_CONTINUE
    final = step(raw, mechanism, client.respond(challenge.value))
    return Status(final.specific), client, final.value


def works(raw: Raw) -> bool:
    """Whether this connection may do something, which needs a login."""
    return raw.ask(session.Noop()).specific == S.SUCCESS


def test_mechanisms_are_listed_strongest_first(raw: Raw) -> None:
    listed = raw.ask(session.SaslListMechanisms())
    assert listed.value == b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
def test_scram_checks_the_password_and_proves_the_server(raw: Raw, mechanism: str) -> None:
    assert not works(raw)
    status, client, final = scram(raw, mechanism, "ann", "secret")
    assert status == S.SUCCESS
    client.verify(final)
    assert works(raw)


@pytest.mark.parametrize("mechanism", SCRAM_MECHANISMS)
@pytest.mark.parametrize("username", ["ann", "nobody"])
def test_a_wrong_password_and_an_unknown_user_get_the_same_answer(raw: Raw, mechanism: str, username: str) -> None:
    assert scram(raw, mechanism, username, "wrong")[0] == S.AUTH_ERROR
    assert not works(raw)


def test_an_unknown_user_is_challenged_with_the_same_salt_every_time(raw: Raw) -> None:
    def salt(name: str) -> bytes:
        value = auth(raw, "SCRAM-SHA512", ScramClient("SCRAM-SHA512", name, "x", "0123456789").first()).value
        return value.split(b",s=")[1]

    assert salt("nobody") == salt("nobody") != salt("somebody")
    assert len(salt("nobody")) == len(salt("ann"))


@pytest.mark.parametrize(("value", "status"), [
    (encode_plain("ann", "secret"), S.SUCCESS),
    (encode_plain("ann", "secret", authzid="ann"), S.SUCCESS),
    (encode_plain("ann", "wrong"), S.AUTH_ERROR),
    (encode_plain("nobody", "secret"), S.AUTH_ERROR),
    (encode_plain("", ""), S.AUTH_ERROR),
    (b"ann\0secret", S.EINVAL),
    (b"\xff\0\xff\0\xff", S.EINVAL),
])  # fmt: skip
def test_plain(raw: Raw, value: bytes, status: Status) -> None:
    assert auth(raw, "PLAIN", value).specific == status
    assert works(raw) == (status == S.SUCCESS)


@pytest.mark.parametrize(("mechanism", "value", "status"), [
    ("CRAM-MD5", b"x", S.AUTH_ERROR),
    ("SCRAM-SHA512", b"garbage", S.EINVAL),
    ("SCRAM-SHA512", b"", S.EINVAL),
])  # fmt: skip
def test_nonsense_is_refused_and_the_connection_stays(raw: Raw, mechanism: str, value: bytes, status: Status) -> None:
    assert auth(raw, mechanism, value).specific == status
    assert scram(raw, "SCRAM-SHA1", "ann", "secret")[0] == S.SUCCESS


def test_a_sasl_step_without_sasl_auth_is_refused(raw: Raw) -> None:
    assert step(raw, "SCRAM-SHA512", b"c=biws,r=x,p=AAAA").specific == S.EINVAL


def test_a_proof_cannot_be_used_twice(raw: Raw) -> None:
    client = ScramClient("SCRAM-SHA1", "ann", "secret", "0123456789")
    proof = client.respond(auth(raw, "SCRAM-SHA1", client.first()).value)
    assert step(raw, "SCRAM-SHA1", proof).specific == S.SUCCESS
    assert step(raw, "SCRAM-SHA1", proof).specific == S.EINVAL


def test_before_login_only_the_handshake_is_answered(raw: Raw) -> None:
    assert raw.ask(session.GetErrorMap(2)).specific == S.SUCCESS
    for request in (session.SelectBucket(b"default"), kv.Get(b"k"), session.Stat(b""), session.ListBuckets()):
        assert raw.ask(request).specific == S.EACCESS


def test_the_user_can_be_changed_but_not_on_a_dcp_connection(raw: Raw) -> None:
    assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.SUCCESS
    assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.SUCCESS
    raw.bucket()
    assert raw.ask(dcp.Open(0, OpenFlag.PRODUCER, b"test-auth")).specific == S.SUCCESS
    assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.NOT_SUPPORTED


def test_a_failed_attempt_to_change_the_user_ends_the_login(raw: Raw) -> None:
    assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.SUCCESS
    assert scram(raw, "SCRAM-SHA256", "bob", "guess")[0] == S.AUTH_ERROR
    assert not works(raw)
    assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.SUCCESS
    assert works(raw)


def test_a_clear_password_is_refused_without_tls_if_the_operator_says_so(tmp_path: Path) -> None:
    arguments = ("--no-plain",)
    with (
        serve(tmp_path / "data", *arguments, username="ann", password="secret") as served,
        Raw(served.kv_port) as raw,
    ):
        raw.hello(*ALL)
        assert b"PLAIN" not in raw.ask(session.SaslListMechanisms()).value
        assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.AUTH_ERROR
        assert scram(raw, "SCRAM-SHA256", "ann", "secret")[0] == S.SUCCESS


@pytest.mark.parametrize(("peer", "is_open"), [
    ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("10.0.0.5", False), ("fe80::1%eth0", False), ("", False),
])  # fmt: skip
def test_without_users_only_this_machine_needs_no_login(tmp_path: Path, peer: str, is_open: bool) -> None:
    transport = SimpleNamespace(get_extra_info=lambda _: (peer, 1) if peer else None)
    conn: Any = SimpleNamespace(transport=transport, node=SimpleNamespace(users=users.Users(tmp_path / "users.json")))
    assert node_auth.is_open(conn) == is_open


# ---------------------------------------------------------------------------------------------- the users file


def upriver(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UPRIVER, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_users_added_on_the_command_line_may_log_in_while_the_node_runs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = upriver("user", "add", "bob", "--data", str(data), "--password-stdin", stdin="one\n")
    assert first.returncode == 0, first.stderr
    with serve(data) as served, Raw(served.kv_port) as raw:
        raw.hello(*ALL)
        assert not works(raw)
        assert scram(raw, "SCRAM-SHA512", "bob", "one")[0] == S.SUCCESS
        upriver("user", "add", "cem, the = one", "--data", str(data), "--password-stdin", stdin="two\n")
        assert scram(raw, "SCRAM-SHA512", "cem, the = one", "two")[0] == S.SUCCESS
        upriver("user", "add", "bob", "--data", str(data), "--password-stdin", stdin="changed\n")
        assert scram(raw, "SCRAM-SHA512", "bob", "one")[0] == S.AUTH_ERROR
        assert scram(raw, "SCRAM-SHA512", "bob", "changed")[0] == S.SUCCESS
        assert upriver("user", "list", "--data", str(data)).stdout == "bob\ncem, the = one\n"
        assert upriver("user", "remove", "bob", "--data", str(data)).returncode == 0
        assert upriver("user", "remove", "cem, the = one", "--data", str(data)).returncode == 0
        assert scram(raw, "SCRAM-SHA512", "bob", "changed")[0] == S.AUTH_ERROR
        with Raw(served.kv_port) as new:  # without a user left, the node stays closed
            new.hello(*ALL)
            assert not works(new)


def test_the_users_file_has_no_password_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    assert users.add_user(path, "ann", "unmistakable", iterations=10)
    assert not users.add_user(path, "ann", "unmistakable", iterations=10)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "unmistakable" not in path.read_text()
    content = json.loads(path.read_text())
    assert set(content["users"]["ann"]) == set(SCRAM_MECHANISMS)
    salts = {each["salt"] for each in content["users"]["ann"].values()}
    assert len(salts) == 3


def test_a_file_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    for content in ("not json", "[]", '{"version": 1, "users": {"ann": 5}}', '{"version": 99, "users": {}}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"users\.json"):
            users.add_user(path, "ann", "x", iterations=10)
        assert path.read_text() == content


@pytest.mark.parametrize("name", ["", "x" * 129, "a\0b", "a\nb"])
def test_names_that_no_mechanism_can_carry_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="user name"):
        users.add_user(tmp_path / "users.json", name, "x", iterations=10)


def test_a_refused_command_says_why_and_fails(tmp_path: Path) -> None:
    missing = upriver("user", "remove", "nobody", "--data", str(tmp_path))
    assert missing.returncode == 1
    assert "no user 'nobody'" in missing.stderr
    silent = upriver("user", "add", "ann", "--data", str(tmp_path), stdin="secret\n")
    assert "use --password-stdin" in silent.stderr
    assert "there is no directory" in upriver("user", "list", "--data", str(tmp_path / "misspelt")).stderr
    empty = upriver("user", "add", "ann", "--data", str(tmp_path), "--password-stdin", stdin="\n")
    assert "empty" in empty.stderr


# ---------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"), "ann", "nobody")


@pytest.fixture(scope="module")
def tls_port(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    data = tmp_path_factory.mktemp("tls-node") / "data"
    arguments = [*tls_arguments(certificates, port), "--no-plain"]
    with serve(data, *arguments, username="ann", password="secret"):
        yield port


def tls(port: int, certificates: Path, client: str = "") -> Raw:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if client:
        context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
    raw = Raw(port)
    raw.socket = context.wrap_socket(raw.socket, server_hostname="127.0.0.1")
    raw.hello(*ALL)
    return raw


def test_over_tls_a_clear_password_is_accepted(tls_port: int, certificates: Path) -> None:
    with tls(tls_port, certificates) as raw:
        assert not works(raw)
        assert b"PLAIN" in raw.ask(session.SaslListMechanisms()).value
        assert auth(raw, "PLAIN", encode_plain("ann", "secret")).specific == S.SUCCESS
        assert works(raw)


def test_a_certificate_logs_in_the_user_whom_it_names(tls_port: int, certificates: Path) -> None:
    with tls(tls_port, certificates, "ann") as raw:
        assert works(raw)
    with tls(tls_port, certificates, "nobody") as raw:
        assert not works(raw)
        assert scram(raw, "SCRAM-SHA512", "ann", "secret")[0] == S.SUCCESS


def test_unusable_tls_files_stop_the_node_with_a_clear_message(tmp_path: Path) -> None:
    failed = upriver(
        "serve", "--data", str(tmp_path / "d"), "--kv-port", "0", "--vbuckets", "4", "--tls-port", "0",
        "--certificate", "nothing.pem", "--private-key", "nothing.key",
    )  # fmt: skip
    assert failed.returncode == 1
    assert "nothing.pem" in failed.stderr
    assert "Traceback" not in failed.stderr
