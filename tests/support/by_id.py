"""Documents of a collection by its id, for tests that choose the ids themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from upriver.client._requests.operations import Operation
from upriver.client.blocking import Database, KeyValue

T = TypeVar("T")


class ById(KeyValue):
    """The documents of the collection with this id."""

    def __init__(self, database: Database, number: int) -> None:
        super().__init__(database.operations)
        self._database, self._number = database, number

    def _ask(self, name: str, make: Callable[[int], Operation[T]]) -> T:
        return self._database.run(make(self._number), name)
