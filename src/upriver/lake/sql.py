"""SQL that keeps one Delta or Iceberg table equal to the rows of ``format("dcp")``, for clusters with their own JARs.

The statements compare (epoch, seqno): a change only replaces an older one, so a batch may be applied twice. The batch
alone cannot repair a rollback, because it lacks what the lost changes had overwritten. So the vbuckets that rolled back
are read again, up to where the batch ends, and written under the new epoch. A document that has changed again since
comes with a later batch.
"""

from __future__ import annotations

from typing import Literal, get_args

from upriver.errors import ConfigError

COLUMNS = ("vbucket", "seqno", "epoch", "cas", "timestamp", "expiry", "flags", "datatype", "value")
SqlDialect = Literal["delta", "iceberg"]


# Rows that no rollback among them took back.
_ALIVE = """\
SELECT * FROM {source} AS a WHERE NOT EXISTS (
      SELECT 1 FROM {source} AS r
      WHERE r.event = 'rollback' AND r.vbucket = a.vbucket AND r.epoch > a.epoch AND a.seqno > r.seqno
    )"""

# The latest change of every key, without those that a drop or flush of their collection ended.
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

# The seqno of each vbucket that rolled back at the end of the batch.
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


# Delta compares structs; Iceberg's planner needs the comparison spelled out.
_NEWER: dict[SqlDialect, str] = {
    "delta": "struct(s.epoch, s.seqno) > struct(t.epoch, t.seqno)",
    "iceberg": "(s.epoch > t.epoch OR (s.epoch = t.epoch AND s.seqno > t.seqno))",
}
_NAMES = ("collection_id", "key", *COLUMNS)
_LISTS = {
    "updates": ", ".join(f"{name} = s.{name}" for name in COLUMNS),
    "columns": ", ".join(_NAMES), "values": ", ".join(f"s.{name}" for name in _NAMES),
}  # fmt: skip


def merge_sql(target: str, dialect: SqlDialect = "delta", *, source: str = "changes") -> str:
    """The ``MERGE`` that applies a batch of ``format("dcp")`` rows, a table or view named ``source``, to ``target``."""
    return _MERGE.format(target=target, latest=_latest(source), newer=_newer(dialect), **_LISTS)


def wipe_sql(target: str, dialect: SqlDialect = "delta", *, source: str = "changes") -> str:
    """The statement to run after `merge_sql`: it deletes the documents of collections that were dropped or flushed."""
    return _WIPE.format(target=target, alive=_ALIVE.format(source=source), newer=_newer(dialect))


def rollback_sql(target: str, dialect: SqlDialect = "delta", *, source: str = "changes") -> str:
    """The statement that deletes what a rollback lost, to run before `merge_sql`.

    It does not bring back what the lost changes had overwritten: `reread_sql` does.
    """
    _newer(dialect)
    return _ROLLBACK.format(target=target, source=source)


def reread_sql(
    target: str, dialect: SqlDialect = "delta", *, source: str = "changes", reread: str = "reread"
) -> list[str]:
    """The statements that repair rollbacks, to run before `merge_sql`.

    ``reread`` names the rows of a batch read of the vbuckets that rolled back, from the beginning to the seqnos that
    `ends_sql` gives.
    """
    lifted = ", ".join(f"r.{name} AS {name}" if name == "epoch" else f"d.{name} AS {name}" for name in _NAMES)
    newer = _newer(dialect)
    restate = _REREAD.format(target=target, latest=_latest(reread), lifted=lifted, source=source, newer=newer, **_LISTS)
    return [restate, _SWEEP.format(target=target, source=source)]


def ends_sql(*, source: str = "changes") -> str:
    """The query for the vbuckets that rolled back in a batch, and the seqno of each at its end."""
    return _ENDS.format(source=source)


def _latest(source: str) -> str:
    return _LATEST.format(alive=_ALIVE.format(source=source))


def table_sql(target: str, dialect: SqlDialect = "delta") -> str:
    """The statement that creates the table, unless it exists."""
    _newer(dialect)
    return (
        f"CREATE TABLE IF NOT EXISTS {target} (collection_id BIGINT, key BINARY, vbucket INT, seqno BIGINT, "
        "epoch INT, cas BIGINT, timestamp TIMESTAMP, expiry BIGINT, flags BIGINT, datatype INT, value BINARY) "
        f"USING {dialect}"
    )


def _newer(dialect: SqlDialect) -> str:
    if dialect not in _NEWER:
        raise ConfigError(f"dialect {dialect!r}: valid are {', '.join(get_args(SqlDialect))}")
    return _NEWER[dialect]
