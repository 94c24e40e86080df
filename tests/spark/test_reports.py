"""The side channel: what a task says counts only if nobody else read the same part."""

from __future__ import annotations

import socket

import pytest

from upriver.spark.planning import Known
from upriver.spark.reports import Channel, ReportDesk, Reporter, Summary, Unheard


@pytest.fixture
def desk():
    made = ReportDesk("127.0.0.1")
    yield made
    made.close()


def learned(desk: ReportDesk) -> Known:
    known = Known()
    desk.learn(known)
    return known


def test_a_report_reaches_the_driver(desk):
    reporter = Reporter(desk.open_plan(1)[0])
    reporter.begin()
    reporter.end(Summary([(3, 0xA, 17)], [(4, 2)], rows=1000, size_bytes=64_000))
    known = learned(desk)
    assert (known.complete, known.epochs) == ({3: (0xA, 17)}, {4: 2})
    assert 64 <= desk.row_bytes < 1024


def test_a_second_reader_of_the_same_part_makes_both_reports_worthless(desk):
    channel = desk.open_plan(1)[0]
    first, second = Reporter(channel), Reporter(channel)
    first.begin()
    first.end(Summary([(3, 0xA, 17)]))
    second.begin()
    assert learned(desk).complete == {}
    second.end(Summary([(3, 0xA, 17)]))
    assert learned(desk).complete == {}


def test_reports_on_an_older_batch_are_refused(desk):
    late = Reporter(desk.open_plan(1)[0])
    desk.open_plan(1)
    late.begin()
    late.end(Summary([(3, 0xA, 17)]))
    assert learned(desk).complete == {}


def test_nobody_listening_is_harmless_until_somebody_was_heard():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # so that nobody else gets the port; connections are refused all the same
        port = deaf.getsockname()[1]
        quiet = Reporter(Channel("127.0.0.1", port, "plan", 0, required=False))
        quiet.begin()
        quiet.end(Summary([(3, 0xA, 17)]))
        with pytest.raises(Unheard, match="cannot tell the driver"):
            Reporter(Channel("127.0.0.1", port, "plan", 0, required=True)).begin()


def test_nonsense_does_not_stop_the_desk(desk):
    channel = desk.open_plan(1)[0]
    for nonsense in (b"\n", b"{}\n", b"GET / HTTP/1.0\r\n\r\n", b'{"plan": 3}\n'):
        with socket.create_connection((desk.host, desk.port)) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(10) == b""
    reporter = Reporter(channel)
    reporter.begin()
    reporter.end(Summary([(1, 2, 3)]))
    assert learned(desk).complete == {1: (2, 3)}
