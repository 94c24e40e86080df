"""A query without Spark: the driver plans, a reader per task reads, and only the offset survives a restart."""

from __future__ import annotations

from typing import Any

from tests.spark.spark_world import World
from upriver.spark.options import ReadOptions
from upriver.spark.reader.driver import Driver
from upriver.spark.reader.executor import TaskReader


class Batches:
    """A query as Spark runs it: plan, read, commit; ``rows`` is what was delivered."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world, self.given = world, {"pollMilliseconds": "0", **options}
        self.options = self.options_at(world)
        self.driver = Driver(self.options)
        self.at = self.driver.initial_offset()
        self.rows: list[dict[str, Any]] = []
        self.most: tuple[int | None, int | None] = (None, None)  # rows and bytes of a batch
        self.count = 0

    def options_at(self, world: World) -> ReadOptions:
        return ReadOptions.parse(world.options(**{name: text for name, text in self.given.items() if text}))

    def next(self, executors: World | None = None) -> list[dict[str, Any]]:
        """Run a batch with executors that reach another node; return its rows."""
        end = self.driver.latest_offset(self.at, self.most)
        options = self.options_at(executors) if executors else self.options
        rows = [row for task in self.driver.tasks(self.at, end) for batch in TaskReader(task, options).batches()
                for row in batch.to_pylist()]  # fmt: skip
        self.count += end != self.at
        self.at = end
        self.rows += rows
        return rows

    def restart(self, world: World | None = None, **options: Any) -> None:
        """Kill the driver; another one, perhaps with other options, continues from what Spark has kept."""
        self.driver.close()
        self.given |= options
        self.options = self.options_at(world or self.world)
        self.driver = Driver(self.options)

    def drain(self) -> list[dict[str, Any]]:
        """Run until everything that exists now has been read; return the rows."""
        first, before = len(self.rows), None
        self.driver.freeze()
        while self.at != before:
            before = self.at
            self.next()
        return self.rows[first:]
