"""Consumer groups: every vbucket has one reader, also while members come, go and die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.blocking import Database
from upriver.client.groups import Group, SharedDocument, SharedFile, SharedRow, read_as_member, share_of
from upriver.client.positions import Positions, Standpoint
from upriver.errors import CheckpointError
from upriver.model import Position


class InMemory:
    def __init__(self) -> None:
        self.value: dict[str, Any] = {}

    def update(self, change: Any) -> dict[str, Any]:
        self.value = change(self.value)
        return self.value


@given(st.integers(1, 40), st.integers(1, 1024))
def test_shares_cover_everything_once(members: int, vbuckets: int) -> None:
    names = [f"{n:03d}" for n in range(members)]
    shares = [share_of(names, name, vbuckets) for name in names]
    assert [vb for share in shares for vb in share] == list(range(vbuckets))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["beat", "die", "leave"])), max_size=40))
def test_no_vbucket_ever_has_two_readers(script: list[tuple[str, str]]) -> None:
    clock, shared = [0.0], InMemory()
    members = {name: Group(shared, member=name, ttl_s=10, now=lambda: clock[0]) for name in "abcd"}
    reading: dict[str, set[int]] = {}
    for name, action in script:
        clock[0] += 4.0
        if action == "beat":
            reading[name] = set(members[name].beat(16).vbuckets)
        else:
            reading.pop(name, None)
            if action == "leave":
                members[name].leave()
        alive = [set(entry["held"]) for entry in shared.value.get("members", {}).values()]
        assert sum(map(len, alive)) == len(set().union(*alive)), "a vbucket is held twice"
    survivors = list(members.values())[:2]
    for _ in range(4):
        clock[0] += 4.0
        held = [vb for group in survivors for vb in group.beat(16).vbuckets]
    assert sorted(held) == list(range(16))


def positions_of(seqno: int) -> Positions:
    return Positions({vb: Standpoint(Position(1, seqno, seqno, seqno)) for vb in range(4)}, "u", 4)


def test_a_member_that_was_given_up_cannot_overwrite_its_successor() -> None:
    clock, shared = [0.0], InMemory()
    old, new = (Group(shared, member=name, ttl_s=10, now=lambda: clock[0]) for name in ("old", "new"))
    old.beat(4)
    old.save(positions_of(5))
    clock[0] = 60.0
    assert new.beat(4).vbuckets == (0, 1, 2, 3)
    new.save(positions_of(9))
    with pytest.raises(CheckpointError, match="silent too long"):
        old.save(positions_of(6))
    old.beat(4)  # is back, but holds nothing before the other has let go
    old.save(positions_of(6))
    found = new.load()
    assert found is not None
    assert found[0].seqno == 9


@pytest.fixture(params=["file", "sqlite", "bucket"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, db: Database) -> Any:
    if request.param == "file":
        return SharedFile(tmp_path / "group.json")
    return SharedRow(tmp_path / "group.db") if request.param == "sqlite" else SharedDocument(db, tmp_path.name)


def test_two_members_share_the_vbuckets_wherever_membership_is_kept(shared: Any) -> None:
    one, two = Group(shared, member="one"), Group(shared, member="two")
    assert one.beat(8).vbuckets == tuple(range(8))
    assert two.beat(8).vbuckets == ()
    assert one.beat(8).vbuckets == (0, 1, 2, 3)
    assert two.beat(8).vbuckets == (4, 5, 6, 7)
    one.leave()
    assert two.beat(8).vbuckets == tuple(range(8))


def test_members_read_all_changes_between_them(db: Database, tmp_path: Path) -> None:
    db.set_many({b"group:%d" % n: b"%d" % n for n in range(200)})
    shared = SharedFile(tmp_path / "group.json")
    keys: set[bytes] = set()
    waiting = Group(shared, member="zz")
    for feed, batch in read_as_member(db, Group(shared, member="aa", ttl_s=0.6), linger_s=0.001):
        keys |= set(batch["key"].to_pylist())
        feed.confirm()
        if len([key for key in keys if key.startswith(b"group:")]) == 200:
            break
    assert waiting.beat(db.topology.vbuckets).vbuckets == tuple(range(db.topology.vbuckets)), "the first one has left"
    found = waiting.load()
    assert found is not None
    assert sum(position.seqno for position in found.values()) > 0
