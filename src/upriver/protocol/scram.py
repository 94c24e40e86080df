"""SCRAM (RFC 5802, RFC 7677) with the names that Couchbase gives it, for both ends (docs/protocol/session.md#sasl).

Pure: randomness is a parameter, bytes go in and bytes come out. The server keeps salted credentials, never a password.
The client verifies the server too: only a server that knows the user's credentials can sign.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum

from upriver.errors import AuthenticationFailed, LocalProtocolError, RemoteProtocolError

# RFC 7677 asks for at least 4,096, but real servers have always defaulted to 4,000. With fewer iterations an
# eavesdropper could guess the password more easily; more would take us a second or longer.
MIN_ITERATIONS, MAX_ITERATIONS = 4_000, 1_000_000
MIN_NONCE = 8
_GS2_HEADER = "n,,"
_CHANNEL_BINDING = "biws"  # base64 of the header: no channel binding


class Mechanism(StrEnum):
    """The mechanisms by the names they have on the wire; the strongest comes first."""

    SCRAM_SHA512 = "SCRAM-SHA512"
    SCRAM_SHA256 = "SCRAM-SHA256"
    SCRAM_SHA1 = "SCRAM-SHA1"
    PLAIN = "PLAIN"


_DIGESTS = {
    Mechanism.SCRAM_SHA512: "sha512",
    Mechanism.SCRAM_SHA256: "sha256",
    Mechanism.SCRAM_SHA1: "sha1",
}
SCRAM_MECHANISMS = tuple(_DIGESTS)


@dataclass(frozen=True, slots=True)
class SaltedCredentials:
    """What a server keeps of a password for one mechanism; the password cannot be recovered from it."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


def derive_credentials(mechanism: str, password: str, salt: bytes, iterations: int) -> SaltedCredentials:
    """Salt and hash a password; slow on purpose, in proportion to ``iterations``."""
    digest = digest_of(mechanism)
    salted = _salted_password(digest, password, salt, iterations)
    stored_key = hashlib.new(digest, _hmac(digest, salted, b"Client Key")).digest()
    return SaltedCredentials(salt, iterations, stored_key, _hmac(digest, salted, b"Server Key"))


def password_matches(mechanism: str, credentials: SaltedCredentials, password: str) -> bool:
    """Check a password sent in the clear (PLAIN) against salted credentials, in constant time."""
    found = derive_credentials(mechanism, password, credentials.salt, credentials.iterations)
    return hmac.compare_digest(found.stored_key, credentials.stored_key)


def digest_of(mechanism: str) -> str:
    """The hash of a SCRAM mechanism as ``hashlib`` names it."""
    try:
        return _DIGESTS[Mechanism(mechanism)]
    except (KeyError, ValueError):
        raise LocalProtocolError(f"{mechanism!r} is not one of {', '.join(SCRAM_MECHANISMS)}") from None


def encode_plain(username: str, password: str, authzid: str = "") -> bytes:
    """The value of a PLAIN SASL_AUTH."""
    return "\0".join((authzid, username, password)).encode()


def decode_plain(value: bytes) -> tuple[str, str]:
    """The user name and password in a PLAIN SASL_AUTH; an authorization identity is allowed but ignored."""
    parts = _text(value, "PLAIN").split("\0")
    if len(parts) != 3:
        raise RemoteProtocolError("PLAIN is authzid, user and password, separated by zero bytes", "value")
    return parts[1], parts[2]


def escape_name(name: str) -> str:
    """A user name as SCRAM writes it.

    >>> escape_name("a=b,c")
    'a=3Db=2Cc'
    """
    return name.replace("=", "=3D").replace(",", "=2C")


def unescape_name(name: str) -> str:
    """Undo ``escape_name``; an ``=`` that escapes nothing is an error."""
    head, *rest = name.split("=")
    escapes = {"2C": ",", "3D": "="}
    if any(part[:2] not in escapes for part in rest):
        raise RemoteProtocolError("'=' in a user name must be written =3D, and ',' =2C", "user name")
    return head + "".join(escapes[part[:2]] + part[2:] for part in rest)


class ScramClient:
    """The client's three steps: ``first()``, ``respond(server_first)``, ``verify(server_final)``."""

    def __init__(self, mechanism: str, username: str, password: str, nonce: str) -> None:
        self.mechanism = mechanism
        self._digest = digest_of(mechanism)
        self._password = password
        self._nonce = nonce
        self._first_bare = f"n={escape_name(username)},r={nonce}"
        self._signature: bytes | None = None
        if not _is_nonce(nonce):
            raise LocalProtocolError(f"a nonce is at least {MIN_NONCE} printable characters without ','")

    def first(self) -> bytes:
        return (_GS2_HEADER + self._first_bare).encode()

    def respond(self, server_first: bytes) -> bytes:
        """Prove that we know the password; ``RemoteProtocolError`` if the server's salt or nonce is invalid."""
        text = _text(server_first, "server's first message")
        nonce, salt, iterations = _parse_server_first(text)
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise RemoteProtocolError("the server's nonce does not continue ours", "r")
        final = f"c={_CHANNEL_BINDING},r={nonce}"
        auth_message = f"{self._first_bare},{text},{final}".encode()
        salted = _salted_password(self._digest, self._password, salt, iterations)
        client_key = _hmac(self._digest, salted, b"Client Key")
        stored_key = hashlib.new(self._digest, client_key).digest()
        proof = _xor(client_key, _hmac(self._digest, stored_key, auth_message))
        self._signature = _hmac(self._digest, _hmac(self._digest, salted, b"Server Key"), auth_message)
        return f"{final},p={_base64(proof)}".encode()

    def verify(self, server_final: bytes) -> None:
        """Check the server's signature; ``AuthenticationFailed`` if the server does not know our credentials."""
        if self._signature is None:
            raise LocalProtocolError("respond() to the server's first message before verify()")
        fields = _fields(_text(server_final, "server's final message"))
        if "e" in fields:
            raise AuthenticationFailed(f"the server refused: {fields['e']}")
        signature = _unbase64(_required(fields, "v"), "v")
        if not hmac.compare_digest(signature, self._signature):
            raise AuthenticationFailed(
                "the server's signature is wrong: it does not know this user's credentials, do not trust it"
            )


class ScramServer:
    """The server's two steps, with the credentials of the user named in ``client_first``.

    Find the user with ``client_name(client_first)``, build this with the stored credentials, then ``challenge`` and
    ``finish``. ``finish`` raises ``AuthenticationFailed`` for a wrong proof.
    """

    def __init__(self, mechanism: str, credentials: SaltedCredentials, nonce: str) -> None:
        self._digest = digest_of(mechanism)
        self._credentials = credentials
        self._nonce = nonce
        self._first_bare = ""
        self._server_first = ""
        self._full_nonce = ""

    def challenge(self, client_first: bytes) -> bytes:
        """The server's first message: the nonces, the salt and the iterations."""
        _, client_nonce, self._first_bare = _parse_client_first(client_first)
        self._full_nonce = client_nonce + self._nonce
        known = self._credentials
        self._server_first = f"r={self._full_nonce},s={_base64(known.salt)},i={known.iterations}"
        return self._server_first.encode()

    def finish(self, client_final: bytes) -> bytes:
        """Check the client's proof and sign the exchange."""
        if not self._server_first:
            raise LocalProtocolError("challenge() the client before finish()")
        proof, without_proof = self._parse_final(client_final)
        auth_message = f"{self._first_bare},{self._server_first},{without_proof}".encode()
        known = self._credentials
        client_key = _xor(proof, _hmac(self._digest, known.stored_key, auth_message))
        if not hmac.compare_digest(hashlib.new(self._digest, client_key).digest(), known.stored_key):
            raise AuthenticationFailed
        return f"v={_base64(_hmac(self._digest, known.server_key, auth_message))}".encode()

    def _parse_final(self, client_final: bytes) -> tuple[bytes, str]:
        text = _text(client_final, "client's final message")
        fields = _fields(text)
        if _required(fields, "c") not in (_CHANNEL_BINDING, "eSws"):  # "n,," or "y,,": no channel binding either way
            raise RemoteProtocolError("channel binding is not supported", "c")
        if not hmac.compare_digest(_required(fields, "r").encode(), self._full_nonce.encode()):
            raise AuthenticationFailed("the nonce is not the agreed one")
        proof = _unbase64(_required(fields, "p"), "p")
        if len(proof) != len(self._credentials.stored_key):
            raise AuthenticationFailed("the proof has the wrong size")
        return proof, text[: text.rindex(",p=")]


def client_name(client_first: bytes) -> str:
    """The user name in the client's first message."""
    return _parse_client_first(client_first)[0]


def _parse_client_first(client_first: bytes) -> tuple[str, str, str]:
    text = _text(client_first, "client's first message")
    binding, _, rest = text.partition(",")
    _authzid, comma, bare = rest.partition(",")
    if binding not in ("n", "y") or not comma:
        raise RemoteProtocolError("must begin with 'n,,': channel binding is not supported", "client's first message")
    fields = _fields(bare)
    if "m" in fields:
        raise RemoteProtocolError("mandatory extensions are not supported", "m")
    nonce = _required(fields, "r")
    if not _is_nonce(nonce):
        raise RemoteProtocolError(f"is not {MIN_NONCE} or more printable characters", "r")
    return unescape_name(_required(fields, "n")), nonce, bare


def _parse_server_first(text: str) -> tuple[str, bytes, int]:
    fields = _fields(text)
    if "m" in fields:
        raise RemoteProtocolError("mandatory extensions are not supported", "m")
    count = _required(fields, "i")
    if not (count.isascii() and count.isdigit() and len(count) <= 9 and MIN_ITERATIONS <= int(count) <= MAX_ITERATIONS):
        what = f"the server wants {count[:20]!r} iterations; {MIN_ITERATIONS:,} to {MAX_ITERATIONS:,} are reasonable"
        raise RemoteProtocolError(what, "i")
    return _required(fields, "r"), _unbase64(_required(fields, "s"), "s"), int(count)


def _fields(text: str) -> dict[str, str]:
    """``a=1,b=2`` as a dictionary; a value may contain ``=``, as base64 does."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if len(name) != 1 or not equals or name in fields:
            raise RemoteProtocolError("must be attributes like 'r=...', each once, separated by ','", "SCRAM message")
        fields[name] = value
    return fields


def _required(fields: dict[str, str], name: str) -> str:
    value = fields.get(name)
    if not value:
        raise RemoteProtocolError("is missing or empty", name)
    return value


def _is_nonce(nonce: str) -> bool:
    # RFC 5802 allows no space, but the official SDK's nonces contain spaces: any printable character will do.
    return len(nonce) >= MIN_NONCE and "," not in nonce and all(" " <= each <= "~" for each in nonce)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("is not UTF-8", what, error.start) from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unbase64(text: str, field: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RemoteProtocolError("is not base64", field) from None
    if _base64(data) != text:  # decoding ignores some bits: two texts would mean one proof
        raise RemoteProtocolError("is not the shortest base64", field)
    return data


def _hmac(digest: str, key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, digest)


def _salted_password(digest: str, password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
