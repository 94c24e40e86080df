"""Loops left or cancelled anywhere: sockets, tasks and threads are gone, and stderr is empty."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

import upriver
from upriver.client.blocking import Database, connect
from upriver.errors import LocalProtocolError, UpriverError
from upriver.testing import RunningNode


@pytest.fixture(scope="module", autouse=True)
def _documents(server: RunningNode) -> None:
    with connect(server.connection_string) as db:
        db.set_many({b"leaving:%d" % n: b"x" * 200 for n in range(500)})


def open_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


@pytest.fixture
def nothing_left(server: RunningNode) -> Any:
    """Afterwards there are no more sockets and threads than before."""
    gc.collect()
    sockets, threads = open_sockets(), set(threading.enumerate())
    yield
    gc.collect()
    assert open_sockets() - sockets == set()
    assert {t for t in set(threading.enumerate()) - threads if not t.name.startswith("asyncio_")} == set()


def run(scenario: Coroutine[Any, Any, None], fast: bool) -> None:
    """Run it; raise errors that asyncio would only log."""
    complaints: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        await scenario
        gc.collect()
        await asyncio.sleep(0.01)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, others = await asyncio.wait(others, timeout=10)  # to end; on a busy machine that may take a moment
        assert others == set(), "tasks are left"

    (uvloop.run if fast else asyncio.run)(watched())
    assert complaints == []


LOOPS = pytest.mark.parametrize("fast", [False, True], ids=["asyncio", "uvloop"])


@LOOPS
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("after", [1, 7, 400])
def test_breaking_out_of_a_loop_closes_the_feed(server: RunningNode, fast: bool, after: int) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            seen = 0
            async for _ in db.changes():
                seen += 1
                if seen == after:
                    break
            async for _ in db.change_batches(rows=10):
                break

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_an_error_of_the_caller_passes_through_and_closes_the_feed(server: RunningNode, fast: bool) -> None:
    async def read() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            async for _ in db.changes():
                raise ZeroDivisionError

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await read()

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_a_reader_can_be_cancelled_at_any_moment(server: RunningNode, fast: bool) -> None:
    async def read(connection: str) -> None:
        async with upriver.aio.connect(connection) as db:
            async for _ in db.changes():
                pass

    async def scenario() -> None:
        for delay in [0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.2]:
            reader = asyncio.create_task(read(server.connection_string))
            await asyncio.sleep(delay)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_a_request_that_is_cancelled_does_not_mix_up_the_answers_of_others(server: RunningNode, fast: bool) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            asked = [asyncio.create_task(db.get(f"leaving:{n}")) for n in range(100)]
            await asyncio.sleep(0)
            for task in asked[::3]:
                task.cancel()
            found = await asyncio.gather(*asked, return_exceptions=True)
            kept = [n for n in range(100) if n % 3]
            assert [found[n].key for n in kept if not isinstance(found[n], BaseException)] == [
                b"leaving:%d" % n for n in kept
            ]

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_inside_async_with_a_loop_may_be_left_and_another_goes_on(server: RunningNode, fast: bool) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            everything = sorted([(c.vbucket, c.seqno) async for c in db.changes(end="now")])
            seen = []
            async with db.changes(end="now") as feed:
                while len(seen) < len(everything):
                    async for change in feed:
                        seen.append((change.vbucket, change.seqno))
                        if len(seen) % 100 == 0:
                            break
                    await asyncio.sleep(0.001)  # the loop that was left is finalized here
            assert sorted(seen) == everything

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_a_closed_feed_says_so_and_still_knows_its_position(server: RunningNode, fast: bool) -> None:
    async def close_inside(db: upriver.aio.AsyncDatabase) -> None:
        async for _ in db.changes():
            await db.close()

    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            feed = db.changes(end="now")
            everything = [change async for change in feed]
            assert sum(position.seqno for position in feed.positions().values()) >= len(everything)
            with pytest.raises(LocalProtocolError, match="closed"):
                async for _ in feed:
                    pass
            with pytest.raises(LocalProtocolError, match="closed while it was being read"):
                await close_inside(db)

    run(scenario(), fast)


@LOOPS
@pytest.mark.usefixtures("nothing_left")
def test_a_connection_that_cannot_be_made_leaves_nothing_behind(server: RunningNode, fast: bool) -> None:
    async def scenario() -> None:
        with pytest.raises(UpriverError):
            async with upriver.aio.connect(server.connection_string, bucket="nope"):
                pass
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
            address = f"couchbase://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(UpriverError):
                async with upriver.aio.connect(address, request_timeout_s=0.1):
                    pass

    run(scenario(), fast)


def leave_changes(db: Database) -> None:
    for count, _ in enumerate(db.changes(), 1):
        if count == 7:
            break


def leave_batches(db: Database) -> None:
    for _ in db.change_batches(rows=10):
        break


def fail(db: Database) -> None:
    def read() -> None:
        for _ in db.changes():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


def never_read(db: Database) -> None:
    db.changes()
    with db.changes():
        pass


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("leave", [leave_changes, leave_batches, fail, never_read])
def test_leaving_a_blocking_loop_closes_its_sockets(server: RunningNode, leave: Callable[[Database], None]) -> None:
    with connect(server.connection_string) as db:
        before = open_sockets()
        leave(db)
        gc.collect()
        assert len(open_sockets()) <= len(before)
        assert db.get("leaving:1").value


@pytest.mark.usefixtures("nothing_left")
def test_a_closed_blocking_feed_says_so_and_still_knows_its_position(server: RunningNode) -> None:
    with connect(server.connection_string) as db:
        with db.changes(end="now") as feed:
            assert list(feed)
        assert sum(position.seqno for position in feed.positions().values()) > 0
        with pytest.raises(LocalProtocolError, match="closed"):
            next(iter(feed))
        endless = db.changes()
        changes = iter(endless)
        next(changes)
        endless.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            list(changes)


@pytest.mark.usefixtures("nothing_left")
def test_a_blocking_connection_that_cannot_be_made_leaves_nothing_behind(server: RunningNode) -> None:
    with pytest.raises(UpriverError):
        connect(server.connection_string, bucket="nope")


def test_a_program_that_leaves_in_the_middle_ends_without_a_word(server: RunningNode) -> None:
    """The way most scripts end; -X dev shows every task, socket and coroutine that was forgotten."""
    program = """
        import asyncio, sys, upriver

        async def main():
            asyncio.get_running_loop().slow_callback_duration = 100  # of kernels being loaded it may speak
            db = upriver.aio.connect(sys.argv[1])
            await db.__aenter__()
            async for change in db.changes():
                break
            async with db.change_batches() as feed:
                async for batch in feed:
                    break
            await db.close()

        asyncio.run(main())
        with upriver.connect(sys.argv[1]) as db:
            for change in db.changes():
                break
    """
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program), server.connection_string]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
