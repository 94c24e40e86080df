"""For users who bring their own Delta or Iceberg: the same table by ``MERGE``, as SQL and as a foreachBatch callable.

The gate is (epoch, seqno): a change only replaces what is older, so a batch may be applied twice. What a rollback
took back is deleted by the statement, and comes back from ``changes`` or with a re-read; `MERGE` alone cannot know
the value that a lost change had overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from upriver.errors import ConfigError

COLUMNS = ("vbucket", "seqno", "epoch", "cas", "timestamp", "expiry", "flags", "datatype", "value")


class Dialect(StrEnum):
    DELTA = "delta"
    ICEBERG = "iceberg"


_LATEST = """\
(
  SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY collection_id, key ORDER BY epoch DESC, seqno DESC) AS _rank
    FROM {source} WHERE event IN ('mutation', 'deletion', 'expiration')
  ) WHERE _rank = 1
)"""

_MERGE = """\
MERGE INTO {target} AS t
USING {latest} AS s
ON t.collection_id = s.collection_id AND t.key = s.key
WHEN MATCHED AND {newer} AND s.event <> 'mutation' THEN DELETE
WHEN MATCHED AND {newer} THEN UPDATE SET {updates}
WHEN NOT MATCHED AND s.event = 'mutation' THEN INSERT ({columns}) VALUES ({values})"""

_ROLLBACK = """\
MERGE INTO {target} AS t
USING (
  SELECT vbucket, min(seqno) AS seqno, max(epoch) AS epoch FROM {source} WHERE event = 'rollback' GROUP BY vbucket
) AS r
ON t.vbucket = r.vbucket
WHEN MATCHED AND t.seqno > r.seqno AND t.epoch < r.epoch THEN DELETE"""


def merge_sql(target: str, dialect: str = "delta", *, source: str = "changes") -> str:
    """The statement that applies a batch of ``format("dcp")`` rows, named ``source``, to ``target``.

    Delta compares structs; Iceberg's planner wants the comparison spelled out.
    """
    chosen = _dialect(dialect)
    newer = {
        Dialect.DELTA: "struct(s.epoch, s.seqno) > struct(t.epoch, t.seqno)",
        Dialect.ICEBERG: "(s.epoch > t.epoch OR (s.epoch = t.epoch AND s.seqno > t.seqno))",
    }[chosen]
    names = ("collection_id", "key", *COLUMNS)
    return _MERGE.format(
        target=target, latest=_LATEST.format(source=source), newer=newer,
        updates=", ".join(f"{name} = s.{name}" for name in COLUMNS),
        columns=", ".join(names), values=", ".join(f"s.{name}" for name in names),
    )


def rollback_sql(target: str, dialect: str = "delta", *, source: str = "changes") -> str:
    """The statement to run before `merge_sql`, which takes back what was lost."""
    _dialect(dialect)
    return _ROLLBACK.format(target=target, source=source)


def table_sql(target: str, dialect: str = "delta") -> str:
    """The table that the statements expect."""
    return (
        f"CREATE TABLE IF NOT EXISTS {target} (collection_id BIGINT, key BINARY, vbucket INT, seqno BIGINT, "
        "epoch INT, cas BIGINT, timestamp TIMESTAMP, expiry BIGINT, flags BIGINT, datatype INT, value BINARY) "
        f"USING {_dialect(dialect).value}"
    )


def merge_batches(target: str, dialect: str = "delta") -> Callable[[Any, int], None]:
    """A callable for ``foreachBatch`` on ``format("dcp")`` that keeps ``target`` with the session's own connector."""
    _dialect(dialect)

    def apply(frame: Any, batch_id: int) -> None:
        view = f"upriver_changes_{batch_id}"
        frame.persist()
        try:
            frame.createOrReplaceTempView(view)
            spark = frame.sparkSession
            spark.sql(table_sql(target, dialect))
            spark.sql(rollback_sql(target, dialect, source=view))
            spark.sql(merge_sql(target, dialect, source=view))
        finally:
            frame.unpersist()

    return apply


def _dialect(name: str) -> Dialect:
    try:
        return Dialect(name)
    except ValueError as error:
        raise ConfigError(f"dialect {name!r}: valid are {', '.join(Dialect)}") from error
