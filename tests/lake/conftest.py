"""A miniature sync for every test of tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lake.feed_sync import FeedSync


@pytest.fixture
def sync(tmp_path: Path) -> FeedSync:
    return FeedSync(tmp_path / "lake")
