"""The client's half of a handshake, until it may ask for documents or open streams.

HELLO, authentication, bucket, for a feed DCP_OPEN and its controls, then the cluster map; one request at a time. Pure:
responses go in, messages come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    Status,
    StatusError,
)
from upriver.protocol.scram import SCRAM_MECHANISMS, encode_plain
from upriver.wire.constants import Feature, Opcode, OpenFlag
from upriver.wire.message import Message, OtherResponse, Response
from upriver.wire.messages.cluster import GetClusterConfig
from upriver.wire.messages.dcp import DcpControl, Open
from upriver.wire.messages.session import Hello, HelloResponse, SaslAuth, SaslListMechanisms, SelectBucket

KV_FEATURES = (
    Feature.TCP_NODELAY, Feature.MUTATION_SEQNO, Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON,
    Feature.ALT_REQUEST, Feature.COLLECTIONS,
)  # fmt: skip
FEED_FEATURES = (
    Feature.TCP_NODELAY, Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.ALT_REQUEST,
    Feature.COLLECTIONS, Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Credentials:
    username: str = ""
    password: str = field(default="", repr=False)
    allow_plain: bool = False  # PLAIN sends the password itself: only over TLS, or on request


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What a feed connection is opened with."""

    name: str
    flags: OpenFlag = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
    buffer_bytes: int = 20 * 1024 * 1024
    noop_interval_s: float = 20
    compressed: bool = False  # ask for compressed values
    controls: tuple[tuple[str, str, bool], ...] = ()  # name, value, required


class ClientScram(Protocol):
    """The client end of a SCRAM exchange, as the session needs it."""

    def first(self) -> bytes: ...
    def respond(self, server_first: bytes) -> bytes: ...
    def verify(self, server_final: bytes) -> None: ...


MakeScram = Callable[[str, str, str], ClientScram]
Step = Iterator[Message]


class Session:
    """Runs the handshake: ``start`` gives the first message, ``receive`` takes each response in turn.

    When ``done`` is true, ``features`` are on and ``config`` holds the cluster map's JSON (None without a bucket).
    """

    def __init__(
        self,
        agent: str,
        credentials: Credentials,
        bucket: str,
        make_scram: MakeScram,
        feed: FeedSettings | None = None,
    ) -> None:
        self.agent, self.credentials, self.bucket, self.feed = agent, credentials, bucket, feed
        self.features: frozenset[int] = frozenset()
        self.config: bytes | None = None
        self.done = False
        self._make_scram = make_scram
        self._script = self._run()
        self._awaiting: Message | None = None
        self._response: Response | None = None

    @property
    def collections(self) -> bool:
        return Feature.COLLECTIONS in self.features

    def start(self) -> list[Message]:
        return self._next()

    def receive(self, response: Response) -> list[Message]:
        """The messages to send next; raises the error if a step was refused."""
        if self._awaiting is None:
            raise LocalProtocolError("the handshake is over")
        if response.opaque != self._awaiting.opaque:
            raise RemoteProtocolError("this does not answer any request", "opaque", 12)
        self._response = response
        return self._next()

    def _next(self) -> list[Message]:
        self._awaiting = next(self._script, None)
        if self._awaiting is None:
            self.done = True
            return []
        return [self._awaiting]

    def _run(self) -> Step:
        yield Hello(f'{{"a":"{self.agent}"}}'.encode(), self._features())
        answer = self._answer("HELLO")
        self.features = frozenset(answer.features) if isinstance(answer, HelloResponse) else frozenset()
        if self.credentials.username:
            yield from self._authenticate()
        if self.bucket:
            yield SelectBucket(self.bucket.encode())
            self._answer(f"select bucket {self.bucket!r}")
        if self.feed:
            yield from self._open_feed(self.feed)
        if self.bucket:
            yield GetClusterConfig()
            config = self._answer("get the cluster map")
            self.config = getattr(config, "value", b"")

    def _features(self) -> tuple[int, ...]:
        if self.feed is None:
            return KV_FEATURES
        return (*FEED_FEATURES, Feature.SNAPPY) if self.feed.compressed else FEED_FEATURES

    def _authenticate(self) -> Step:
        yield SaslListMechanisms()
        offered = getattr(self._answer("list SASL mechanisms"), "value", b"").decode("ascii", "replace").split()
        best = next((m for m in SCRAM_MECHANISMS if m in offered), None)
        if best:
            yield from self._scram(best)
        elif "PLAIN" in offered and self.credentials.allow_plain:
            yield SaslAuth(b"PLAIN", encode_plain(self.credentials.username, self.credentials.password))
            self._answer("authenticate")
        else:
            raise ConfigError(
                f"the server offers {' '.join(offered) or 'nothing'}: no SCRAM, and PLAIN would send the password "
                "in the clear; use couchbases:// (TLS) or set allow_plain"
            )

    def _scram(self, mechanism: str) -> Step:
        scram = self._make_scram(mechanism, self.credentials.username, self.credentials.password)
        yield SaslAuth(mechanism.encode(), scram.first())
        challenge = self._answer("authenticate", Status.AUTH_CONTINUE)
        yield SaslAuth.under(Opcode.SASL_STEP)(mechanism.encode(), scram.respond(getattr(challenge, "value", b"")))
        scram.verify(getattr(self._answer("authenticate"), "value", b""))

    def _open_feed(self, feed: FeedSettings) -> Step:
        yield Open(0, feed.flags, feed.name.encode())
        self._answer("open the DCP connection")
        # Noop first: without it, collection and xattr streams are refused (docs/protocol/stream-request.md#checks,
        # step 10).
        wanted = [
            ("enable_noop", "true", True),
            ("set_noop_interval", f"{feed.noop_interval_s:g}", True),
            ("connection_buffer_size", str(feed.buffer_bytes), True),
            ("set_priority", "high", False),
            *feed.controls,
        ]
        if feed.compressed:
            wanted.append(("force_value_compression", "true", False))
        for name, value, required in wanted:
            yield DcpControl(name.encode(), value.encode())
            if required:
                self._answer(f"set {name}={value}")

    def _answer(self, doing: str, wanted: Status = Status.SUCCESS) -> Response:
        response = self._response
        if response is None:
            raise LocalProtocolError("no response yet")
        if response.status != wanted:
            if response.status == Status.EACCESS and not self.credentials.username:
                reason = _detail(response) or "the server requires a login"
                raise AccessDenied(f"cannot {doing}: {reason} (no username was given)")
            raise _refused(response, doing)
        return response


def _refused(response: Response, doing: str) -> Exception:
    if response.status == Status.AUTH_ERROR:
        return AuthenticationFailed("wrong user name or password")
    if response.status == Status.SUCCESS:
        return RemoteProtocolError(f"cannot {doing}: the server reported success too early", "status", 6)
    detail = _detail(response)
    return StatusError.of(response.status, f"cannot {doing}{': ' + detail if detail else ''}")


def _detail(response: Response) -> str:
    """The server's error text, or the beginning of whatever it sent."""
    if not isinstance(response, OtherResponse):
        return ""
    return response.context() or response.value[:200].decode("utf-8", "replace")


def config_json(raw: bytes) -> Any:
    """The JSON of a cluster config; ``RemoteProtocolError`` if it is not JSON."""
    import orjson

    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RemoteProtocolError(f"the cluster config is not JSON: {error}", "value") from error
