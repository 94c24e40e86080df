"""SCRAM against the transcripts in the RFCs, against itself, and against malicious peers."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.errors import AuthenticationFailed, LocalProtocolError, RemoteProtocolError
from upriver.protocol import scram
from upriver.protocol.scram import ScramClient, ScramServer

RFC = {  # RFC 5802 section 5 and RFC 7677 section 3: user "user", password "pencil"
    "SCRAM-SHA1": (
        "fyko+d2lbbFgONRv9qkxdawL",
        b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    "SCRAM-SHA256": (
        "rOprNGfwEbeRWgbNEkqO",
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
}
MECHANISMS = list(scram.SCRAM_MECHANISMS)
CLIENT_NONCE = "a nonce with spaces"


def pair(
    mechanism: str = "SCRAM-SHA512", username: str = "ann", password: str = "pw", known: str = "pw"
) -> tuple[ScramClient, ScramServer]:
    credentials = scram.derive_credentials(mechanism, known, b"some salt", scram.MIN_ITERATIONS)
    return ScramClient(mechanism, username, password, CLIENT_NONCE), ScramServer(mechanism, credentials, "of-server")


@pytest.mark.parametrize("mechanism", list(RFC))
def test_client_writes_the_transcript_of_the_rfc(mechanism: str) -> None:
    nonce, server_first, client_final, server_final = RFC[mechanism]
    client = ScramClient(mechanism, "user", "pencil", nonce)
    assert client.first() == f"n,,n=user,r={nonce}".encode()
    assert client.respond(server_first) == client_final
    client.verify(server_final)


@pytest.mark.parametrize("mechanism", list(RFC))
def test_server_writes_the_transcript_of_the_rfc(mechanism: str) -> None:
    nonce, server_first, client_final, server_final = RFC[mechanism]
    both, salt, _ = server_first.decode().split(",", 2)
    credentials = scram.derive_credentials(mechanism, "pencil", base64.b64decode(salt[2:]), 4096)
    server = ScramServer(mechanism, credentials, both.removeprefix(f"r={nonce}"))
    assert server.challenge(f"n,,n=user,r={nonce}".encode()) == server_first
    assert server.finish(client_final) == server_final


@pytest.mark.parametrize("mechanism", MECHANISMS)
@settings(max_examples=examples(25), deadline=None)
@given(username=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), password=st.text())
def test_any_name_and_password_agree_with_themselves(mechanism: str, username: str, password: str) -> None:
    client, server = pair(mechanism, username, password, known=password)
    assert scram.client_name(client.first()) == username
    client.verify(server.finish(client.respond(server.challenge(client.first()))))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_server_refuses_a_wrong_password(mechanism: str) -> None:
    client, server = pair(mechanism, password="wrong")
    with pytest.raises(AuthenticationFailed):
        server.finish(client.respond(server.challenge(client.first())))


def test_client_refuses_a_server_that_does_not_know_the_password() -> None:
    client, server = pair()
    client.respond(server.challenge(client.first()))
    liar = base64.b64encode(b"\0" * 64).decode()
    with pytest.raises(AuthenticationFailed, match="signature is wrong"):
        client.verify(f"v={liar}".encode())


def test_client_reports_what_the_server_says_is_wrong() -> None:
    client, server = pair()
    client.respond(server.challenge(client.first()))
    with pytest.raises(AuthenticationFailed, match="invalid-proof"):
        client.verify(b"e=invalid-proof")


@given(at=st.integers(0, 10_000), change=st.integers(1, 255))
@settings(max_examples=examples(60), deadline=None)
def test_one_changed_byte_of_the_proof_is_refused(at: int, change: int) -> None:
    client, server = pair()
    final = bytearray(client.respond(server.challenge(client.first())))
    final[at % len(final)] ^= change
    with pytest.raises((AuthenticationFailed, RemoteProtocolError)):
        server.finish(bytes(final))


def test_a_proof_has_only_one_spelling() -> None:
    client, server = pair()
    final = client.respond(server.challenge(client.first()))
    assert final.endswith(b"==")
    other = final[:-3] + bytes([final[-3] + 1]) + b"=="  # differs only in bits that base64 throws away
    with pytest.raises(RemoteProtocolError):
        server.finish(other)


@pytest.mark.parametrize("first", [
    pytest.param(b"", id="nothing"),
    pytest.param(b"p=tls-unique,,n=ann,r=0123456789", id="channel binding"),
    pytest.param(b"n,,n=ann", id="no nonce"),
    pytest.param(b"n,,r=0123456789", id="no name"),
    pytest.param(b"n,,n=,r=0123456789", id="empty name"),
    pytest.param(b"n,,n=a=b,r=0123456789", id="name that is not escaped"),
    pytest.param(b"n,,n=ann,r=0123", id="short nonce"),
    pytest.param(b"n,,n=ann,r=0123456789\x01", id="nonce with a control character"),
    pytest.param(b"n,,m=x,n=ann,r=0123456789", id="mandatory extension"),
    pytest.param(b"n,,n=ann,n=bob,r=0123456789", id="name twice"),
    pytest.param(b"n,,n=\xff,r=0123456789", id="not UTF-8"),
])  # fmt: skip
def test_server_refuses_a_first_message_that_breaks_the_grammar(first: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        pair()[1].challenge(first)


@pytest.mark.parametrize("first", [
    pytest.param(b"r=a nonce with spacesX,s=AAAA", id="no iterations"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=0", id="no iteration at all"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=999999999999", id="iterations without end"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=-5", id="negative iterations"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=1", id="so few that the password could be guessed"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=3999", id="fewer than any server's default"),
    pytest.param(b"r=a nonce with spacesX,s=AAAA,i=1000001", id="so many that we would be busy with them"),
    pytest.param(b"r=a nonce with spacesX,s=?,i=4096", id="salt is not base64"),
    pytest.param(b"r=another nonce,s=AAAA,i=4096", id="another nonce"),
    pytest.param(b"r=a nonce with spaces,s=AAAA,i=4096", id="nonce without the server's part"),
])  # fmt: skip
def test_client_refuses_a_challenge_that_makes_no_sense(first: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        pair()[0].respond(first)


@pytest.mark.parametrize("iterations", [4000, 4096, 15_000])
def test_client_accepts_what_real_servers_ask_for(iterations: int) -> None:
    assert pair()[0].respond(f"r=a nonce with spacesX,s=AAAA,i={iterations}".encode())


@given(st.binary(max_size=80))
def test_garbage_raises_only_errors_that_blame_the_peer(data: bytes) -> None:
    client, server = pair()
    server.challenge(client.first())
    for receive in (server.finish, server.challenge, scram.client_name, scram.decode_plain):
        try:
            receive(data)
        except (RemoteProtocolError, AuthenticationFailed):
            continue


def test_steps_in_the_wrong_order_are_our_own_fault() -> None:
    client, server = pair()
    with pytest.raises(LocalProtocolError):
        client.verify(b"v=AAAA")
    with pytest.raises(LocalProtocolError):
        server.finish(b"c=biws,r=x,p=AAAA")


def test_plain_carries_name_and_password_and_ignores_the_authorization_identity() -> None:
    assert scram.decode_plain(scram.encode_plain("ann", "p=w,")) == ("ann", "p=w,")
    assert scram.decode_plain(b"ann\0ann\0pw") == ("ann", "pw")
    with pytest.raises(RemoteProtocolError):
        scram.decode_plain(b"ann\0pw")


def test_a_clear_password_is_checked_against_salted_credentials() -> None:
    known = scram.derive_credentials("SCRAM-SHA256", "pw", b"salt", 5)
    assert scram.password_matches("SCRAM-SHA256", known, "pw")
    assert not scram.password_matches("SCRAM-SHA256", known, "pW")
