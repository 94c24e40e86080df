"""The client's handshake: what it asks, in which order, and what a refusal becomes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.scripted_producer import ScriptedProducer
from upriver.errors import AccessDenied, AuthenticationFailed, ConfigError, RemoteProtocolError, Status, StatusError
from upriver.protocol.scram import Mechanism, ScramClient, ScramServer, derive_credentials
from upriver.protocol.session import Credentials, FeedSettings, Session
from upriver.wire import Message, Opcode, OtherResponse
from upriver.wire.messages.dcp import DcpControl
from upriver.wire.messages.session import SaslAuth, ValueResponse


def scram(mechanism: str, username: str, password: str) -> ScramClient:
    return ScramClient(mechanism, username, password, "client-nonce")


class Server(ScriptedProducer):
    """Says yes to everything except the opcodes in ``refuse``; proves passwords with SCRAM."""

    def __init__(self, mechanisms: str = "SCRAM-SHA512 PLAIN", refuse: dict[int, Status] | None = None) -> None:
        super().__init__(b"{}")
        self.mechanisms, self.refuse = mechanisms, refuse or {}
        self.scram: ScramServer | None = None

    def run(self, session: Session) -> None:
        messages = session.start()
        while messages:
            [message] = messages
            [answer] = self.take(message)
            messages = session.receive(answer)

    def _answer(self, message: Message) -> Iterator[Message]:
        if message.opcode in self.refuse:
            yield OtherResponse(message.opcode, status=self.refuse[message.opcode], value=b"because")
        elif message.opcode == Opcode.SASL_LIST_MECHS:
            yield ValueResponse.under(Opcode.SASL_LIST_MECHS)(self.mechanisms.encode())
        elif isinstance(message, SaslAuth) and message.mechanism.startswith(b"SCRAM"):
            yield self.prove(message)
        else:
            yield from super()._answer(message)

    def prove(self, message: SaslAuth) -> Message:
        answer = ValueResponse.under(message.opcode)
        if message.opcode == Opcode.SASL_AUTH:
            mechanism = Mechanism(message.mechanism.decode())
            known = derive_credentials(mechanism, "lovelace", b"salt-salt-salt", 4096)
            self.scram = ScramServer(mechanism, known, "server-nonce")
            return answer(self.scram.challenge(message.value), status=Status.AUTH_CONTINUE)
        assert self.scram is not None
        try:
            return answer(self.scram.finish(message.value))
        except AuthenticationFailed:
            return OtherResponse(message.opcode, status=Status.AUTH_ERROR)

    @property
    def opcodes(self) -> list[int]:
        return [message.opcode for message in self.seen]


def session(password: str = "", feed: FeedSettings | None = None, *, allow_plain: bool = False) -> Session:
    credentials = Credentials("ada" if password else "", password, allow_plain)
    return Session("test", credentials, "default", scram, feed)


def test_without_a_user_there_is_no_authentication() -> None:
    server, ours = Server(), session()
    server.run(ours)
    assert server.opcodes == [Opcode.HELLO, Opcode.SELECT_BUCKET, Opcode.GET_CLUSTER_CONFIG]
    assert ours.done
    assert ours.config == b"{}"


@pytest.mark.parametrize(
    ("offered", "strongest"),
    [("PLAIN SCRAM-SHA1 SCRAM-SHA512", b"SCRAM-SHA512"), ("SCRAM-SHA1 SCRAM-SHA256", b"SCRAM-SHA256"),
     ("SCRAM-SHA1 PLAIN", b"SCRAM-SHA1")],
)  # fmt: skip
def test_the_strongest_mechanism_is_used_and_the_password_never_sent(offered: str, strongest: bytes) -> None:
    server = Server(offered)
    server.run(session("lovelace"))
    used = {message.mechanism for message in server.seen if isinstance(message, SaslAuth)}
    assert used == {strongest}
    assert not any(b"lovelace" in message.encode() for message in server.seen)


def test_a_wrong_password_is_said_in_plain_words() -> None:
    with pytest.raises(AuthenticationFailed, match="wrong user name or password"):
        Server().run(session("wrong"))


def test_plain_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(ConfigError, match="PLAIN would send the password in the clear; use couchbases://"):
        Server("PLAIN").run(session("lovelace"))
    server = Server("PLAIN")
    server.run(session("lovelace", allow_plain=True))
    assert SaslAuth(b"PLAIN", b"\0ada\0lovelace") in server.seen


def test_noop_comes_before_everything_else_of_a_feed() -> None:
    server = Server()
    server.run(session(feed=FeedSettings("name", noop_interval_s=0.5, compressed=True, controls=(("x", "y", False),))))
    controls = [(m.key, m.value) for m in server.seen if isinstance(m, DcpControl)]
    assert controls[:2] == [(b"enable_noop", b"true"), (b"set_noop_interval", b"0.5")]
    assert (b"force_value_compression", b"true") in controls
    assert server.opcodes.index(Opcode.DCP_OPEN) < server.opcodes.index(Opcode.DCP_CONTROL)


def test_an_optional_control_may_be_refused_a_required_one_not() -> None:
    optional, required = ((("x", "y", needed),) for needed in (False, True))

    class Picky(Server):
        def _answer(self, message: Message) -> Iterator[Message]:
            if isinstance(message, DcpControl) and message.key == b"x":
                yield OtherResponse(message.opcode, status=Status.EINVAL)
            else:
                yield from super()._answer(message)

    Picky().run(session(feed=FeedSettings("name", controls=optional)))
    with pytest.raises(StatusError, match="cannot set x=y"):
        Picky().run(session(feed=FeedSettings("name", controls=required)))


def test_a_refused_bucket_is_named() -> None:
    with pytest.raises(AccessDenied, match="cannot select bucket 'default': because"):
        Server(refuse={Opcode.SELECT_BUCKET: Status.EACCESS}).run(session())


def test_a_server_that_skips_the_proof_is_found_out() -> None:
    class Impostor(Server):
        def prove(self, message: SaslAuth) -> Message:
            return ValueResponse.under(message.opcode)(b"welcome")

    with pytest.raises(RemoteProtocolError, match="too early"):
        Impostor().run(session("lovelace"))
