"""A lake beside every world."""

from __future__ import annotations

import pytest

from tests.spark.sync.lakes import LakeWorld


@pytest.fixture
def lake(world, tmp_path) -> LakeWorld:
    return LakeWorld(world, tmp_path / "lake")
