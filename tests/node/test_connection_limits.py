"""Silent connections, requests that never end and answers that are not read do no harm to other clients."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.node.front_node import Served, serve
from tests.node.raw import BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread, eventually
from upriver.node.access.auth import LONGEST_DELAY_S, Logins
from upriver.node.access.connection_limits import GRACE_S, SLOWEST_BYTES_PER_S, NewConnections, Shares, Unread
from upriver.node.access.users import Users
from upriver.node.options import Limits
from upriver.protocol.scram import Mechanism, encode_plain
from upriver.wire import Opcode
from upriver.wire.messages import kv, session
from upriver.wire.messages.session import SaslAuth

MIB = 1 << 20


def test_the_oldest_new_connection_of_the_peer_with_the_most_is_closed() -> None:
    new: NewConnections[int] = NewConnections(3)
    assert [new.add(n, peer) for n, peer in enumerate(["good", "bad", "bad"])] == [None] * 3
    assert new.add(3, "bad") == 1
    assert new.add(4, "bad") == 2
    assert new.remove(0, "good")
    assert not new.remove(1, "bad"), "it is closed already"
    assert len(new) == 2


@pytest.fixture(scope="module")
def crowded(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    limits = Limits(max_new_connections=20, max_http_connections=5, silent_s=60.0)
    return make_node(username="ann", password="pw", limits=limits)


def crowd_of(port: int, count: int, stack: ExitStack) -> None:
    for _ in range(count):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))


def test_silent_connections_leave_the_kv_port_open_for_others(crowded: NodeThread) -> None:
    with ExitStack() as stack:
        crowd_of(crowded.port, 60, stack)
        with Raw(crowded.port) as raw:
            raw.hello(*BASIC)
            assert raw.ask(SaslAuth(b"PLAIN", encode_plain("ann", "pw"))).specific == 0
            crowd_of(crowded.port, 60, stack)
            assert raw.ask(session.Noop()).specific == 0, "a connection that has logged in stays open"


def test_silent_connections_leave_the_management_port_open_for_others(crowded: NodeThread) -> None:
    with ExitStack() as stack:
        crowd_of(crowded.node.http_port, 300, stack)
        served = Served(crowded.port, crowded.node.http_port, Path(), "ann", "pw")
        assert served.http("/pools/default/buckets")[0] == 200


def test_connections_that_stay_silent_are_closed(make_node) -> None:  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(silent_s=0.3))
    with Raw(node.port) as raw:
        assert raw.is_closed()
    with Raw(node.node.http_port) as raw:
        assert raw.is_closed()


def test_one_peer_cannot_take_all_places(make_node) -> None:  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(max_connections_per_peer=3))
    with ExitStack() as stack:
        taken = [stack.enter_context(ready(node.port)) for _ in range(3)]
        with Raw(node.port) as extra:
            extra.send(session.Noop())
            assert extra.is_closed()
        assert all(each.ask(session.Noop()).specific == 0 for each in taken)


# ---------------------------------------------------------------------------------------------- memory


def test_unfinished_requests_wait_for_memory_and_the_small_ones_go_first() -> None:
    shares: Shares[str] = Shares(64 * MIB)
    assert shares.ask("a", 30 * MIB, 0.0)
    assert not shares.ask("b", 30 * MIB, 0.0), "a quarter is kept for small ones"
    assert not shares.ask("c", 20 * MIB, 0.0)
    assert shares.ask("small", MIB, 0.0)
    assert shares.overdue(GRACE_S) == []
    assert shares.overdue(GRACE_S + 31 * MIB / SLOWEST_BYTES_PER_S) == ["a", "small"]
    assert shares.release("a", 1.0) == ["c"]
    assert shares.release("c", 1.0) == ["b"]
    assert shares.release("b", 1.0) == shares.release("small", 1.0) == []
    assert shares.used == 0


def test_a_request_larger_than_the_budget_is_served_when_it_is_alone() -> None:
    shares: Shares[str] = Shares(MIB)
    assert shares.ask("a", 30 * MIB, 0.0)
    assert not shares.ask("b", 30 * MIB, 0.0)
    assert shares.release("a", 0.0) == ["b"]


def test_no_request_is_overdue_while_no_other_waits() -> None:
    shares: Shares[str] = Shares(64 * MIB)
    assert shares.ask("a", 20 * MIB, 0.0)
    assert shares.overdue(1e6) == []


def test_the_client_whose_answers_have_waited_longest_is_closed() -> None:
    unread: Unread[str] = Unread(10)
    assert unread.hold("old", 6) == []
    assert unread.hold("new", 3) == []
    assert unread.hold("third", 4) == ["old"]
    unread.release("new")
    assert unread.used == 4


def unfinished(size: int) -> bytes:
    """A SET without its last bytes."""
    return frame(Opcode.SET, extras=bytes(8), key=b"k", value=bytes(size))[:-1024]


def test_unfinished_requests_of_many_connections_take_a_bounded_amount_of_memory(make_node) -> None:  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(unfinished_bytes=8 * MIB))
    with ExitStack() as stack:
        for _ in range(12):
            raw = stack.enter_context(ready(node.port))
            raw.socket.settimeout(0.2)
            with suppress(TimeoutError):  # the node does not read on
                raw.socket.sendall(unfinished(4 * MIB))
        held = node.call(lambda: sum(len(conn._input) for conn in node.node.connections))
        assert held < 12 * MIB
        other = stack.enter_context(ready(node.port))
        small = kv.Set(0, 0, b"small", bytes(100_000))
        assert other.ask(small).specific == 0
        large = kv.Set(0, 0, b"large", bytes(3 * MIB))
        assert other.ask(large).specific == 0, "the unfinished requests are closed, and this one is served"
        eventually(lambda: node.call(lambda: node.node.memory._shares.used <= 8 * MIB))


def test_answers_that_nobody_reads_take_a_bounded_amount_of_memory(make_node) -> None:  # type: ignore[no-untyped-def]
    node = make_node(limits=Limits(unread_bytes=16 * MIB))
    with ExitStack() as stack:
        other = stack.enter_context(ready(node.port))
        assert other.ask(kv.Set(0, 0, b"big", bytes(8 * MIB))).specific == 0
        for _ in range(8):
            greedy = stack.enter_context(ready(node.port))
            greedy.send(kv.Get(b"big"))
        eventually(lambda: node.call(lambda: len(node.node.connections)) < 9)

        def unsent() -> int:
            return sum(conn.transport.get_write_buffer_size() for conn in node.node.connections)

        assert node.call(unsent) <= 24 * MIB
        assert len(other.ask(kv.Get(b"big")).value) == 8 * MIB


# ---------------------------------------------------------------------------------------------- logging in


def test_every_wrong_password_makes_the_next_answer_slower_until_one_is_right() -> None:
    logins = Logins()
    delays = [logins.note("ann", "10.0.0.1", 0.0) for _ in range(12)]
    assert delays == sorted(delays)
    assert delays[0] < 0.1
    assert delays[-1] == LONGEST_DELAY_S
    assert logins.note("bob", "10.0.0.1", 0.0) == delays[0], "others are not slowed"
    assert logins.note("ann", "10.0.0.1", 120.0) == delays[0], "failures are forgotten after a while"
    logins.succeeded("ann", "10.0.0.1")
    assert logins.note("ann", "10.0.0.1", 121.0) == delays[0]
    logins.close()


def test_a_failed_login_is_logged_with_its_user_and_peer(tmp_path: Path) -> None:
    with serve(tmp_path / "data", username="ann", password="pw") as served:
        with Raw(served.kv_port) as raw:
            raw.hello(*BASIC)
            raw.ask(SaslAuth(b"PLAIN", encode_plain("mallory", "guess")))
        served.http("/pools/default", auth=("eve", "guess"))
    log = (tmp_path / "data.log").read_text()
    assert "event=login_failed user=mallory peer=127.0.0.1 mechanism=PLAIN" in log
    assert "event=login_failed user=eve peer=127.0.0.1 mechanism=HTTP" in log
    assert "guess" not in log


def test_a_restart_does_not_reveal_which_users_exist(tmp_path: Path) -> None:
    before, after = (Users(tmp_path / "users.json").credentials("nobody", Mechanism.SCRAM_SHA256) for _ in range(2))
    assert before.salt == after.salt
    assert (tmp_path / "login.key").stat().st_mode & 0o077 == 0


def test_a_users_file_that_is_damaged_changes_nothing_until_it_is_repaired(make_node, caplog) -> None:  # type: ignore[no-untyped-def]
    node = make_node(username="ann", password="pw")
    path: Path = node.node.users.path
    path.write_text("{ damaged")
    with Raw(node.port) as raw:
        raw.hello(*BASIC)
        assert raw.ask(SaslAuth(b"PLAIN", encode_plain("ann", "pw"))).specific == 0
    assert "users_file_damaged" in caplog.text
    path.unlink()


# ---------------------------------------------------------------------------------------------- the management port


@pytest.fixture(scope="module")
def open_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("open") / "data") as served:
        yield served


@pytest.mark.parametrize(("host", "status"), [
    ("evil.example", 403), ("evil.example:8091", 403), ("localhost", 200), ("127.0.0.1:8091", 200), ("[::1]:8091", 200),
    ("[", 403),
])  # fmt: skip
def test_without_users_a_foreign_host_name_is_refused(open_node: Served, host: str, status: int) -> None:
    assert open_node.http("/pools/default/buckets", headers={"Host": host})[0] == status


@pytest.mark.parametrize("sent", [
    b"POST /pools/default/buckets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /pools/default/buckets HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n"
    + b"[" * 100_000,
], ids=["two lengths", "a malformed path", "JSON of 100,000 levels"])  # fmt: skip
def test_nonsense_is_a_bad_request_and_leaves_no_traceback(open_node: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", open_node.http_port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split(b" ")[1] == b"400"


def test_a_node_that_stops_while_clients_are_connected_leaves_no_traceback(tmp_path: Path) -> None:
    with serve(tmp_path / "data") as served, ExitStack() as stack:
        for path in (b"/pools/default/bs/default", b"/pools"):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.http_port), timeout=60))
            connection.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            assert connection.recv(4096)
        stack.pop_all()  # they stay open until the process ends; ``serve`` looks for tracebacks
