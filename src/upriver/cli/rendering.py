"""One change as text for people, and as a value for JSON lines."""

from __future__ import annotations

from typing import Any

from upriver.cli.rows import bytes_json, value_json
from upriver.client._feed.arrow import kind_of
from upriver.client.changes import Change, CollectionChanged, Deletion, Mutation, RolledBack

WIDTH = 100


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def event_of(change: Change) -> str:
    """The name of an event, as the ``event`` column of the Arrow schema has it."""
    if isinstance(change, Mutation):
        return "mutation"
    if isinstance(change, Deletion):
        return "expiration" if change.expired else "deletion"
    return "rollback" if isinstance(change, RolledBack) else kind_of(change.content).value


def to_json(change: Change) -> dict[str, Any]:
    """A change for a JSON line: names as in the Arrow schema, values as JSON where they are JSON."""
    if isinstance(change, RolledBack):
        return {
            "event": "rollback", "vbucket": change.vbucket, "seqno": change.to_seqno, "epoch": change.epoch,
            "vbuuid": f"{change.lost_branch:x}",
        }  # fmt: skip
    found: dict[str, Any] = {
        "event": event_of(change), "vbucket": change.vbucket, "seqno": change.seqno, "scope": change.scope,
        "collection": change.collection,
    }  # fmt: skip
    if isinstance(change, CollectionChanged):
        return found
    found |= bytes_json("key", change.key) | {"cas": change.cas, "rev_seqno": change.rev_seqno}
    if isinstance(change, Mutation):
        found |= value_json(change.value, change.datatype)
        found |= {"expiry": change.expiry} if change.expiry else {}
    if change.xattrs:
        found["xattrs"] = {name: text_of(value) for name, value in change.xattrs.items()}
    return found


def to_text(change: Change) -> tuple[str, str, str]:
    """A change as three columns of a terminal: its place, its event, and the rest."""
    if isinstance(change, RolledBack):
        said = f"everything above is void; the branch {change.lost_branch:x} is gone"
        return f"{change.vbucket}:{change.to_seqno}", "rollback", said
    where, what = f"{change.vbucket}:{change.seqno}", event_of(change)
    path = f"{change.scope}.{change.collection}" if change.collection else str(change.scope or "")
    if isinstance(change, CollectionChanged):
        return where, what, path
    shown = text_of(change.key) if path == "_default._default" else f"{path}/{text_of(change.key)}"
    if isinstance(change, Mutation) and change.value is not None:
        shown = f"{shown}  {text_of(change.value[: WIDTH * 4])}"
    return where, what, shown
