"""Requests to the management ports of a cluster's nodes: push a map, ask for a report, order a takeover."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from upriver.client.options import ConnectOptions
from upriver.cluster.plan import ClusterState, Member, VbucketReport
from upriver.errors import UpriverError
from upriver.model import FailoverEntry
from upriver.node.cluster.cluster_map import Version
from upriver.protocol.topology import Address

TIMEOUT_S = 5.0
T = TypeVar("T")


class NodeUnreachable(UpriverError):
    """A node does not answer its management port."""


class NodeRefused(UpriverError):
    """A node answered with an error, in the node's own words."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node reports.

    ``is_member``: it was given a map since it started; ``clean``: it lost nothing when it last stopped; ``fenced``: it
    was told to stop consuming from some node until the next map; ``version``: the newest map that it ever had;
    ``uuid``: the bucket's uuid in that map.
    """

    version: Version
    uuid: str
    is_member: bool
    clean: bool
    fenced: bool
    vbuckets: dict[int, VbucketReport]
    manifest_uid: int = 0

    @property
    def revision(self) -> int:
        return self.version.revision


class Nodes:
    """Requests to nodes, as one user."""

    def __init__(self, username: str = "", password: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._username, self._password = username, password
        self._token = base64.b64encode(f"{username}:{password}".encode()).decode() if username else ""
        self._timeout_s = timeout_s

    def kv_options(self, member: Member, bucket: str) -> ConnectOptions:
        """How to reach a member's key-value port."""
        return ConnectOptions((Address(member.host, member.kv),), bucket, self._username, self._password)

    def report(self, member: Member, bucket: str) -> NodeReport:
        return _node_report(self.call(member, "GET", f"/upriver/cluster/{bucket}"))

    def fence(self, member: Member, bucket: str, source: Member) -> NodeReport:
        """Stop a member from consuming from ``source``; its report covers everything that it acknowledged to it."""
        return _node_report(self.call(member, "POST", f"/upriver/fence/{bucket}", {"source": str(source)}))

    def push(self, member: Member, bucket: str, state: dict[str, Any], *, welcome: bool = False) -> None:
        self.call(member, "POST", f"/upriver/cluster/{bucket}", {**state, "welcome": welcome})

    def newest_map(self, member: Member, bucket: str) -> ClusterState:
        """The newest state of the cluster that a member was ever given."""
        return ClusterState.from_json(self.call(member, "GET", f"/upriver/cluster/{bucket}/map"))

    def manifest(self, member: Member, bucket: str) -> dict[str, Any]:
        """The manifest that a member has."""
        return dict(self.call(member, "GET", f"/upriver/manifest/{bucket}"))

    def push_manifest(self, member: Member, bucket: str, manifest: Mapping[str, Any]) -> None:
        self.call(member, "POST", f"/upriver/manifest/{bucket}", manifest)

    def proposals(self, member: Member, bucket: str) -> dict[str, Any]:
        """The changes of the manifest that clients asked a member for, by name."""
        return dict(self.call(member, "GET", f"/upriver/proposals/{bucket}"))

    def decide(self, member: Member, bucket: str, outcomes: Mapping[str, Any]) -> None:
        """Tell a member the outcomes of its proposals."""
        self.call(member, "POST", f"/upriver/proposals/{bucket}", outcomes)

    def take_over(
        self, member: Member, bucket: str, vbuckets: Sequence[int], planned: Version, timeout_s: float
    ) -> dict[int, str]:
        """Order takeovers of vbuckets that a member replicates by one map; returns those that failed, and why."""
        body = {"vbuckets": vbuckets, "timeout_s": timeout_s, **asdict(planned)}
        answer = self.call(member, "POST", f"/upriver/takeover/{bucket}", body, timeout_s + self._timeout_s)
        return {int(vb): reason for vb, reason in answer["failed"].items()}

    def call(self, member: Member, method: str, path: str, body: Any = None, timeout_s: float = 0.0) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://{member.host}:{member.mgmt}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Basic {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self._timeout_s) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise NodeRefused(f"{member}: {error.read().decode('utf-8', 'replace')[:300]}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)  # of a URLError: what went wrong below it
            raise NodeUnreachable(f"{member} (management port {member.mgmt}): {reason}") from error


def _node_report(found: dict[str, Any]) -> NodeReport:
    rows = {int(vb): _report(*row) for vb, row in found["vbuckets"].items()}
    version = Version(found["epoch"], found["revision"], found.get("branch", ""))  # older nodes do not say
    return NodeReport(
        version, found.get("uuid", ""), found["member"], found["clean"], found["fenced"], rows,
        found.get("manifest_uid", 0),
    )  # fmt: skip


def _report(state: int, high: int, persisted: int, consistent: int, branches: list[tuple[int, int]]) -> VbucketReport:
    return VbucketReport(state, high, persisted, consistent, tuple(FailoverEntry(*entry) for entry in branches))


def at_once(work: Sequence[Callable[[], T]]) -> list[T | UpriverError]:
    """Run all functions in parallel; results in order. An ``UpriverError`` is a result, too."""

    def outcome(each: Callable[[], T]) -> T | UpriverError:
        try:
            return each()
        except UpriverError as error:
            return error

    if len(work) == 1:
        return [outcome(work[0])]
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        return list(pool.map(outcome, work))
