"""The users of a node: salted credentials and roles, in memory or in a JSON file of mode 0600.

The file never holds a password. It is replaced atomically, and a running node reads it again when it has changed,
so ``upriver user add`` needs no restart. If the new content is damaged, the node logs that and keeps the old users.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upriver.errors import ConfigError
from upriver.files import replace_file
from upriver.node import log
from upriver.node.access.roles import ADMIN, Access
from upriver.protocol.scram import SCRAM_MECHANISMS, Mechanism, SaltedCredentials, derive_credentials, password_matches

ITERATIONS = 10_000
SALT_BYTES = {Mechanism.SCRAM_SHA512: 64, Mechanism.SCRAM_SHA256: 32, Mechanism.SCRAM_SHA1: 20}
FILE_VERSION = 2
WITHOUT_ROLES = 1  # version of files in which every user is an administrator
MAX_REMEMBERED = 1000
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class User:
    """How a user proves who they are, and what they may do."""

    credentials: Mapping[str, SaltedCredentials]
    access: Access = ADMIN


class Users:
    """The users of a node.

    ``credentials`` answers for every name: an unknown name gets a made-up salt, always the same one, so that nobody
    can find out which names exist.
    """

    FILE_NAME = "users.json"  # in the data directory
    KEY_FILE = "login.key"  # beside it: the secret behind made-up salts, which a restart must not change

    def __init__(self, path: Path | None = None, *, iterations: int = ITERATIONS) -> None:
        self.path = path
        self._iterations = iterations
        self._in_memory: dict[str, User] = {}
        self._in_file: dict[str, User] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._secret = secrets.token_bytes(SECRET_BYTES) if path is None else _lasting_secret(path.parent)
        self._had_users = False
        self._accepted: dict[bytes, None] = {}  # hashes of passwords that matched: HTTP sends them every time
        self.version = 0  # grows with each change of the file, because rights of open connections may change
        if path is not None:
            self._read(path)

    @property
    def empty(self) -> bool:
        """Whether there has never been a user; only then is no login needed."""
        self.refresh()
        return not self._had_users

    def __contains__(self, name: str) -> bool:
        self.refresh()
        return name in self._in_memory or name in self._in_file

    def names(self) -> list[str]:
        self.refresh()
        return sorted({*self._in_memory, *self._in_file})

    def add_in_memory(self, name: str, password: str) -> None:
        """Add an administrator until the node stops."""
        self._in_memory[check_name(name)] = User(salt_password(password, self._iterations))
        self._had_users = True

    def access(self, name: str) -> Access:
        """What a user may do; nothing, if the user no longer exists."""
        user = self._in_memory.get(name) or self._in_file.get(name)
        return user.access if user is not None else Access()

    def credentials(self, name: str, mechanism: str) -> SaltedCredentials:
        """What SCRAM needs to check a user; for an unknown one, credentials that no proof matches."""
        self.refresh()
        user = self._in_memory.get(name) or self._in_file.get(name)
        if user is not None and mechanism in user.credentials:
            return user.credentials[mechanism]
        return self._stand_in(name, Mechanism(mechanism))

    def password_is(self, name: str, password: str) -> bool:
        """Check a password in the clear; takes as long for an unknown user as for a known one."""
        known = self.credentials(name, Mechanism.SCRAM_SHA256)
        seen = hmac.digest(self._secret, b"\0".join((name.encode(), known.stored_key, password.encode())), "sha256")
        if seen in self._accepted:
            return True
        matches = password_matches(Mechanism.SCRAM_SHA256, known, password) and name in self
        if matches:
            self._remember(seen)
        return matches

    def _remember(self, seen: bytes) -> None:
        if len(self._accepted) >= MAX_REMEMBERED:
            self._accepted.clear()
        self._accepted[seen] = None

    def _stand_in(self, name: str, mechanism: Mechanism) -> SaltedCredentials:
        def made_up(purpose: str, size: int) -> bytes:
            seed = hmac.digest(self._secret, f"{purpose}\0{mechanism}\0{name}".encode(), "sha256")
            return hashlib.shake_256(seed).digest(size)

        size = hashlib.new(mechanism.removeprefix("SCRAM-").lower()).digest_size
        salt = made_up("salt", SALT_BYTES[mechanism])
        return SaltedCredentials(salt, self._iterations, made_up("stored", size), made_up("server", size))

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self.path is None:
            return
        if _stamp(self.path) == self._stamp:
            return
        try:
            self._read(self.path)
        except ConfigError as error:
            log.warning("users_file_damaged", reason=error, kept=len(self._in_file))

    def _read(self, path: Path) -> None:
        self._stamp = _stamp(path)  # also of a damaged file, so that the damage is logged once
        self._in_file = read_file(path)
        self._had_users = self._had_users or bool(self._in_file)
        self.version += 1


def check_name(name: str) -> str:
    """A user name that every mechanism can carry."""
    if not name or len(name.encode()) > 128 or any(ord(each) < 0x20 or each == "\x7f" for each in name):
        raise ConfigError(f"{name!r} cannot be a user name: 1 to 128 bytes without control characters")
    return name


def salt_password(password: str, iterations: int = ITERATIONS) -> dict[str, SaltedCredentials]:
    """Credentials for every SCRAM mechanism, each with a salt of its own."""
    return {
        mechanism: derive_credentials(mechanism, password, secrets.token_bytes(SALT_BYTES[mechanism]), iterations)
        for mechanism in SCRAM_MECHANISMS
    }


def add_user(path: Path, name: str, password: str, iterations: int = ITERATIONS, roles: Sequence[str] = ()) -> bool:
    """Add a user to a file, or give an existing one a new password; returns whether the name is new.

    Without ``roles``, an existing user keeps their roles, and a new one is an administrator.
    """
    check_name(name)
    users = read_file(path)
    known = users.get(name)
    access = Access.parse(roles) if roles else known.access if known is not None else ADMIN
    users[name] = User(salt_password(password, iterations), access)
    write_file(path, users)
    return known is None


def set_roles(path: Path, name: str, roles: Sequence[str]) -> None:
    """Replace the roles of a user; the password stays."""
    access = Access.parse(roles)
    users = read_file(path)
    users[name] = replace(_existing(path, users, name), access=access)
    write_file(path, users)


def remove_user(path: Path, name: str) -> None:
    users = read_file(path)
    _existing(path, users, name)
    del users[name]
    write_file(path, users)


def _existing(path: Path, users: Mapping[str, User], name: str) -> User:
    if name not in users:
        raise ConfigError(f"there is no user {name!r} in {path}")
    return users[name]


def read_file(path: Path) -> dict[str, User]:
    """The users in a file; a missing file has none. ``ConfigError`` if it is not a users file."""
    try:
        content = json.loads(path.read_bytes())
        version = content["version"]
        if version not in (WITHOUT_ROLES, FILE_VERSION):
            raise ConfigError(f"{path} has version {version}, this program reads up to {FILE_VERSION}")
        roles = content["roles"] if version == FILE_VERSION else {name: ["admin"] for name in content["users"]}
        return {
            name: User(_decode_credentials(user), Access.parse(roles.get(name, ())))
            for name, user in content["users"].items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} is not a users file ({error!r}); move it away or restore it") from error


def write_file(path: Path, users: Mapping[str, User]) -> None:
    """Replace the file atomically: a reader sees the old users or the new ones, also after a crash."""
    found = sorted(users.items())
    content = {
        "version": FILE_VERSION,
        "users": {name: _encode_credentials(user.credentials) for name, user in found},
        "roles": {name: user.access.names() for name, user in found},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1), private=True)


def _lasting_secret(directory: Path) -> bytes:
    """A secret that survives restarts: made-up salts that change would show which users do not exist."""
    path = directory / Users.KEY_FILE
    try:
        found = bytes.fromhex(path.read_text())
        if len(found) == SECRET_BYTES:
            return found
    except (OSError, ValueError):
        pass  # missing, or not readable for this user
    made = secrets.token_bytes(SECRET_BYTES)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, made.hex(), private=True)
    except OSError as error:
        log.warning("login_key_not_kept", path=path, reason=error)
    return made


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _encode_credentials(user: Mapping[str, SaltedCredentials]) -> dict[str, dict[str, str | int]]:
    return {
        mechanism: {
            "salt": base64.b64encode(known.salt).decode(),
            "iterations": known.iterations,
            "stored_key": base64.b64encode(known.stored_key).decode(),
            "server_key": base64.b64encode(known.server_key).decode(),
        }
        for mechanism, known in user.items()
    }


def _decode_credentials(user: Mapping[str, Mapping[str, Any]]) -> dict[str, SaltedCredentials]:
    return {
        mechanism: SaltedCredentials(
            base64.b64decode(known["salt"]), int(known["iterations"]),
            base64.b64decode(known["stored_key"]), base64.b64decode(known["server_key"]),
        )
        for mechanism, known in user.items()
    }  # fmt: skip
