"""SASL on the KV port: which mechanisms there are, and the exchanges (``protocol.md`` 10.4).

A user who does not exist is answered exactly as one with a wrong password. Hashing a clear password is slow on
purpose and runs in a thread, so that somebody who guesses passwords does not slow the others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from upriver.errors import AuthenticationFailed, InvalidArguments, NotSupported, RemoteProtocolError, Status
from upriver.node.options import NodeOptions
from upriver.node.tls import certificate_users
from upriver.node.users import Users
from upriver.protocol.scram import SCRAM_MECHANISMS, Mechanism, ScramServer, client_name, decode_plain
from upriver.wire.constants import Opcode
from upriver.wire.session import SaslAuth, SaslListMechanisms

if TYPE_CHECKING:
    from upriver.node.connection import Connection


class Exchange:
    """A SCRAM exchange between its two steps."""

    def __init__(self, user: str, mechanism: str, server: ScramServer) -> None:
        self.user = user
        self.mechanism = mechanism
        self.server = server


def load(options: NodeOptions) -> Users:
    """The users of a node: those in its data directory, and the one given at the start."""
    users = Users(options.data / Users.FILE_NAME)
    if options.username:
        users.add_in_memory(options.username, options.password)
    return users


def user_of_certificate(users: Users, certificate: Mapping[str, Any] | None) -> str | None:
    """The user whom a verified client certificate names, if there is such a user."""
    return next((name for name in certificate_users(certificate) if name in users), None)


def is_open(conn: Connection) -> bool:
    """May this client do without logging in? Only while there is no user at all, and only on this machine."""
    host = str((conn.transport.get_extra_info("peername") or ("",))[0]).partition("%")[0]
    return bool(host) and conn.node.users.empty and ipaddress.ip_address(host).is_loopback


def welcome(conn: Connection) -> None:
    """Log in a new connection that needs no password: where access is open, or by its certificate."""
    if is_open(conn):
        conn.authenticate("")
    elif conn.tls:
        tls = conn.transport.get_extra_info("ssl_object")
        user = user_of_certificate(conn.node.users, tls.getpeercert() if tls else None)
        if user is not None:
            conn.authenticate(user)


def mechanisms(conn: Connection) -> list[Mechanism]:
    """What this connection may use, the strongest first; a clear password needs TLS if the node says so."""
    plain = [Mechanism.PLAIN] if conn.tls or conn.node.options.plain_without_tls else []
    return [*SCRAM_MECHANISMS, *plain]


def list_mechanisms(conn: Connection, request: SaslListMechanisms) -> None:
    if conn.dcp is not None:
        raise NotSupported("a DCP connection cannot change its user")
    conn.reply(request, value=" ".join(mechanisms(conn)).encode())


async def authenticate(conn: Connection, request: SaslAuth) -> None:
    """SASL_AUTH and SASL_STEP. Whatever goes wrong ends the exchange; the next SASL_AUTH starts another."""
    if conn.dcp is not None:
        raise NotSupported("a DCP connection cannot change its user")
    exchange, conn.sasl = conn.sasl, None
    mechanism = _mechanism(conn, request)
    try:
        if request.opcode == Opcode.SASL_STEP:
            _finish(conn, request, exchange)
        elif mechanism is Mechanism.PLAIN:
            await _check_plain(conn, request)
        else:
            _challenge(conn, request, mechanism)
    except RemoteProtocolError as error:
        raise InvalidArguments(str(error)) from error
    except AuthenticationFailed:
        if not is_open(conn):
            conn.forget_user()  # who tries to become somebody else and fails is nobody
        raise


def _mechanism(conn: Connection, request: SaslAuth) -> Mechanism:
    offered = mechanisms(conn)
    name = request.mechanism.decode("utf-8", "replace")
    if name not in offered:
        raise AuthenticationFailed(f"mechanism {name!r} is not offered here, but {', '.join(offered)}")
    return Mechanism(name)


async def _check_plain(conn: Connection, request: SaslAuth) -> None:
    name, password = decode_plain(request.value)
    if not is_open(conn):
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(None, conn.node.users.password_is, name, password):
            raise AuthenticationFailed
    conn.authenticate(name)
    conn.reply(request)


def _challenge(conn: Connection, request: SaslAuth, mechanism: Mechanism) -> None:
    name = client_name(request.value)
    server = ScramServer(mechanism, conn.node.users.credentials(name, mechanism), secrets.token_urlsafe(24))
    challenge = server.challenge(request.value)
    conn.sasl = Exchange(name, mechanism, server)
    conn.reply(request, status=Status.AUTH_CONTINUE, value=challenge)


def _finish(conn: Connection, request: SaslAuth, exchange: object) -> None:
    if not isinstance(exchange, Exchange) or request.mechanism != exchange.mechanism.encode():
        raise InvalidArguments("SASL_STEP continues a SASL_AUTH of the same mechanism")
    signature = exchange.server.finish(request.value)
    conn.authenticate(exchange.user)
    conn.reply(request, value=signature)


HANDLERS = {SaslListMechanisms: list_mechanisms, SaslAuth: authenticate}
BUCKETLESS = frozenset({SaslListMechanisms, SaslAuth})
