"""The tables of docs/protocol/ say what the code does: codes, flags, sizes and the examples of decisions."""

from __future__ import annotations

import itertools
import re
from enum import IntEnum, IntFlag

import pytest

from tests.code_index import ROOT
from upriver.errors import Status
from upriver.model import Claim, FailoverEntry, FailoverLog, VbucketState, vbucket_of
from upriver.protocol.history import History, RollbackTo, decide
from upriver.protocol.producer import controls
from upriver.wire.constants import (
    DCP_OPCODES,
    Feature,
    MarkerFlag,
    Opcode,
    OpenFlag,
    PathFlag,
    StreamEndStatus,
    StreamFlag,
    SystemEventId,
)
from upriver.wire.keys import encode_leb128
from upriver.wire.messages import dcp

PAGES = ROOT / "docs" / "protocol"
NEVER_ACCEPTED = {Feature.DATATYPE, Feature.TLS, Feature.TCP_DELAY, Feature.OLD_COLLECTIONS, Feature.PITR}


def section(page: str, anchor: str) -> str:
    """The text from an anchor to the next one."""
    text = (PAGES / page).read_text()
    return text[text.index(f'<a id="{anchor}"></a>') + 1 :].split("<a id=", 1)[0]


def rows(page: str, anchor: str) -> list[list[str]]:
    """The cells of the tables in a section, without their heads."""
    lines = re.findall(r"^\| (.+) \|$", section(page, anchor), re.MULTILINE)
    return [[cell.strip() for cell in re.split(r" \| ?|\| ", line)] for line in lines]


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def codes(page: str, anchor: str) -> dict[int, str]:
    """Number and name from all pairs of cells of which the first is a number."""
    found = {}
    for row in rows(page, anchor):
        for number, name in itertools.pairwise(row):
            if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", number):
                found[int(number, 0)] = plain(name)
    return found


def names(enum: type[IntEnum] | type[IntFlag]) -> dict[int, str]:
    return {int(member): plain(member.name or "") for member in enum}


def test_every_status_is_listed_under_its_name() -> None:
    assert codes("status.md", "codes").items() >= names(Status).items()


@pytest.mark.parametrize(("page", "anchor", "enum"), [
    ("open.md", "flags", OpenFlag), ("stream-request.md", "flags", StreamFlag),
    ("messages.md", "snapshot-marker", MarkerFlag), ("snapshots.md", "stream-end", StreamEndStatus),
])  # fmt: skip
def test_every_flag_is_listed_under_its_name(page: str, anchor: str, enum: type[IntEnum]) -> None:
    assert codes(page, anchor).items() >= names(enum).items()


def test_every_feature_of_hello_is_listed() -> None:
    listed = codes("session.md", "hello")
    assert {code: name for code, name in names(Feature).items() if code not in NEVER_ACCEPTED} == listed


def test_every_dcp_opcode_is_listed_under_its_name() -> None:
    listed = codes("messages.md", "overview")
    assert {code: name for code, name in listed.items() if code >= Opcode.DCP_OPEN} == {
        int(opcode): plain(opcode.name.removeprefix("DCP_")) for opcode in Opcode if opcode in DCP_OPCODES
    }


def test_every_control_is_listed() -> None:
    listed = {name for row in rows("open.md", "controls") for name in re.findall(r"`(\w+)`", row[0])}
    known = next(value for name, value in vars(controls).items() if isinstance(value, dict) and "enable_noop" in value)
    assert listed == set(known)


def test_system_events_and_vbucket_states_have_the_numbers_of_the_page() -> None:
    listed = {
        int(row[1]): plain(row[0].split(" ")[0]) for row in rows("collections.md", "system-events") if row[1].isdigit()
    }
    assert listed == names(SystemEventId)
    states = re.search(r"1 active, 2 replica, 3 pending, 4 dead", section("messages.md", "set-vbucket-state"))
    assert states
    assert names(VbucketState) == {1: "active", 2: "replica", 3: "pending", 4: "dead"}


def test_path_flags_have_the_numbers_of_the_page() -> None:
    listed = {int(row[0], 16) for row in rows("subdoc.md", "flags") if row[0].startswith("0x")}
    assert listed == set(names(PathFlag))


def test_the_window_is_charged_as_the_page_says() -> None:
    text = section("flow.md", "window")
    sizes = {
        "| MUTATION | 55 ": len(dcp.DcpMutation(1, 1, key=b"k").encode()) - 1,
        "| DELETION version 1, 2 | 42, 45 ": len(dcp.DcpDeletion(1, 1, key=b"k").encode()) - 1,
        "| EXPIRATION | 44 ": len(dcp.Expiration(1, 1, key=b"k").encode()) - 1,
        "| COMMIT, ABORT | 40 ": len(dcp.Commit(1, 1, key=b"k").encode()) - 1,
        "| SNAPSHOT_MARKER 1, 2.0, 2.2 | 44, 61, 77 |": len(dcp.SnapshotMarker(0, 1, 1).encode()),
        "| STREAM_END, OSO_SNAPSHOT | 28 |": len(dcp.StreamEnd(0).encode()),
        "| SET_VBUCKET_STATE | 25 |": len(dcp.SetVbucketState(1).encode()),
        "| SEQNO_ADVANCED | 32 |": len(dcp.SeqnoAdvanced(1).encode()),
    }
    for line, size in sizes.items():
        assert line in text
        assert re.search(rf"\| {size}\b", line)


def test_collection_ids_are_encoded_as_the_page_shows() -> None:
    for row in rows("framing.md", "key-prefix"):
        for number, shown in zip(row[::2], row[1::2], strict=True):
            if number.startswith("0x"):
                assert encode_leb128(int(number, 16)) == bytes.fromhex(shown)


def test_keys_have_the_vbuckets_of_the_page() -> None:
    text = section("kv.md", "clocks")
    examples = re.findall(r"`(\w+)` (\d+)[,;]", text)
    assert len(examples) == 6
    assert all(vbucket_of(key.encode(), 1024) == int(number) for key, number in examples)


def test_the_rollback_decision_is_that_of_the_page() -> None:
    branches = {"A": 0xA, "B": 0xB, "C": 0xC, "unknown": 0xDEAD, "0": 0}
    log = FailoverLog(tuple(FailoverEntry(branches[name], at) for name, at in (("C", 900), ("B", 500), ("A", 0))))
    examples = [row for row in rows("rollback.md", "examples") if row[0].isdigit()]
    assert len(examples) == 24
    for start, branch, snap_start, snap_end, besides, result in examples:
        said = dict(re.findall(r"(purge|known|coll_high) (\d+)", besides))
        high = int(said["coll_high"]) if "coll_high" in said else None
        history = History(log, 1200, int(said.get("purge", 0)), high)
        claim = Claim(branches[branch], int(start), int(snap_start), int(snap_end))
        decision = decide(history, claim, strict="strict" in besides, known_purge_seqno=int(said.get("known", 0)))
        expected = result.split()[0]
        assert (str(decision.seqno) if isinstance(decision, RollbackTo) else "accept") == expected, (
            start,
            branch,
            besides,
        )
