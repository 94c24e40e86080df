"""SCRAM against scramp, an independent implementation: each side logs in to the other."""

from __future__ import annotations

import pytest
import scramp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.errors import AuthenticationFailed
from upriver.protocol import scram

THEIR_NAMES = {"SCRAM-SHA1": "SCRAM-SHA-1", "SCRAM-SHA256": "SCRAM-SHA-256", "SCRAM-SHA512": "SCRAM-SHA-512"}
SALT, ITERATIONS = b"sixteen of salt!", 4096
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@pytest.mark.parametrize("mechanism", list(THEIR_NAMES))
@settings(max_examples=examples(10), deadline=None)
@given(username=words, password=words)
def test_our_client_logs_in_at_their_server(mechanism: str, username: str, password: str) -> None:
    theirs = scramp.ScramMechanism(THEIR_NAMES[mechanism])
    known = theirs.make_auth_info(password, iteration_count=ITERATIONS, salt=SALT)
    asked: list[str] = []
    server = theirs.make_server(lambda name: (asked.append(name), known)[1])
    client = scram.ScramClient(mechanism, username, password, "a-client-nonce-of-24-bytes")
    server.set_client_first(client.first().decode())
    server.set_client_final(client.respond(server.get_server_first().encode()).decode())
    client.verify(server.get_server_final().encode())
    assert asked == [username]


@pytest.mark.parametrize("mechanism", list(THEIR_NAMES))
@settings(max_examples=examples(10), deadline=None)
@given(username=words, password=words)
def test_their_client_logs_in_at_our_server(mechanism: str, username: str, password: str) -> None:
    credentials = scram.derive_credentials(mechanism, password, SALT, ITERATIONS)
    server = scram.ScramServer(mechanism, credentials, "nonce-of-the-server-24-byt")
    client = scramp.ScramClient([THEIR_NAMES[mechanism]], username, password, c_nonce="a-client-nonce-of-24-bytes")
    client.set_server_first(server.challenge(client.get_client_first().encode()).decode())
    client.set_server_final(server.finish(client.get_client_final().encode()).decode())


def test_their_client_with_a_wrong_password_is_refused() -> None:
    credentials = scram.derive_credentials("SCRAM-SHA256", "right", SALT, ITERATIONS)
    server = scram.ScramServer("SCRAM-SHA256", credentials, "nonce-of-the-server-24-byt")
    client = scramp.ScramClient(["SCRAM-SHA-256"], "ann", "wrong", c_nonce="a-client-nonce-of-24-bytes")
    client.set_server_first(server.challenge(client.get_client_first().encode()).decode())
    with pytest.raises(AuthenticationFailed):
        server.finish(client.get_client_final().encode())
