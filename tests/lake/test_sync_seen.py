"""What a user sees of a sync: its line of progress, errors before Spark starts, and options that reach the source."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import upriver.testing
from upriver.cli.commands.sync import AWAY_S, Display, line
from upriver.errors import ConfigError
from upriver.lake.bucket import check
from upriver.lake.journal import Batch
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.spark.sync.run import LagWatch, SyncProgress
from upriver.testing import RunningNode

OPTIONS = SyncOptions(connection="couchbase://localhost", to="lake")


def live(**known: object) -> SyncProgress:
    """A run after one batch."""
    made = SyncProgress(**known)  # type: ignore[arg-type]
    made.add([Batch(7, time.time() - 1500, rows=300, total_s=0.5, behind_s=1400.0)])
    return made


def test_a_quiet_bucket_that_is_fully_synced_is_not_behind() -> None:
    shown = line(live(expected=1000, lag=0, loading=False), OPTIONS)
    assert shown.startswith("in step with the bucket, last batch 25:00 ago")
    assert "behind" not in shown


def test_the_line_shows_the_lag_in_changes_and_time() -> None:
    assert line(live(expected=1000, lag=20, loading=False), OPTIONS).startswith("20 changes and 23:20 behind")


def test_the_bar_is_full_when_everything_is_loaded_although_documents_were_overwritten() -> None:
    assert "100%" in line(live(expected=1000, lag=0), OPTIONS), "300 rows of 1,000 seqnos are all there is"
    assert "50%" in line(live(expected=1000, lag=500), OPTIONS)


@pytest.mark.parametrize(("given", "end"), [({}, "goes on when it does"), ({"give_up_after": "10m"}, "up after 10m")])
def test_the_line_says_that_the_bucket_does_not_answer_and_what_the_sync_does(given: dict[str, str], end: str) -> None:
    away = live(expected=1, lag=0, loading=False, away_s=75.0, away_because="connection refused")
    shown = line(away, OPTIONS.with_(**given))
    assert shown.startswith("the bucket has not answered for 75.0 s (connection refused)")
    assert shown.endswith(end)


def test_without_a_terminal_every_line_is_whole_and_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(OPTIONS)
    display(live(expected=1000, lag=0, loading=False))
    away = live(expected=1, lag=0, loading=False, away_s=AWAY_S, away_because="x" * 200)
    away.new_batches = []
    display(away)
    away.away_s += 10
    display(away)  # was shown already
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all(text.startswith("20") and text[10] == " " for text in told)
    assert "x" * 200 in told[1]


@pytest.mark.parametrize(("given", "patience_s"), [
    ({}, 10 * 365 * 86400), ({"once": True}, 60), ({"give_up_after": "5m"}, 300), ({"give_up_after": "2s"}, 2),
])  # fmt: skip
def test_a_following_sync_waits_for_ever_unless_it_is_told_otherwise(given: dict[str, object], patience_s: int) -> None:
    assert OPTIONS.with_(**given).source_options()["timeoutseconds"] == str(patience_s)


def test_certificates_networks_and_attributes_reach_the_source() -> None:
    given = OPTIONS.with_(client_cert="c.pem", client_key="k.pem", network="external", xattrs=True).source_options()
    assert given["clientcert"] == "c.pem"
    assert given["clientkey"] == "k.pem"
    assert given["network"] == "external"
    assert given["xattrs"] == "true"


def test_a_damaged_file_of_a_lake_is_named_with_what_to_do(tmp_path) -> None:
    lake = Lake(str(tmp_path))
    lake.store("lake.json", {"bucket": "b"})
    for garbage in ("{", "[" * 100_000, "7"):
        (tmp_path / "_upriver" / "lake.json").write_text(garbage)
        with pytest.raises(ConfigError, match=r"lake\.json is damaged.*restore"):
            lake.settings()


# ---------------------------------------------------------------------------------------------- with a bucket


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with upriver.testing.node(vbuckets=4) as running:
        yield running


def test_a_collection_that_is_not_there_is_found_before_spark_starts(node: RunningNode, tmp_path) -> None:
    command = [sys.executable, "-m", "upriver", "sync", node.connection_string, "--collections", "shop.ordres"]
    done = subprocess.run(
        [*command, "--to", str(tmp_path / "lake"), "--once"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "shop.ordres" in done.stderr
    assert "_default._default" in done.stderr
    assert "Spark" not in done.stderr
    assert not (tmp_path / "lake").exists()


def test_a_bucket_with_what_is_asked_for_passes(node: RunningNode) -> None:
    assert check(OPTIONS.with_(connection=node.connection_string)).vbuckets == 4


def test_the_lag_watch_notices_when_the_bucket_goes_away_and_comes_back() -> None:
    with upriver.testing.node(vbuckets=4) as running:
        watch = LagWatch(OPTIONS.with_(connection=running.connection_string))
        deadline = time.monotonic() + 240
        with watch:
            running.kill()
            while watch.away[0] < AWAY_S and time.monotonic() < deadline:
                time.sleep(0.1)
            assert watch.away[0] >= AWAY_S
            running.start()
            while watch.away[0] >= AWAY_S and time.monotonic() < deadline:
                time.sleep(0.1)
            assert watch.away[0] < AWAY_S
