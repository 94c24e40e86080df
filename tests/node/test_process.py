"""The node as a process: start, stop, kill, faults, several buckets, and its log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.raw import ALL, Raw, ready
from upriver import testing
from upriver.errors import ConfigError, Status, UpriverError
from upriver.node.options import NodeOptions
from upriver.wire import Opcode
from upriver.wire.constants import StreamEndStatus
from upriver.wire.messages import cluster, dcp, kv, session

OK = Status.SUCCESS


def uuids(port: int, vbucket: int = 0) -> list[int]:
    with ready(port, *ALL) as raw:
        value = raw.ask(cluster.GetFailoverLog(vbucket=vbucket)).value
    return [int.from_bytes(value[at : at + 8], "big") for at in range(0, len(value), 16)]


def test_a_clean_stop_keeps_history_and_a_crash_begins_a_new_branch():
    with testing.node(vbuckets=4) as node:
        with ready(node.kv_port) as raw:
            raw.ask(kv.Set(key=b"k", value=b"kept"))
        before = uuids(node.kv_port)
        assert node.stop() == 0
        node.start()
        assert uuids(node.kv_port) == before
        with ready(node.kv_port) as raw:
            assert raw.ask(kv.Get(b"k")).value == b"kept"
        node.restart(kill=True)
        after = uuids(node.kv_port)
        assert after[1:] == before
        assert after[0] not in before


def test_persisted_writes_survive_kill_9():
    with testing.node(vbuckets=4) as node:
        with ready(node.kv_port) as raw:
            for number in range(500):
                raw.ask(kv.Set(key=b"k%d" % number, value=b"v%d" % number))
            assert raw.ask(cluster.SeqnoPersistence(500)).specific == OK
        node.restart(kill=True)
        with ready(node.kv_port) as raw:
            assert all(raw.ask(kv.Get(b"k%d" % n)).value == b"v%d" % n for n in range(500))


def test_stopping_ends_connections_and_keeps_acknowledged_writes():
    with testing.node(vbuckets=4) as node:
        raw = ready(node.kv_port)
        for number in range(200):
            raw.ask(kv.Set(key=b"k%d" % number, value=b"v"))
        node.stop()
        assert raw.is_closed()
        node.start()
        with ready(node.kv_port) as again:
            assert again.ask(cluster.GetAllVbSeqnos()).value[2:10] == (200).to_bytes(8, "big")


def test_a_broken_bucket_does_not_stop_the_others():
    with testing.node(vbuckets=2) as node:
        broken = node.data / "broken"
        broken.mkdir()
        (broken / "upriver.bucket").write_text("nonsense")
        node.restart()
        with Raw(node.kv_port) as raw:
            raw.hello(*ALL)
            raw.bucket(b"default")
        assert "event=bucket_broken bucket=broken" in node.log.read_text()


def test_a_port_that_is_in_use_is_reported_in_one_line(tmp_path: Path):
    with testing.node(vbuckets=2) as node:
        command = [sys.executable, "-c", "from upriver.cli import main; main()", "serve", "--data", str(tmp_path)]
        command += ["--vbuckets", "2", "--kv-port", str(node.kv_port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert "cannot serve" in done.stderr


def test_a_node_that_cannot_start_says_why(tmp_path: Path):
    with pytest.raises(UpriverError, match="allowed: 1 to 65535"), testing.node(vbuckets=0, data=tmp_path / "d"):
        pass


def test_the_log_has_one_line_per_event_and_no_documents():
    with testing.node(vbuckets=2, log_level="info") as node:
        with ready(node.kv_port) as raw:
            raw.ask(kv.Set(key=b"secret-key", value=b"secret-value"))
        node.stop()
        lines = node.log.read_text().splitlines()
        assert all(" event=" in line for line in lines)
        assert "secret" not in node.log.read_text()
        node.start()


def fault(node: testing.RunningNode, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-c", "from upriver.cli import main; main()", "fault"]
    command += [arguments[0], node.connection_string, *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def node() -> Iterator[testing.RunningNode]:
    """A node that can be made to misbehave."""
    with testing.node(vbuckets=4, enable_faults=True) as made:
        yield made


class TestFaults:
    """Provoked with the command that a tester would use."""

    def fill(self, node: testing.RunningNode, vbucket: int, count: int = 10) -> None:
        with ready(node.kv_port) as raw:
            for number in range(count):
                raw.ask(kv.Set(key=b"k%d" % number, value=b"v", vbucket=vbucket))

    def test_a_failover_loses_the_last_changes_and_readers_have_to_roll_back(self, node: testing.RunningNode):
        self.fill(node, 0)
        old = uuids(node.kv_port)[0]
        assert fault(node, "failover", "--vbucket", "0", "--lose", "3")["high_seqno"] == 7
        assert uuids(node.kv_port)[1] == old
        with ready(node.kv_port) as raw:
            assert raw.ask(kv.Get(b"k9")).specific == Status.KEY_ENOENT
            raw.ask(dcp.Open(0, 1, b"reader"))
            request = dcp.StreamRequest(start_seqno=10, snap_start_seqno=10, snap_end_seqno=10, vbuuid=old)
            answer = raw.ask(request)
            assert (answer.specific, int.from_bytes(answer.value, "big")) == (Status.ROLLBACK, 7)

    def test_a_rollback_ends_open_streams(self, node: testing.RunningNode):
        self.fill(node, 1)
        with ready(node.kv_port) as raw:
            raw.ask(dcp.Open(0, 1, b"live"))
            raw.send(dcp.StreamRequest(vbucket=1))
            fault(node, "rollback", "--vbucket", "1", "--seqno", "5")
            while not isinstance(message := raw.message(), dcp.StreamEnd):
                pass
            assert message.status == StreamEndStatus.STATE_CHANGED

    def test_a_purge_makes_old_readers_start_again(self, node: testing.RunningNode):
        self.fill(node, 2)
        with ready(node.kv_port) as raw:
            raw.ask(kv.Delete(b"k3", vbucket=2))
            raw.ask(kv.Set(key=b"last", value=b"v", vbucket=2))
        assert fault(node, "purge", "--vbucket", "2")["purge_seqno"] == 11

    def test_connections_are_dropped_stalled_and_slowed_by_name(self, node: testing.RunningNode):
        with ready(node.kv_port) as victim, ready(node.kv_port) as other:
            victim.ask(dcp.Open(0, 1, b"victim"))
            other.ask(dcp.Open(0, 1, b"other"))
            assert fault(node, "drop-connection", "--name", "victim") == {"dropped": 1}
            assert victim.is_closed()
            assert fault(node, "slow", "--name", "other", "--bytes-per-second", "100000") == {"slowed": 1}
            assert fault(node, "stall", "--name", "other", "--seconds", "4") == {"stalled": 1}
            began = time.monotonic()  # later than the stall, which began before the command ended
            other.send(dcp.StreamRequest(vbucket=0))
            assert other.receive().opcode == Opcode.DCP_STREAM_REQ
            assert other.receive().opcode == Opcode.DCP_SNAPSHOT_MARKER
            assert time.monotonic() - began > 0.5

    def test_a_crash_kills_the_node(self, node: testing.RunningNode):
        before = uuids(node.kv_port, 3)
        fault(node, "crash")
        node.restart(kill=True)
        assert uuids(node.kv_port, 3)[1:] == before


def test_faults_are_off_unless_they_were_enabled():
    with testing.node(vbuckets=2) as node, pytest.raises(subprocess.CalledProcessError):
        fault(node, "crash")


def test_nobody_else_on_the_machine_reads_passwords_or_documents(monkeypatch):
    """They are neither on the command line nor in files, not even in files of an earlier run."""
    monkeypatch.setenv("UPRIVER_PASSWORD", "somebody else's")
    with testing.node(vbuckets=4, username="ann", password="tell-nobody") as node:
        command = Path(f"/proc/{node.pid}/cmdline").read_bytes()
        assert b"ann" in command
        assert b"tell-nobody" not in command
        with Raw(node.kv_port) as raw:
            raw.hello(*ALL)
            assert raw.ask(session.SaslAuth(b"PLAIN", b"\0ann\0tell-nobody")).specific == OK
        files = [node.data / "default" / name for name in ("data.mdb", "lock.mdb")]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
        files[0].chmod(0o644)
        node.restart()
        assert files[0].stat().st_mode & 0o777 == 0o600


def test_a_port_that_does_not_exist_is_refused_and_no_other_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-port is 99999"):
        NodeOptions(tmp_path, kv_port=99999)
