"""For users who bring their own Delta or Iceberg: the same table by ``MERGE``, as SQL and as a foreachBatch callable.

The gate is (epoch, seqno): a change only replaces what is older, so a batch may be applied twice. A rollback cannot be
repaired from the batch alone, because nobody says again what the lost changes had overwritten. So the vbuckets that
rolled back are read again, up to where the batch ends, and said again under the new epoch; what a later change has
replaced by then comes with a later batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from upriver.errors import ConfigError, HistoryLost

COLUMNS = ("vbucket", "seqno", "epoch", "cas", "timestamp", "expiry", "flags", "datatype", "value")


class Dialect(StrEnum):
    DELTA = "delta"
    ICEBERG = "iceberg"


class Repair(StrEnum):
    """What a rollback does to the table."""

    REREAD = "reread"
    """The vbuckets are read again: the table is right."""
    DELETE = "delete"
    """What was lost is deleted; what it had overwritten stays away until it changes."""
    FAIL = "fail"
    """The query stops."""


# Rows that no rollback among them took back.
_ALIVE = """\
SELECT * FROM {source} AS a WHERE NOT EXISTS (
      SELECT 1 FROM {source} AS r
      WHERE r.event = 'rollback' AND r.vbucket = a.vbucket AND r.epoch > a.epoch AND a.seqno > r.seqno
    )"""

# The latest change of every key that did not go with its collection.
_LATEST = """\
(
  SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY collection_id, key ORDER BY epoch DESC, seqno DESC) AS _rank
    FROM ({alive}) AS d WHERE d.event IN ('mutation', 'deletion', 'expiration') AND NOT EXISTS (
      SELECT 1 FROM ({alive}) AS w
      WHERE w.event IN ('collection_dropped', 'collection_flushed') AND w.collection_id = d.collection_id
        AND w.vbucket = d.vbucket AND (w.epoch > d.epoch OR (w.epoch = d.epoch AND w.seqno > d.seqno))
    )
  ) AS ranked WHERE _rank = 1
)"""

_WIPE = """\
MERGE INTO {target} AS t
USING (
  SELECT * FROM (
    SELECT collection_id, vbucket, epoch, seqno,
      row_number() OVER (PARTITION BY collection_id, vbucket ORDER BY epoch DESC, seqno DESC) AS _rank
    FROM ({alive}) AS w WHERE w.event IN ('collection_dropped', 'collection_flushed')
  ) AS ranked WHERE _rank = 1
) AS s
ON t.collection_id = s.collection_id AND t.vbucket = s.vbucket
WHEN MATCHED AND {newer} THEN DELETE"""

_REREAD = """\
MERGE INTO {target} AS t
USING (
  SELECT {lifted} FROM {latest} AS d
  JOIN (SELECT vbucket, max(epoch) AS epoch FROM {source} WHERE event = 'rollback' GROUP BY vbucket) AS r
  ON r.vbucket = d.vbucket WHERE d.event = 'mutation'
) AS s
ON t.collection_id = s.collection_id AND t.key = s.key
WHEN MATCHED AND {newer} THEN UPDATE SET {updates}
WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({values})"""

_SWEEP = """\
MERGE INTO {target} AS t
USING (SELECT vbucket, max(epoch) AS epoch FROM {source} WHERE event = 'rollback' GROUP BY vbucket) AS r
ON t.vbucket = r.vbucket
WHEN MATCHED AND t.epoch < r.epoch THEN DELETE"""

# Where each vbucket that rolled back stands at the end of the batch.
_ENDS = """\
SELECT c.vbucket AS vbucket, max(c.seqno) AS seqno FROM {source} AS c
JOIN (SELECT vbucket, max(epoch) AS epoch FROM {source} WHERE event = 'rollback' GROUP BY vbucket) AS r
ON r.vbucket = c.vbucket WHERE c.epoch >= r.epoch GROUP BY c.vbucket"""

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


_NEWER = {
    Dialect.DELTA: "struct(s.epoch, s.seqno) > struct(t.epoch, t.seqno)",
    Dialect.ICEBERG: "(s.epoch > t.epoch OR (s.epoch = t.epoch AND s.seqno > t.seqno))",
}
_NAMES = ("collection_id", "key", *COLUMNS)
_SAID = {
    "updates": ", ".join(f"{name} = s.{name}" for name in COLUMNS),
    "columns": ", ".join(_NAMES), "values": ", ".join(f"s.{name}" for name in _NAMES),
}  # fmt: skip


def merge_sql(target: str, dialect: str = "delta", *, source: str = "changes") -> str:
    """The statement that applies a batch of ``format("dcp")`` rows, named ``source``, to ``target``.

    Delta compares structs; Iceberg's planner wants the comparison spelled out.
    """
    return _MERGE.format(target=target, latest=_latest(source), newer=_NEWER[_dialect(dialect)], **_SAID)


def wipe_sql(target: str, dialect: str = "delta", *, source: str = "changes") -> str:
    """The statement to run with `merge_sql`, which removes what went when its collection was dropped or flushed."""
    return _WIPE.format(target=target, alive=_ALIVE.format(source=source), newer=_NEWER[_dialect(dialect)])


def rollback_sql(target: str, dialect: str = "delta", *, source: str = "changes") -> str:
    """The statement that takes back what was lost, to run before `merge_sql`.

    It does not bring back what the lost changes had overwritten: `reread_sql` does.
    """
    _dialect(dialect)
    return _ROLLBACK.format(target=target, source=source)


def reread_sql(target: str, dialect: str = "delta", *, source: str = "changes", reread: str = "reread") -> list[str]:
    """The statements that repair rollbacks, to run before `merge_sql`.

    ``reread`` are the rows of a batch read of the vbuckets that rolled back, from the beginning to where `ends_sql`
    says that the batch ends.
    """
    lifted = ", ".join(f"r.{name} AS {name}" if name == "epoch" else f"d.{name} AS {name}" for name in _NAMES)
    newer = _NEWER[_dialect(dialect)]
    restate = _REREAD.format(target=target, latest=_latest(reread), lifted=lifted, source=source, newer=newer, **_SAID)
    return [restate, _SWEEP.format(target=target, source=source)]


def ends_sql(*, source: str = "changes") -> str:
    """Which vbuckets rolled back in a batch, and the seqno at which each stands at its end."""
    return _ENDS.format(source=source)


def _latest(source: str) -> str:
    return _LATEST.format(alive=_ALIVE.format(source=source))


def table_sql(target: str, dialect: str = "delta") -> str:
    """The table that the statements expect."""
    return (
        f"CREATE TABLE IF NOT EXISTS {target} (collection_id BIGINT, key BINARY, vbucket INT, seqno BIGINT, "
        "epoch INT, cas BIGINT, timestamp TIMESTAMP, expiry BIGINT, flags BIGINT, datatype INT, value BINARY) "
        f"USING {_dialect(dialect).value}"
    )


def merge_batches(
    target: str, dialect: str = "delta", *, source: Mapping[str, str] | None = None, on_rollback: str = "reread"
) -> Callable[[Any, int], None]:
    """A callable for ``foreachBatch`` on ``format("dcp")`` that keeps ``target`` with the session's own connector.

    ``source`` are the options of the stream, with which vbuckets that rolled back are read again. The callable must
    get all rows of the stream, not only those of documents.
    """
    repair = _repair(on_rollback)
    _dialect(dialect)
    if repair is Repair.REREAD and not source:
        raise ConfigError(
            "merge_batches reads vbuckets again that rolled back: give it the options of the stream, "
            'source={"connection": ..., "bucket": ...}, or on_rollback="fail" or "delete"'
        )

    def apply(frame: Any, batch_id: int) -> None:
        view = f"upriver_changes_{batch_id}"
        frame.persist()
        try:
            frame.createOrReplaceTempView(view)
            spark = frame.sparkSession
            spark.sql(table_sql(target, dialect))
            _take_back(spark, target, dialect, view, repair, source or {})
            spark.sql(merge_sql(target, dialect, source=view))
            spark.sql(wipe_sql(target, dialect, source=view))
            spark.sql(f"DROP VIEW IF EXISTS {view}")
        finally:
            frame.unpersist()

    return apply


def _take_back(spark: Any, target: str, dialect: str, view: str, repair: Repair, source: Mapping[str, str]) -> None:
    """Bring the vbuckets that rolled back in this batch right."""
    ends = {int(row[0]): int(row[1]) for row in spark.sql(ends_sql(source=view)).collect()}
    if not ends:
        return
    if repair is Repair.FAIL:
        vbucket = min(ends)
        raise HistoryLost(vbucket, ends[vbucket], 0)
    if repair is Repair.DELETE:
        spark.sql(rollback_sql(target, dialect, source=view))
        return
    again = spark.read.format("dcp").options(**_batch_options(source, ends)).load()
    again.persist()  # several looks must see the same rows
    try:
        again.createOrReplaceTempView(f"{view}_again")
        for statement in reread_sql(target, dialect, source=view, reread=f"{view}_again"):
            spark.sql(statement)
        spark.sql(f"DROP VIEW IF EXISTS {view}_again")
    finally:
        again.unpersist()


def _batch_options(source: Mapping[str, str], ends: Mapping[int, int]) -> dict[str, str]:
    """The same source, but only these vbuckets, from the beginning to these seqnos."""
    changed = {"startingoffsets", "endingoffsets", "vbuckets", "onrollback"}
    kept = {name: str(text) for name, text in source.items() if name.lower() not in changed}
    vbuckets = ",".join(str(vbucket) for vbucket in sorted(ends))
    return {**kept, "vbuckets": vbuckets, "endingOffsets": json.dumps({str(vb): end for vb, end in ends.items()})}


def _repair(name: str) -> Repair:
    try:
        return Repair(name)
    except ValueError as error:
        raise ConfigError(f"on_rollback {name!r}: valid are {', '.join(Repair)}") from error


def _dialect(name: str) -> Dialect:
    try:
        return Dialect(name)
    except ValueError as error:
        raise ConfigError(f"dialect {name!r}: valid are {', '.join(Dialect)}") from error
