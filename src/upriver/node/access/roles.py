"""What a user may do: roles as Couchbase names them, each for one bucket or for all, and their privileges.

A command needs a privilege; a role is a set of privileges. A user without any in a bucket cannot select it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag

from upriver.errors import ConfigError
from upriver.wire.constants import Opcode


class Privilege(IntFlag):
    """What a command needs."""

    READ = 1  # documents, their metadata, seqnos and failover logs
    WRITE = 2
    META_WRITE = 4  # write with the CAS and revision of another cluster
    STATS = 8
    DCP_PRODUCER = 16  # open a connection that streams changes
    DCP_CONSUMER = 32  # open a connection that replicates into this node
    BUCKET_ADMIN = 64  # collections, settings, vbucket states, persistence, compaction, flush
    NODE_ADMIN = 128  # buckets, cluster maps, faults


P = Privilege
EVERYTHING = Privilege(255)
NOTHING = Privilege(0)
_DATA = P.READ | P.WRITE | P.META_WRITE | P.STATS | P.DCP_PRODUCER | P.DCP_CONSUMER
ROLES: dict[str, tuple[Privilege, str]] = {
    "admin": (EVERYTHING, "everything, in every bucket"),
    "bucket_admin": (P.BUCKET_ADMIN | P.STATS, "manage a bucket and its collections; no documents"),
    "bucket_full_access": (_DATA, "read, write and stream a bucket, replicate into it"),
    "data_reader": (P.READ, "read documents"),
    "data_writer": (P.WRITE, "write documents; not read them"),
    "data_dcp_reader": (P.READ | P.DCP_PRODUCER | P.STATS, "stream the changes of a bucket"),
    "data_monitoring": (P.STATS, "read statistics"),
    "replication_target": (P.READ | P.WRITE | P.META_WRITE | P.STATS, "write with metadata, as XDCR does"),
}
_FORM = re.compile(r"([a-z_]+)(?:\[([^\[\]]+)\])?")
ALL_BUCKETS = "*"


@dataclass(frozen=True, slots=True)
class Grant:
    """A role, in one bucket or in all of them."""

    role: str
    bucket: str = ALL_BUCKETS

    @classmethod
    def parse(cls, text: str) -> Grant:
        """``admin``, ``data_reader[travel]``, ``data_reader[*]``."""
        found = _FORM.fullmatch(text.strip())
        if found is None or found[1] not in ROLES:
            raise ConfigError(f"there is no role {text!r}; there are {', '.join(ROLES)}, as data_reader[BUCKET]")
        role, bucket = found[1], found[2]
        if role == "admin":
            if bucket not in (None, ALL_BUCKETS):
                raise ConfigError(f"role {text!r}: admin is for every bucket; bucket_admin[{bucket}] is for one")
            return cls(role)
        if bucket is None:
            raise ConfigError(f"role {text!r}: say for which bucket, {role}[NAME], or {role}[*] for all")
        return cls(role, bucket)

    def __str__(self) -> str:
        return self.role if self.role == "admin" else f"{self.role}[{self.bucket}]"

    def to_json(self) -> dict[str, str]:
        """As ``/whoami`` shows it."""
        return {"role": self.role} if self.role == "admin" else {"role": self.role, "bucket_name": self.bucket}


@dataclass(frozen=True, slots=True)
class Access:
    """Everything that was granted to one user."""

    grants: tuple[Grant, ...] = ()

    @classmethod
    def parse(cls, roles: Iterable[str]) -> Access:
        return cls(tuple(dict.fromkeys(Grant.parse(role) for role in roles)))

    def inside(self, bucket: str) -> Privilege:
        """What the user may do in a bucket."""
        found = NOTHING
        for grant in self.grants:
            if grant.bucket in (ALL_BUCKETS, bucket):
                found |= ROLES[grant.role][0]
        return found

    @property
    def outside(self) -> Privilege:
        """What the user may do where no bucket is selected."""
        return EVERYTHING if any(grant.role == "admin" for grant in self.grants) else NOTHING

    def names(self) -> list[str]:
        return [str(grant) for grant in self.grants]


ADMIN = Access((Grant("admin"),))


def lacking(needed: Privilege) -> str:
    """The message for a user who lacks a privilege: which roles have it."""
    able = [role for role, (has, _) in ROLES.items() if not needed & ~has]
    return f"the user needs the role {' or '.join(able)} for this ({needed.name})"


def _opcodes() -> dict[int, Privilege]:
    """The privilege that each command needs; a command without one needs only a login."""
    O = Opcode  # noqa: E741, N806 - a table
    needs: dict[int, Privilege] = {}
    table: dict[Privilege, Iterable[int]] = {
        P.READ: (
            O.GET, O.GETQ, O.GETK, O.GETKQ, O.GET_REPLICA, O.OBSERVE, O.OBSERVE_SEQNO, O.GET_LOCKED, O.UNLOCK_KEY,
            O.GET_META, O.GETQ_META, O.GET_RANDOM_KEY, O.GET_FAILOVER_LOG, O.GET_ALL_VB_SEQNOS, O.SEQNO_PERSISTENCE,
            O.GET_VBUCKET, O.SUBDOC_GET, O.SUBDOC_EXISTS, O.SUBDOC_MULTI_LOOKUP, O.SUBDOC_GET_COUNT,
        ),
        P.WRITE: (
            O.SET, O.SETQ, O.ADD, O.ADDQ, O.REPLACE, O.REPLACEQ, O.DELETE, O.DELETEQ, O.INCREMENT, O.INCREMENTQ,
            O.DECREMENT, O.DECREMENTQ, O.APPEND, O.APPENDQ, O.PREPEND, O.PREPENDQ, O.TOUCH,
            *range(O.SUBDOC_DICT_ADD, O.SUBDOC_COUNTER + 1), O.SUBDOC_MULTI_MUTATION, O.SUBDOC_REPLACE_BODY_WITH_XATTR,
        ),
        P.READ | P.WRITE: (O.GAT, O.GATQ),
        P.META_WRITE: (
            O.SET_WITH_META, O.SETQ_WITH_META, O.ADD_WITH_META, O.ADDQ_WITH_META, O.DEL_WITH_META, O.DELQ_WITH_META,
        ),
        P.STATS: (O.STAT,),
        P.BUCKET_ADMIN: (
            O.FLUSH, O.FLUSHQ, O.SET_VBUCKET, O.DEL_VBUCKET, O.STOP_PERSISTENCE, O.START_PERSISTENCE, O.COMPACT_DB,
            O.ENABLE_TRAFFIC, O.DISABLE_TRAFFIC, O.COLLECTIONS_SET_MANIFEST,
        ),
        P.NODE_ADMIN: (O.VERBOSITY,),
    }  # fmt: skip
    for privilege, opcodes in table.items():
        needs.update(dict.fromkeys(opcodes, privilege))
    return needs


NEEDED = _opcodes()
