"""One Spark session for all tests that need one, and real nodes."""

from __future__ import annotations

import pytest

from tests.spark.spark_world import World
from upriver.testing import node


def pytest_collection_modifyitems(items):
    """Give tests much time: a JVM takes seconds to start, minutes on a busy machine. Only a test that hangs fails."""
    for item in items:
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def spark():
    import upriver.spark

    made = upriver.spark.session("local[2,4]", settings={"spark.sql.streaming.numRecentProgressUpdates": "1000"})
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A node for tests that only add to it."""
    with node(vbuckets=16, enable_faults=True, lazy=True) as running, World(running) as world:
        yield world


@pytest.fixture
def world():
    """A node for one test, which may break it."""
    with node(vbuckets=4, enable_faults=True, lazy=True) as running, World(running) as made:
        yield made
