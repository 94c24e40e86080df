"""The settings of one bucket that can be changed over HTTP, kept beside its data.

Every other setting is refused by name, so that nobody relies on what this node does not do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from upriver.errors import ConfigError
from upriver.files import replace_file
from upriver.node.http.wire import HttpError, choice_or_none, flag_or_none, number_or_none
from upriver.store import StoreOptions
from upriver.store.collections.manifest import MAX_TTL

_FILE = "upriver.settings"
_MIB = 1 << 20
_CONFLICTS = {"seqno": False, "lww": True}
# Fixed here: a request may name these values, and no others.
_FIXED = {
    "bucketType": ("membase", "couchbase"),
    "storageBackend": ("couchstore", "upriver"),
    "evictionPolicy": ("fullEviction",),
    "compressionMode": ("passive",),
    "durabilityMinLevel": ("none",),
    "authType": ("sasl",),
    "replicaIndex": ("0", "false"),
    "historyRetentionSeconds": ("0",),
    "historyRetentionBytes": ("0",),
    "historyRetentionCollectionDefault": ("false", "0"),
}


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """The settings of one bucket; None where the node's options apply."""

    quota_mib: int | None = None
    max_ttl_s: int | None = None
    lww: bool | None = None
    flush_enabled: bool | None = None

    @classmethod
    def load(cls, folder: Path) -> BucketSettings:
        """As they were saved; ``ConfigError`` for a file that cannot be read."""
        path = folder / _FILE
        if not path.exists():
            return cls()
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def save(self, folder: Path) -> None:
        replace_file(folder / _FILE, json.dumps(asdict(self)))

    def store_options(self, options: StoreOptions) -> StoreOptions:
        """The node's options with the settings of this bucket."""
        return replace(
            options,
            quota_bytes=options.quota_bytes if self.quota_mib is None else self.quota_mib * _MIB,
            max_ttl_s=options.max_ttl_s if self.max_ttl_s is None else self.max_ttl_s,
            lww=options.lww if self.lww is None else self.lww,
        )

    def changed_by(self, arguments: Mapping[str, Any], replicas: int) -> BucketSettings:
        """These settings, changed by a request; ``HttpError`` names a setting that is refused."""
        _refuse_others(arguments, replicas)
        quota = number_or_none(arguments, "ramQuotaMB", 8, 1 << 20)
        max_ttl = number_or_none(arguments, "maxTTL", 0, MAX_TTL)
        lww = choice_or_none(arguments, "conflictResolutionType", _CONFLICTS)
        flush = flag_or_none(arguments, "flushEnabled")
        return BucketSettings(
            self.quota_mib if quota is None else quota,
            self.max_ttl_s if max_ttl is None else max_ttl,
            self.lww if lww is None else bool(lww),
            self.flush_enabled if flush is None else flush,
        )


_TAKEN = {"name", "numVBuckets", "ramQuotaMB", "maxTTL", "conflictResolutionType", "flushEnabled", "replicaNumber"}


def _refuse_others(arguments: Mapping[str, Any], replicas: int) -> None:
    for name, value in arguments.items():
        if name in _FIXED:
            _check_fixed(name, str(value))
        elif name not in _TAKEN:
            raise _refusal(name, f"{name} is not a setting of a bucket here")
    wanted = number_or_none(arguments, "replicaNumber", 0, 3)
    if wanted not in (None, replicas):
        what = "a cluster's replicas are chosen by `upriver cluster start --replicas`"
        raise _refusal("replicaNumber", f"replicaNumber is {replicas} here: {what}")


def _check_fixed(name: str, value: str) -> None:
    allowed = _FIXED[name]
    if value.strip().lower() not in {each.lower() for each in allowed}:
        raise _refusal(name, f"{name} can only be {' or '.join(allowed)} here, not {value}")


def _refusal(name: str, reason: str) -> HttpError:
    return HttpError(HTTPStatus.BAD_REQUEST, reason, name)
