"""Login on the KV port: SASL mechanisms, their exchanges, and certificates (docs/protocol/session.md#sasl).

A user who does not exist is answered exactly like one with a wrong password. Hashing a clear password is slow on
purpose and runs in its own thread, so that guessing passwords does not slow other clients. Every wrong guess is logged,
and each is answered later than the one before.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from upriver.errors import AuthenticationFailed, InvalidArguments, NotSupported, RemoteProtocolError, Status
from upriver.node import log
from upriver.node.access.roles import ADMIN
from upriver.node.access.tls import certificate_users
from upriver.node.access.users import Users
from upriver.node.dispatch import command
from upriver.node.options import NodeOptions
from upriver.protocol.scram import SCRAM_MECHANISMS, Mechanism, ScramServer, client_name, decode_plain
from upriver.wire.constants import Opcode
from upriver.wire.messages.session import SaslAuth, SaslListMechanisms

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection


FIRST_DELAY_S = 0.02
LONGEST_DELAY_S = 2.0
FORGET_S = 60.0
MOST_REMEMBERED = 10_000


class Logins:
    """Checks clear passwords, and slows down guessing."""

    def __init__(self) -> None:
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="upriver-login")
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}  # (user, host): how often, and when last

    async def password_is(self, users: Users, name: str, password: str) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._hashing, users.password_is, name, password)

    def close(self) -> None:
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def succeeded(self, user: str, host: str) -> None:
        self._failures.pop((user, host), None)

    async def failed(self, user: str, host: str, how: str) -> None:
        """Log a failed login, and wait longer than after the last one."""
        delay = self.note(user, host, time.monotonic())
        log.warning("login_failed", user=user, peer=host, mechanism=how, answered_after_s=delay)
        await asyncio.sleep(delay)

    def note(self, user: str, host: str, now: float) -> float:
        """Count a failure; returns how long its answer is delayed."""
        count, last = self._failures.pop((user, host), (0, now))
        count = count + 1 if now - last < FORGET_S else 1
        if len(self._failures) >= MOST_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[user, host] = (count, now)
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(count - 1, 30))


class PendingLogin:
    """A SCRAM login between its two steps."""

    def __init__(self, user: str, mechanism: str, server: ScramServer) -> None:
        self.user = user
        self.mechanism = mechanism
        self.server = server


def load(options: NodeOptions) -> Users:
    """The users of a node: those in its data directory, and the one in its options."""
    users = Users(options.data / Users.FILE_NAME)
    if options.username:
        users.add_in_memory(options.username, options.password)
    return users


def user_of_certificate(users: Users, certificate: Mapping[str, Any] | None) -> str | None:
    """The user that a verified client certificate names, if that user exists."""
    return next((name for name in certificate_users(certificate) if name in users), None)


def is_open(conn: ClientConnection) -> bool:
    """Whether this client need not log in: it is on this machine, and there has never been a user."""
    host = str((conn.transport.get_extra_info("peername") or ("",))[0]).partition("%")[0]
    return bool(host) and conn.node.users.empty and ipaddress.ip_address(host).is_loopback


def log_in_without_password(conn: ClientConnection) -> None:
    """Log in a new connection if access is open, or by its certificate."""
    if is_open(conn):
        conn.authenticate("", ADMIN)
    elif conn.tls:
        tls = conn.transport.get_extra_info("ssl_object")
        user = user_of_certificate(conn.node.users, tls.getpeercert() if tls else None)
        if user is not None:
            conn.authenticate(user, conn.node.users.access(user))


def mechanisms(conn: ClientConnection) -> list[Mechanism]:
    """The mechanisms for this connection, strongest first; the node may allow clear passwords only over TLS."""
    plain = [Mechanism.PLAIN] if conn.tls or conn.node.options.plain_without_tls else []
    return [*SCRAM_MECHANISMS, *plain]


def list_mechanisms(conn: ClientConnection, request: SaslListMechanisms) -> None:
    if conn.dcp is not None:
        raise NotSupported("a DCP connection cannot change its user")
    conn.reply(request, value=" ".join(mechanisms(conn)).encode())


async def authenticate(conn: ClientConnection, request: SaslAuth) -> None:
    """SASL_AUTH and SASL_STEP. Any error ends the exchange; the next SASL_AUTH starts another."""
    if conn.dcp is not None:
        raise NotSupported("a DCP connection cannot change its user")
    exchange, conn.sasl = conn.sasl, None
    mechanism = _mechanism(conn, request)
    user = exchange.user if exchange is not None else ""
    try:
        if request.opcode == Opcode.SASL_STEP:
            _finish(conn, request, exchange)
        elif mechanism is Mechanism.PLAIN:
            user, password = decode_plain(request.value)
            await _check_plain(conn, request, user, password)
        else:
            _challenge(conn, request, mechanism)
    except RemoteProtocolError as error:
        raise InvalidArguments(str(error)) from error
    except AuthenticationFailed:
        if not is_open(conn):
            conn.forget_user()  # a failed attempt to change the user ends the old login
        await conn.node.logins.failed(user, conn.host, mechanism)
        raise


def _mechanism(conn: ClientConnection, request: SaslAuth) -> Mechanism:
    offered = mechanisms(conn)
    name = request.mechanism.decode("utf-8", "replace")
    if name not in offered:
        raise AuthenticationFailed(f"mechanism {name!r} is not offered here; offered: {', '.join(offered)}")
    return Mechanism(name)


async def _check_plain(conn: ClientConnection, request: SaslAuth, name: str, password: str) -> None:
    if is_open(conn):
        conn.authenticate(name, ADMIN)
    elif await conn.node.logins.password_is(conn.node.users, name, password):
        _log_in(conn, name)
    else:
        raise AuthenticationFailed
    conn.reply(request)


def _log_in(conn: ClientConnection, name: str) -> None:
    conn.node.logins.succeeded(name, conn.host)
    conn.authenticate(name, conn.node.users.access(name))


def _challenge(conn: ClientConnection, request: SaslAuth, mechanism: Mechanism) -> None:
    name = client_name(request.value)
    server = ScramServer(mechanism, conn.node.users.credentials(name, mechanism), secrets.token_urlsafe(24))
    challenge = server.challenge(request.value)
    conn.sasl = PendingLogin(name, mechanism, server)
    conn.reply(request, status=Status.AUTH_CONTINUE, value=challenge)


def _finish(conn: ClientConnection, request: SaslAuth, exchange: PendingLogin | None) -> None:
    if exchange is None or request.mechanism != exchange.mechanism.encode():
        raise InvalidArguments("SASL_STEP continues a SASL_AUTH of the same mechanism")
    signature = exchange.server.finish(request.value)
    _log_in(conn, exchange.user)
    conn.reply(request, value=signature)


COMMANDS = (
    command(SaslListMechanisms, list_mechanisms, needs_bucket=False),
    command(SaslAuth, authenticate, needs_bucket=False),
)
