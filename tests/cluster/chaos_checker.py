"""What must be true after any chaos run, checked against the writers' records and the nodes' files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.chaos_clients import Outcome, Reader, Row, Write, Writer
from upriver.cluster.plan import ClusterState
from upriver.model import vbucket_of
from upriver.store import Bucket, Run
from upriver.wire.packed import SUPERSEDED, RecordKind, unpack

_DELETES = 1 << 63


Contents = dict[bytes, Row]


class Holding(NamedTuple):
    """A vbucket on a node: its high seqno, its branch, and the newest version of every key."""

    high_seqno: int = 0
    uuid: int = 0
    documents: Contents = {}


@dataclass
class Findings:
    """The problems found, and figures that show how much happened."""

    steps: list[str]
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        return {**self.figures, "steps": len(self.steps), "problems": len(self.problems)}


def contents(directory: Path, node: int, vbuckets: int) -> dict[int, Holding]:
    """Every vbucket that a stopped node has."""
    with Bucket.open(directory / f"node-{node}" / "default", name="default", vbuckets=vbuckets) as bucket:
        return {vb.id: Holding(vb.high_seqno, vb.uuid, documents_of(vb)) for vb in bucket.existing()}


def documents_of(vb: Any) -> Contents:
    found: Contents = {}
    source = vb.stream(0, vb.high_seqno)
    while (event := source.poll()) is not None:
        at = 0
        while isinstance(event, Run) and at < len(event.data):
            head, key, value = unpack(event.data, at)
            at += head.size
            if head.kind & SUPERSEDED or not event.after < head.seqno <= event.upto:
                continue
            if head.kind in (RecordKind.MUTATION, RecordKind.DELETION, RecordKind.EXPIRATION, RecordKind.COMMIT):
                gone = head.kind in (RecordKind.DELETION, RecordKind.EXPIRATION) or bool(
                    head.kind == RecordKind.COMMIT and head.extra & _DELETES
                )
                flags = 0 if gone else head.flags  # tombstones have none on the wire
                found[key[1:]] = Row(None if gone else value, head.cas, head.rev_seqno, flags, head.time, head.seqno)
    source.close()
    return found


def check(
    directory: Path, state: ClusterState, writers: list[Writer], readers: list[Reader], steps: list[str]
) -> Findings:
    findings = Findings(steps)
    nodes = [contents(directory, n, len(state.owners)) for n in range(len(state.members))]
    actives = [nodes[chain[0]].get(vb, Holding()) for vb, chain in enumerate(state.owners)]
    _check_replicas(findings, state, nodes, actives)
    for writer in writers:
        _check_writer(findings, writer, actives)
    for reader in readers:
        _check_reader(findings, reader, actives)
    findings.figures |= {
        "writes": _outcomes(writers),
        "longest_s": round(max(writer.longest_s for writer in writers), 2),
        "documents": sum(len(active.documents) for active in actives),
        "rollbacks_seen": sum(reader.rollbacks for reader in readers),
        "visits": sum(reader.visits for reader in readers),
        "revision": state.revision,
    }
    return findings


def _outcomes(writers: list[Writer]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for writer in writers:
        found.update({f"level {level} {outcome}": count for (level, outcome), count in writer.outcomes.items()})
    return dict(sorted(found.items()))


def _check_replicas(
    findings: Findings, state: ClusterState, nodes: list[dict[int, Holding]], actives: list[Holding]
) -> None:
    """Replicas are equal to their active, byte for byte, and on the same branch."""
    for vb, chain in enumerate(state.owners):
        ours = actives[vb]
        for member in (member for member in chain[1:] if member >= 0):
            theirs = nodes[member].get(vb, Holding())
            if theirs[:2] != ours[:2]:
                findings.problems.append(f"vbucket {vb}: replica {member} is at {theirs[:2]}, its active at {ours[:2]}")
            for key in theirs.documents.keys() | ours.documents.keys():
                here, there = ours.documents.get(key), theirs.documents.get(key)
                if here != there:
                    findings.problems.append(f"vbucket {vb} {key!r}: active {here}, replica {member} {there}")


def _check_writer(findings: Findings, writer: Writer, actives: list[Holding]) -> None:
    if writer.failure is not None:
        findings.problems.append(f"a writer failed: {writer.failure!r}")
    for key, writes in writer.writes.items():
        _check_key(findings, key, writes, actives[vbucket_of(key, len(actives))].documents.get(key))
    for key, outcomes in writer.counts.items():
        version = actives[vbucket_of(key, len(actives))].documents.get(key)
        count = int(version.value or 0) if version is not None else 0
        least = outcomes[Outcome.ACKNOWLEDGED]
        most = least + outcomes[Outcome.UNKNOWN]
        if not least <= count <= most:
            findings.problems.append(f"{key!r} counted to {count}; acknowledged were {least}, unknown {most - least}")


def _check_key(findings: Findings, key: bytes, writes: list[Write], version: Row | None) -> None:
    """The document holds the value and the metadata that were written."""
    value = version.value if version is not None else None
    if value not in allowed(writes):
        told = [(each.value and each.value[:24], each.level, each.outcome.name) for each in writes[-6:]]
        findings.problems.append(f"{key!r} holds {value!r}; its last writes were {told}")
    if version is None:
        return
    beside = {(each.flags, each.expiry) for each in writes if each.value == value}
    if value is not None and (version.flags, version.time) not in beside:
        findings.problems.append(f"{key!r} has flags and expiry of no write: {version}")


def allowed(writes: list[Write]) -> set[bytes | None]:
    """What a key may hold: the last durable write that was acknowledged, or anything later that may have happened."""
    found: set[bytes | None] = set()
    for write in reversed(writes):
        found.add(write.value)
        if write.level and write.outcome is Outcome.ACKNOWLEDGED:
            return found
    return found | {None}


def _check_reader(findings: Findings, reader: Reader, actives: list[Holding]) -> None:
    """A reader that followed the protocol throughout has the same table."""
    if reader.failure is not None or reader.is_alive():
        findings.problems.append(f"the reader did not end: {reader.failure!r}, behind {reader.behind}")
        return
    _check_history(findings, reader)
    table = reader.table()
    for vb, active in enumerate(actives):
        for key, version in active.documents.items():
            read = table.pop((vb, key), None)
            if read != version:
                findings.problems.append(f"vbucket {vb} {key!r}: the reader has {read}, the node {version}")
    findings.problems += [f"vbucket {vb} {key!r}: only the reader has {row}" for (vb, key), row in table.items()]


def _check_history(findings: Findings, reader: Reader) -> None:
    """Seqnos rise, and no write is in the history twice: every value but a counter's is written once."""
    for vb, changes in reader.changes.items():
        seqnos = [row.seqno for _, row in changes]
        if any(later <= earlier for earlier, later in pairwise(seqnos)):
            findings.problems.append(f"vbucket {vb}: the reader's seqnos do not rise: {seqnos}")
        counts = Counter((key, row.value) for key, row in changes if row.value is not None)
        for (key, value), count in counts.items():
            if count > 1:
                findings.problems.append(f"vbucket {vb} {key!r}: {value!r} is in the history {count} times")
