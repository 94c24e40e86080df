"""Who may log in: salted credentials per mechanism, in memory or in a JSON file of mode 0600.

The file never holds a password. It is replaced atomically, and a running node reads it again when it has changed,
so that ``upriver user add`` needs no restart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upriver.errors import ConfigError
from upriver.files import replace_file
from upriver.protocol.scram import SCRAM_MECHANISMS, Credentials, Mechanism, derive_credentials, password_matches

ITERATIONS = 10_000
SALT_BYTES = {Mechanism.SCRAM_SHA512: 64, Mechanism.SCRAM_SHA256: 32, Mechanism.SCRAM_SHA1: 20}
FILE_VERSION = 1
MAX_REMEMBERED = 1000

UserCredentials = Mapping[str, Credentials]


class Users:
    """The users of a node, and a stand-in for those who do not exist.

    ``credentials`` answers for every name: an unknown one gets a salt that is made up but always the same, so that
    a stranger cannot tell which names exist.
    """

    FILE_NAME = "users.json"  # in the data directory

    def __init__(self, path: Path | None = None, *, iterations: int = ITERATIONS) -> None:
        self.path = path
        self._iterations = iterations
        self._in_memory: dict[str, UserCredentials] = {}
        self._in_file: dict[str, UserCredentials] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._secret = secrets.token_bytes(32)
        self._ever = False
        self._accepted: dict[bytes, None] = {}  # clear passwords that matched, hashed: HTTP sends them every time
        self.refresh()

    @property
    def empty(self) -> bool:
        """Has there never been a user? Only then is authentication off: to remove the last one locks the door."""
        self.refresh()
        return not self._ever

    def __contains__(self, name: str) -> bool:
        self.refresh()
        return name in self._in_memory or name in self._in_file

    def names(self) -> list[str]:
        self.refresh()
        return sorted({*self._in_memory, *self._in_file})

    def add_in_memory(self, name: str, password: str) -> None:
        """A user who is gone when the node stops."""
        self._in_memory[check_name(name)] = salt_password(password, self._iterations)
        self._ever = True

    def credentials(self, name: str, mechanism: str) -> Credentials:
        """What SCRAM needs to check a user; for an unknown one, something that no proof will match."""
        self.refresh()
        user = self._in_memory.get(name) or self._in_file.get(name)
        if user is not None and mechanism in user:
            return user[mechanism]
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

    def _stand_in(self, name: str, mechanism: Mechanism) -> Credentials:
        def made_up(purpose: str, size: int) -> bytes:
            seed = hmac.digest(self._secret, f"{purpose}\0{mechanism}\0{name}".encode(), "sha256")
            return hashlib.shake_256(seed).digest(size)

        size = hashlib.new(mechanism.removeprefix("SCRAM-").lower()).digest_size
        salt = made_up("salt", SALT_BYTES[mechanism])
        return Credentials(salt, self._iterations, made_up("stored", size), made_up("server", size))

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self.path is None:
            return
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            self._in_file = read_file(self.path)
            self._stamp = stamp
            self._ever = self._ever or bool(self._in_file)


def check_name(name: str) -> str:
    """A user name that every mechanism can carry."""
    if not name or len(name.encode()) > 128 or any(ord(each) < 0x20 or each == "\x7f" for each in name):
        raise ConfigError(f"{name!r} cannot be a user name: 1 to 128 bytes without control characters")
    return name


def salt_password(password: str, iterations: int = ITERATIONS) -> dict[str, Credentials]:
    """Credentials for every SCRAM mechanism, each with a salt of its own."""
    return {
        mechanism: derive_credentials(mechanism, password, secrets.token_bytes(SALT_BYTES[mechanism]), iterations)
        for mechanism in SCRAM_MECHANISMS
    }


def add_user(path: Path, name: str, password: str, iterations: int = ITERATIONS) -> bool:
    """Add a user to a file, or give an old one a new password; says whether the name is new."""
    check_name(name)
    users = read_file(path)
    is_new = name not in users
    users[name] = salt_password(password, iterations)
    write_file(path, users)
    return is_new


def remove_user(path: Path, name: str) -> None:
    users = read_file(path)
    if name not in users:
        raise ConfigError(f"there is no user {name!r} in {path}")
    del users[name]
    write_file(path, users)


def read_file(path: Path) -> dict[str, UserCredentials]:
    """The users in a file; a missing file has none. ``ConfigError`` if it is not a users file."""
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != FILE_VERSION:
            raise ConfigError(f"{path} has version {content['version']}, this program reads {FILE_VERSION}")
        return {name: _decode_user(user) for name, user in content["users"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(f"{path} is not a users file ({error!r}); move it away or restore it") from error


def write_file(path: Path, users: Mapping[str, UserCredentials]) -> None:
    """Replace the file atomically: a reader sees the old users or the new ones, also after a crash."""
    content = {"version": FILE_VERSION, "users": {name: _encode_user(user) for name, user in sorted(users.items())}}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1), private=True)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _encode_user(user: UserCredentials) -> dict[str, dict[str, Any]]:
    return {
        mechanism: {
            "salt": base64.b64encode(known.salt).decode(),
            "iterations": known.iterations,
            "stored_key": base64.b64encode(known.stored_key).decode(),
            "server_key": base64.b64encode(known.server_key).decode(),
        }
        for mechanism, known in user.items()
    }


def _decode_user(user: Mapping[str, Mapping[str, Any]]) -> dict[str, Credentials]:
    return {
        mechanism: Credentials(
            base64.b64decode(known["salt"]), int(known["iterations"]),
            base64.b64decode(known["stored_key"]), base64.b64decode(known["server_key"]),
        )
        for mechanism, known in user.items()
    }  # fmt: skip
