"""Faults on demand, for people who test DCP consumers: lost history, purges, dropped and slow connections, a crash.

``run`` is behind ``POST /upriver/faults/NAME`` and refuses everything unless the node was started with
``--enable-faults``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError, InvalidArguments, NotSupported
from upriver.model import VbucketState
from upriver.node import log
from upriver.node.dcp.producer import ProducerRole

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.node.server import Node

Arguments = dict[str, Any]
Done = dict[str, int | bool]


def run(node: Node, name: str, arguments: Arguments) -> Done:
    """Carry out a fault and return what it did. ``ConfigError`` names a missing or invalid argument."""
    if not node.options.enable_faults:
        raise NotSupported("start the node with --enable-faults")
    fault = FAULTS.get(name)
    if fault is None:
        raise ConfigError(f"no fault {name!r}; there are {', '.join(sorted(FAULTS))}")
    result = fault(node, arguments)
    log.warning("fault", fault=name, **{key: str(value) for key, value in arguments.items()})
    return result


def _number(arguments: Arguments, name: str, default: int | None = None) -> int:
    value = arguments.get(name, default)
    if value is None:
        raise ConfigError(f"{name} is missing")
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {value!r}, not a number") from error


def _bucket(node: Node, arguments: Arguments) -> NodeBucket:
    return node.buckets.get(str(arguments.get("bucket") or node.options.bucket))


def _failover(node: Node, arguments: Arguments) -> Done:
    """Lose the vbucket's last changes, as if a replica that never received them took over."""
    bucket = _bucket(node, arguments)
    vbucket = bucket.store.vbucket(_number(arguments, "vbucket"))
    lose = _number(arguments, "lose", 0)
    return _branch(bucket, vbucket.id, max(0, vbucket.high_seqno - lose))


def _rollback(node: Node, arguments: Arguments) -> Done:
    """Roll the vbucket back to a seqno, from which it continues on a new branch."""
    return _branch(_bucket(node, arguments), _number(arguments, "vbucket"), _number(arguments, "seqno"))


def _branch(bucket: NodeBucket, vbucket_id: int, seqno: int) -> Done:
    vbucket = bucket.store.vbucket(vbucket_id)
    if seqno > vbucket.high_seqno:
        raise InvalidArguments(f"seqno {seqno} is beyond the high seqno {vbucket.high_seqno}")
    bucket.store.flush()  # refused while persistence is stopped, so it comes before any change
    bucket.set_state(vbucket_id, VbucketState.REPLICA)
    reached = vbucket.rollback(seqno)
    vbucket = bucket.set_state(vbucket_id, VbucketState.ACTIVE)
    return {"vbucket": vbucket_id, "high_seqno": reached, "uuid": vbucket.failover_log.uuid}


def _purge(node: Node, arguments: Arguments) -> Done:
    """Purge tombstones at once, so that readers that were away have missed deletions."""
    bucket = _bucket(node, arguments)
    vbucket = bucket.store.vbucket(_number(arguments, "vbucket"))
    bucket.store.flush()
    bucket.store.compact(vbucket.id, drop_deletes=True)
    return {"vbucket": vbucket.id, "purge_seqno": vbucket.purge_seqno}


def _producers(node: Node, arguments: Arguments) -> Iterator[ClientConnection]:
    """DCP connections by name, or all of them."""
    wanted = arguments.get("name")
    for conn in list(node.connections):
        if conn.dcp is not None and (not wanted or conn.dcp.name == wanted):
            yield conn


def _drop_connection(node: Node, arguments: Arguments) -> Done:
    dropped = 0
    for conn in _producers(node, arguments):
        conn.abort("fault")
        dropped += 1
    return {"dropped": dropped}


def _stall(node: Node, arguments: Arguments) -> Done:
    """Keep the connections open, but send nothing on them, not even noops."""
    until = time.monotonic() + _number(arguments, "seconds", 10)
    stalled = [conn.dcp for conn in _producers(node, arguments) if isinstance(conn.dcp, ProducerRole)]
    for producer in stalled:
        producer.stalled_until = until
    return {"stalled": len(stalled)}


def _slow(node: Node, arguments: Arguments) -> Done:
    """Limit the connections to a number of bytes per second; 0 means full speed again."""
    rate = _number(arguments, "bytes_per_second")
    slowed = [conn.dcp for conn in _producers(node, arguments) if isinstance(conn.dcp, ProducerRole)]
    for producer in slowed:
        producer.slow_bytes_per_s = rate
    return {"slowed": len(slowed)}


def _crash(node: Node, arguments: Arguments) -> Done:
    """Die as by ``kill -9``, a moment after the answer is sent."""
    delay = _number(arguments, "delay_ms", 50) / 1000
    node.loop.call_later(delay, os.kill, os.getpid(), signal.SIGKILL)
    return {"crashing": True}


FAULTS: dict[str, Callable[[Node, Arguments], Done]] = {
    "failover": _failover,
    "rollback": _rollback,
    "purge": _purge,
    "drop-connection": _drop_connection,
    "stall": _stall,
    "slow": _slow,
    "crash": _crash,
}
