"""A consumer for the transcripts of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.protocol.consumer_talk import Store, Talk


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "bucket")
    yield made
    made.bucket.close()


@pytest.fixture
def talk(store: Store) -> Talk:
    return Talk(store)
