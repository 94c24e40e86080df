"""A desk for every test of tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lake.desks import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "lake")
