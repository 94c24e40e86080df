"""Scripted producers behind real sockets: bytes one at a time, cuts anywhere, TLS, and any cluster map."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.scripted_producer import ScriptedProducer, marker, mutation
from upriver.wire import Message, Opcode
from upriver.wire.constants import StreamEndStatus
from upriver.wire.messages.cluster import GetManifest, ObserveSeqno, ObserveSeqnoResponse
from upriver.wire.messages.dcp import DcpNoop, StreamEnd, StreamRequest
from upriver.wire.messages.session import Stat, StatResponse, ValueResponse

MANIFEST = b'{"uid":"0","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}'
VBUCKETS, SEQNOS = 2, 40
Speak = Callable[["Peer", StreamRequest], bytes]


class Peer(ScriptedProducer):
    """A scripted producer for a socket; it also answers manifest, statistics and OBSERVE_SEQNO."""

    bucket_type, persisted = b"persistent", 0

    def __init__(self, config: bytes, speak: Speak) -> None:
        super().__init__(config)
        self.speak = speak

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, GetManifest):
            yield ValueResponse.under(Opcode.COLLECTIONS_GET_MANIFEST)(MANIFEST, opaque=message.opaque)
        elif isinstance(message, Stat):
            yield StatResponse(b"ep_bucket_type", self.bucket_type, opaque=message.opaque)
            yield StatResponse(opaque=message.opaque)
        elif isinstance(message, ObserveSeqno):
            here = 0, message.vbucket, message.vbuuid, self.persisted, SEQNOS
            yield ObserveSeqnoResponse(*here, opaque=message.opaque)
        else:
            yield from super()._answer(message)


class Behaviour:
    """How the network behaves: each connection is cut after some bytes, and the next one gets further."""

    def __init__(self, piece: int = 0, cut_after: list[int] | None = None) -> None:
        self.piece, self.cut_after = piece, list(cut_after or [])

    def send(self, sock: socket.socket, data: bytes, limit: int | None) -> int | None:
        for at in range(0, len(data), self.piece or len(data) or 1):
            part = data[at : at + (self.piece or len(data))]
            if limit is not None:
                part, limit = part[:limit], limit - len(part)
            sock.sendall(part)
            if limit is not None and limit <= 0:
                raise ConnectionError
        return limit


def one_node(port: int) -> dict[str, Any]:
    """How the node describes itself in the cluster map."""
    return {"hostname": "127.0.0.1", "services": {"kv": port}}


@contextmanager
def serving(
    speak: Speak,
    behaviour: Behaviour,
    *,
    describe: Callable[[int], dict[str, Any]] = one_node,
    tls: ssl.SSLContext | None = None,
    make: type[Peer] = Peer,
    **config: Any,
) -> Iterator[str]:
    """A server for any number of connections, with a thread for each."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server_map = {"serverList": [f"127.0.0.1:{port}"], "vBucketMap": [[0]] * VBUCKETS}
    told = json.dumps({"rev": 1, "nodesExt": [describe(port)], "vBucketServerMap": server_map, **config}).encode()

    def talk(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer, limit, feeding = make(told, speak), None, False
        with sock:
            try:
                sock = tls.wrap_socket(sock, server_side=True) if tls else sock
                while data := sock.recv(65536):
                    answer = peer.receive(data)
                    if not feeding and peer.seen_of(Opcode.DCP_OPEN):
                        feeding = True
                        limit = behaviour.cut_after.pop(0) if behaviour.cut_after else None
                    limit = behaviour.send(sock, answer, limit)
                    while peer.requests:
                        limit = behaviour.send(sock, speak(peer, peer.requests.pop(0)), limit)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(sock,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"{'couchbases' if tls else 'couchbase'}://127.0.0.1:{port}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()


def everything(peer: Peer, request: StreamRequest) -> bytes:
    """All changes after the requested seqno, in snapshots of ten, with noops in between, then the end."""
    out = peer.accepts(request)
    for first in range(request.start_seqno + 1, SEQNOS + 1, 10):
        last = min(first + 9, SEQNOS)
        out += marker(request, first - 1 if first > 1 else 0, last) + DcpNoop(opaque=first).encode()
        for n in range(first, last + 1):
            out += mutation(request, n, b"%d:%d" % (request.vbucket, n), b"v" * (n % 7))
    return out + StreamEnd(StreamEndStatus.OK, vbucket=request.vbucket, opaque=request.opaque).encode()
