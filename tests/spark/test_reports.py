"""Reports: what tasks tell the driver about a batch, however many attempts it took."""

from __future__ import annotations

import socket

import pytest

from upriver.spark.reader.planning import Known
from upriver.spark.reader.reports import Channel, DriverUnreachable, Reporter, ReportServer, TaskSummary


@pytest.fixture
def server():
    made = ReportServer("127.0.0.1")
    yield made
    made.close()


def learned(server: ReportServer) -> Known:
    known = Known()
    server.learn(known)
    return known


def test_a_report_reaches_the_driver(server):
    reporter = Reporter(server.open_plan(1)[0])
    reporter.begin()
    reporter.end(TaskSummary([(3, 0xA, 17)], [(4, 2)], 1000, 64_000))
    known = learned(server)
    assert (known.complete, known.unread) == ({3: (0xA, 17)}, {4: 2})
    assert server.row_bytes == 64


def test_larger_rows_count_at_once_and_smaller_ones_gradually(server):
    for rows, size, weight in ((1000, 100_000, 100), (1000, 900_000, 900), (1000, 100_000, 500), (1, 10**6, 10_495)):
        attempts(server, TaskSummary(rows=rows, size_bytes=size))
        assert server.row_bytes == weight


def attempts(server: ReportServer, *summaries: TaskSummary) -> Known:
    """A batch of one task with several attempts; it is unknown whose rows Spark keeps."""
    channel = server.open_plan(1)[0]
    reporters = [Reporter(channel) for _ in summaries]
    for reporter in reporters:
        reporter.begin()
    for reporter, summary in zip(reporters, summaries, strict=True):
        reporter.end(summary)
    return learned(server)


def test_reports_of_a_second_attempt_do_not_count_while_a_third_may_go_unheard(server):
    assert attempts(server, TaskSummary([(3, 0xA, 17)]), TaskSummary([(3, 0xA, 17)])).complete == {}


def test_a_vbucket_is_complete_if_all_attempts_say_so_and_unread_if_any_does(server):
    attempts(server, TaskSummary())
    known = attempts(
        server, TaskSummary([(3, 0xA, 17), (5, 0xA, 9)], [(4, 2)]), TaskSummary([(3, 0xA, 17)], [(4, 0), (6, 1)])
    )
    assert known.complete == {3: (0xA, 17)}
    assert known.unread == {4: 0, 6: 1}


def test_reports_on_an_older_batch_are_refused(server):
    late = Reporter(server.open_plan(1)[0])
    server.open_plan(1)
    late.begin()
    late.end(TaskSummary([(3, 0xA, 17)]))  # it never began for this server, so it does not count
    assert learned(server).complete == {}


def test_an_unreachable_driver_is_harmless_until_a_report_has_arrived():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # keeps the port from others; connections are still refused
        port = deaf.getsockname()[1]
        quiet = Reporter(Channel("127.0.0.1", port, "plan", 0, required=False))
        quiet.begin()
        quiet.end(TaskSummary([(3, 0xA, 17)]))
        with pytest.raises(DriverUnreachable, match="vbucket 5 could not be read; executors must be able to connect"):
            quiet.end(TaskSummary(unread=[(5, 17)]))
        with pytest.raises(DriverUnreachable, match="cannot report to the driver"):
            Reporter(Channel("127.0.0.1", port, "plan", 0, required=True)).begin()


def test_nonsense_does_not_stop_the_server(server):
    channel = server.open_plan(1)[0]
    for nonsense in (b"\n", b"{}\n", b"GET / HTTP/1.0\r\n\r\n", b'{"plan": 3}\n'):
        with socket.create_connection((server.host, server.port)) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(10) == b""
    reporter = Reporter(channel)
    reporter.begin()
    reporter.end(TaskSummary([(1, 2, 3)]))
    assert learned(server).complete == {1: (2, 3)}
