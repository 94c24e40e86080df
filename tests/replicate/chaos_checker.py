"""What must be true after any chaos, checked against the writers' memories and the nodes' files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chaos_clients import Outcome, Reader, Write, Writer

from upriver.model import vbucket_of
from upriver.replicate.plan import ClusterState
from upriver.store import Bucket, Run
from upriver.wire.packed import SUPERSEDED, Kind, unpack

_DELETES = 1 << 63


class Version(NamedTuple):
    """The newest version of a key, as a node has it; a tombstone's value is None."""

    value: bytes | None
    cas: int
    rev_seqno: int
    flags: int
    expiry: int
    seqno: int


Contents = dict[bytes, Version]


@dataclass
class Findings:
    """Problems, and figures that show that something happened at all."""

    steps: list[str]
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        return {**self.figures, "steps": len(self.steps), "problems": len(self.problems)}


def contents(directory: Path, node: int, vbuckets: int) -> dict[int, tuple[int, Contents]]:
    """High seqno and documents of every vbucket that a stopped node has."""
    with Bucket.open(directory / f"node-{node}" / "default", name="default", vbuckets=vbuckets) as bucket:
        return {vb.id: (vb.high_seqno, documents_of(vb)) for vb in bucket.existing()}


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
            if head.kind in (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION, Kind.COMMIT):
                gone = head.kind in (Kind.DELETION, Kind.EXPIRATION) or bool(
                    head.kind == Kind.COMMIT and head.extra & _DELETES
                )
                expiry = 0 if gone else head.time
                found[key[1:]] = Version(
                    None if gone else value, head.cas, head.rev_seqno, 0 if gone else head.flags, expiry, head.seqno
                )
    source.close()
    return found


def check(
    directory: Path, state: ClusterState, writers: list[Writer], reader: Reader, steps: list[str]
) -> Findings:
    findings = Findings(steps)
    nodes = [contents(directory, n, len(state.owners)) for n in range(len(state.members))]
    actives = [nodes[chain[0]].get(vb, (0, {})) for vb, chain in enumerate(state.owners)]
    _check_replicas(findings, state, nodes, actives)
    for writer in writers:
        _check_writer(findings, writer, actives)
    _check_reader(findings, reader, actives)
    findings.figures |= {
        "writes": _outcomes(writers),
        "longest_s": round(max(writer.longest_s for writer in writers), 2),
        "documents": sum(len(documents) for _, documents in actives),
        "rollbacks_seen": reader.rollbacks,
        "revision": state.revision,
    }
    return findings


def _outcomes(writers: list[Writer]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for writer in writers:
        found.update({f"level {level} {outcome}": count for (level, outcome), count in writer.outcomes.items()})
    return dict(sorted(found.items()))


def _check_replicas(findings: Findings, state: ClusterState, nodes: list[Any], actives: list[Any]) -> None:
    """Replicas are equal to their active, byte for byte."""
    for vb, chain in enumerate(state.owners):
        for member in (member for member in chain[1:] if member >= 0):
            high, documents = nodes[member].get(vb, (0, {}))
            if high != actives[vb][0]:
                findings.problems.append(f"vbucket {vb}: replica {member} is at {high}, its active at {actives[vb][0]}")
            for key in documents.keys() | actives[vb][1].keys():
                ours, theirs = actives[vb][1].get(key), documents.get(key)
                if ours != theirs:
                    findings.problems.append(f"vbucket {vb} {key!r}: active {ours}, replica {member} {theirs}")


def _check_writer(findings: Findings, writer: Writer, actives: list[Any]) -> None:
    if writer.failure is not None:
        findings.problems.append(f"a writer failed: {writer.failure!r}")
    for key, writes in writer.writes.items():
        version = actives[vbucket_of(key, len(actives))][1].get(key)
        value = version.value if version is not None else None
        if value not in allowed(writes):
            told = [(each.value and each.value[:24], each.level, each.outcome.name) for each in writes[-6:]]
            findings.problems.append(f"{key!r} holds {value!r}; its last writes were {told}")
    for key, outcomes in writer.counts.items():
        version = actives[vbucket_of(key, len(actives))][1].get(key)
        count = int(version.value or 0) if version is not None else 0
        least = outcomes[Outcome.ACKNOWLEDGED]
        most = least + outcomes[Outcome.UNKNOWN]
        if not least <= count <= most:
            findings.problems.append(f"{key!r} counted to {count}; acknowledged were {least}, unknown {most - least}")


def allowed(writes: list[Write]) -> set[bytes | None]:
    """What a key may hold: the last durable write that was acknowledged, or anything later that may have happened."""
    found: set[bytes | None] = set()
    for write in reversed(writes):
        found.add(write.value)
        if write.level and write.outcome is Outcome.ACKNOWLEDGED:
            return found
    return found | {None}


def _check_reader(findings: Findings, reader: Reader, actives: list[Any]) -> None:
    """A reader that followed the protocol through all of it has the same table."""
    if reader.failure is not None or reader.is_alive():
        findings.problems.append(f"the reader did not end: {reader.failure!r}, behind {reader.behind}")
        return
    table = {(vb, key): (value, cas, seqno) for vb, key, value, cas, seqno in reader.table()}
    for vb, (_, documents) in enumerate(actives):
        for key, version in documents.items():
            read = table.pop((vb, key), None)
            if read != (version.value, version.cas, version.seqno):
                findings.problems.append(f"vbucket {vb} {key!r}: the reader has {read}, the node {version}")
    findings.problems += [f"vbucket {vb} {key!r}: only the reader has {row}" for (vb, key), row in table.items()]
