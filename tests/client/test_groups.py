"""Consumer groups: every vbucket has one reader, also while members come, go and die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.group_member import claim_and_let_go, shared_value, stop_in_the_middle
from upriver.client.blocking import Database
from upriver.client.groups import Group, SharedFile, SharedRow, read_as_member, share_of
from upriver.client.positions import Positions
from upriver.errors import CheckpointError, CorruptCheckpoint, ForeignCheckpoint
from upriver.protocol.position import Position
from upriver.testing import RunningNode


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
    reading: dict[str, tuple[float, set[int]]] = {}
    for name, action in script:
        clock[0] += 4.0
        if action == "beat":
            reading[name] = clock[0], set(members[name].beat(16).vbuckets)
        else:
            reading.pop(name, None)
            if action == "leave":
                members[name].leave()
        read = [share for since, share in reading.values() if clock[0] - since < 10]  # the others must not save
        assert sum(map(len, read)) == len(set().union(*read)), "a vbucket is read twice"
    survivors = list(members.values())[:2]
    for _ in range(7):
        clock[0] += 4.0
        held = [vb for group in survivors for vb in group.beat(16).vbuckets]
    assert sorted(held) == list(range(16))


def positions_of(seqno: int) -> Positions:
    return Positions({vb: Position(1, seqno, seqno, seqno) for vb in range(4)}, "u", 4)


def pair(shared: Any, clock: list[float]) -> tuple[Group, Group]:
    one, two = (Group(shared, member=name, ttl_s=10, now=lambda: clock[0]) for name in ("old", "new"))
    return one, two


def test_a_member_that_was_given_up_cannot_overwrite_its_successor() -> None:
    clock, shared = [0.0], InMemory()
    old, new = pair(shared, clock)
    old.beat(4)
    old.save(positions_of(5))
    assert new.beat(4).vbuckets == ()
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


def test_a_member_that_comes_back_to_its_old_share_must_begin_again() -> None:
    """Its successor came and died meanwhile: the vbuckets are the same, but the saved positions have moved."""
    clock, shared = [0.0], InMemory()
    old, new = pair(shared, clock)
    before = old.beat(4)
    new.beat(4)
    clock[0] = 60.0
    new.beat(4)
    new.save(positions_of(9))
    new.leave()
    after = old.beat(4)
    assert after.vbuckets == before.vbuckets
    assert after.term != before.term


def test_clocks_of_other_machines_do_not_matter() -> None:
    shared = InMemory()
    fast, slow = (Group(shared, member=n, ttl_s=10, now=lambda at=at: at) for n, at in (("a", 1e9), ("b", -1e9)))
    for _ in range(3):
        shares = fast.beat(4).vbuckets, slow.beat(4).vbuckets
    assert shares == ((0, 1), (2, 3))


def test_saving_is_a_sign_of_life() -> None:
    clock, shared = [0.0], InMemory()
    old, new = pair(shared, clock)
    old.beat(4)
    for clock[0] in range(0, 100, 8):
        old.save(positions_of(1))
        assert new.beat(4).vbuckets == ()


def test_a_process_that_begins_again_under_its_name_replaces_the_one_before() -> None:
    shared = InMemory()
    before = Group(shared, member="host-1")
    before.beat(4)
    again = Group(shared, member="host-1")
    assert again.beat(4).vbuckets == (0, 1, 2, 3)
    with pytest.raises(CheckpointError, match="lost its vbuckets"):
        before.save(positions_of(1))
    third = Group(shared, member="host-1")
    third.beat(4)
    with pytest.raises(CheckpointError, match="another process has joined"):
        again.beat(4)


def test_a_group_of_another_bucket_is_not_saved_over() -> None:
    shared = InMemory()
    group = Group(shared)
    group.beat(4)
    group.save(positions_of(1))
    with pytest.raises(ForeignCheckpoint):
        group.save(Positions(positions_of(1).by_vbucket, "another", 4))


@pytest.mark.parametrize("damaged", [b"{", b"[]", b'{"members": 3}', b'{"members": {"a": {"held": [1]}}}'])
def test_a_damaged_group_says_what_to_do(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "group.json").write_bytes(damaged)
    with pytest.raises(CorruptCheckpoint, match=r"group\.json .* delete it"):
        Group(SharedFile(tmp_path / "group.json")).beat(4)
    (tmp_path / "group.db").write_bytes(b"not a database, but long enough to be taken for one" * 20)
    with pytest.raises(CorruptCheckpoint, match="delete the file"):
        SharedRow(tmp_path / "group.db")
    with pytest.raises(CheckpointError, match="cannot lock"):
        SharedFile(tmp_path / "nowhere" / "group.json").update(dict)


KINDS = ["file", "sqlite", "bucket"]


@pytest.fixture(params=KINDS)
def shared(request: pytest.FixtureRequest, tmp_path: Path, server: RunningNode) -> Any:
    return shared_value(request.param, tmp_path, server.connection_string)


def test_two_members_share_the_vbuckets_wherever_membership_is_kept(shared: Any) -> None:
    one, two = Group(shared, member="one"), Group(shared, member="two")
    assert one.beat(8).vbuckets == tuple(range(8))
    assert two.beat(8).vbuckets == ()
    assert one.beat(8).vbuckets == (0, 1, 2, 3)
    assert two.beat(8).vbuckets == (), "the first may still be reading them"
    assert one.beat(8).vbuckets == (0, 1, 2, 3)
    assert two.beat(8).vbuckets == (4, 5, 6, 7)
    one.leave()
    assert two.beat(8).vbuckets == tuple(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_claim_at_once_never_read_the_same_vbucket(
    kind: str, tmp_path: Path, server: RunningNode
) -> None:
    fork = multiprocessing.get_context("fork")
    arguments = (kind, tmp_path, server.connection_string)
    members = [fork.Process(target=claim_and_let_go, args=(*arguments, f"m{n}", 25), daemon=True) for n in range(4)]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
    assert [member.exitcode for member in members] == [0] * 4
    assert not list(tmp_path.glob("*.reader"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_process_that_wakes_up_cannot_save_over_its_successor(
    kind: str, tmp_path: Path, server: RunningNode, db: Database
) -> None:
    db.set_many({b"stopped:%d" % n: b"x" for n in range(100)})
    sleeper = multiprocessing.get_context("fork").Process(
        target=stop_in_the_middle, args=(kind, tmp_path, server.connection_string)
    )
    sleeper.start()
    while not (tmp_path / "taken").exists():
        time.sleep(0.01)
    with closing_member(db, kind, tmp_path, server) as (group, batches):
        for feed, batch in batches:
            feed.confirm()
            if sum(p.seqno for p in feed.positions().values()) >= 100 and batch.num_rows:
                break
        saved = group.load()
        os.kill(sleeper.pid or 0, signal.SIGCONT)
        sleeper.join(60)
        assert sleeper.exitcode == 7, "its save should have been refused"
        assert saved is not None
        assert group.load() == saved


@contextmanager
def closing_member(db: Database, kind: str, at: Path, server: RunningNode) -> Iterator[tuple[Group, Any]]:
    group = Group(shared_value(kind, at, server.connection_string), member="successor", ttl_s=0.5)
    batches = read_as_member(db, group, rows=10)
    try:
        yield group, batches
    finally:
        batches.close()


def test_a_member_that_took_too_long_goes_on_with_another_feed(db: Database, tmp_path: Path) -> None:
    db.set_many({b"long:%d" % n: b"x" for n in range(50)})
    shared = SharedFile(tmp_path / "group.json")
    slow, other = Group(shared, member="slow", ttl_s=0.3), Group(shared, member="other", ttl_s=0.3)
    refused, feeds, keys = 0, set(), set()
    for feed, batch in read_as_member(db, slow, rows=10):
        feeds.add(feed)
        if not refused:
            other.beat(8)
            time.sleep(0.4)
            other.beat(8)
            other.leave()
        try:
            feed.confirm()
        except CheckpointError:
            refused += 1
            continue
        keys |= set(batch["key"].to_pylist())
        if len([key for key in keys if key.startswith(b"long:")]) == 50:
            break
    assert (refused, len(feeds)) == (1, 2)


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
