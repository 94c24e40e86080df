"""Reading the tables of a lake without Spark: always fresh, which is ``current`` with its tail on top."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import ConfigError
from upriver.lake.apply.rows import keep_newer, latest
from upriver.lake.columns import Document, row_schema, shape_of, spill, to_document
from upriver.lake.delta import Table
from upriver.lake.files import DataFile, read_files
from upriver.lake.layout import Lake

LakePath = str | PathLike[str]


def collections(lake: LakePath) -> list[str]:
    """The collections that have tables in a lake, as ``scope.collection``."""
    return Lake(fspath(lake)).names()


def open_fresh(lake: LakePath, collection: str) -> tuple[Table, Table]:
    """The tail and the current table of a collection; ``ConfigError`` if there are none."""
    home = Lake(fspath(lake))
    tail, current = home.table("tail", collection), home.table("current", collection)
    if not tail.exists or not current.exists:
        raise ConfigError(
            f"{home.root} has no tables of '{collection}' yet; it has {', '.join(home.names()) or 'none'}"
        )
    return tail, current


def read(
    lake: LakePath, collection: str, *, deleted: bool = False, vbuckets: tuple[int, int] | None = None
) -> pa.Table:
    """The latest documents of a collection (``scope.collection``) as an Arrow table, whatever has been merged so far.

    ``deleted`` keeps rows of deleted documents. ``vbuckets`` limits the read to a range, both ends included.
    """
    # The tail is read before ``current``: a merge in between shows a row twice, never not at all, and the newer wins.
    tail, current = open_fresh(lake, collection)
    waiting = tail.files()
    current.refresh()
    schema = row_schema(shape_of(current.schema()))
    new = latest(_rows(tail.uri, waiting, schema, vbuckets))
    old, new = keep_newer(_rows(current.uri, current.files(), schema, vbuckets), new)
    whole = pa.concat_tables([old, new])
    return whole if deleted else whole.filter(pc.invert(whole.column("_deleted")))


def _rows(root: str, files: Sequence[DataFile], schema: pa.Schema, vbuckets: tuple[int, int] | None) -> pa.Table:
    here = [file for file in files if vbuckets is None or file.overlaps(*vbuckets)]
    return read_files(root, here, schema, span=vbuckets, adapt=spill)


def read_documents(lake: LakePath, collection: str) -> dict[str, Document | bytes]:
    """The latest documents by key: JSON objects as dictionaries, anything else as bytes."""
    table = read(lake, collection)
    shape = shape_of(table.schema)
    return {row["_key"]: to_document(row, shape) for row in table.to_pylist()}


def read_history(lake: LakePath, collection: str) -> pa.Table:
    """Every version of every document, with the times from and to which it was valid.

    Only a sync with ``history`` keeps this table. It is as fresh as ``max_staleness`` makes it.
    """
    home = Lake(fspath(lake))
    history = home.table("history", collection)
    if not history.exists:
        raise ConfigError(f"{home.root} has no history of '{collection}': sync it with --history")
    return read_files(history.uri, history.files(), history.schema())


_VIEW = """\
CREATE OR REPLACE VIEW {name} AS
WITH news AS (
  SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY _key ORDER BY _epoch DESC, _seqno DESC) AS _rank FROM {tail}
  ) AS ranked WHERE _rank = 1
)
SELECT {old} FROM {current} AS c LEFT JOIN news AS n ON n._key = c._key
WHERE NOT c._deleted
  AND (n._key IS NULL OR c._epoch > n._epoch OR (c._epoch = n._epoch AND c._seqno > n._seqno))
UNION ALL
SELECT {new} FROM news AS n LEFT JOIN {current} AS c ON n._key = c._key
WHERE NOT n._deleted
  AND (c._key IS NULL OR n._epoch > c._epoch OR (n._epoch = c._epoch AND n._seqno >= c._seqno))
"""


def view_sql(lake: LakePath, collection: str, *, view: str, tail: str, current: str, quote: str = '"') -> str:
    """The SQL that creates a view named ``view`` of the fresh table.

    ``tail`` and ``current`` are what the two tables are called in that engine, such as
    ``delta_scan('lake/tail/shop.orders')`` in DuckDB. ``quote`` is how it quotes names (`` ` `` in Spark).
    """
    columns = open_fresh(lake, collection)[1].schema().names
    lists = {alias: ", ".join(f"{alias}.{quote}{column}{quote}" for column in columns) for alias in ("c", "n")}
    return _VIEW.format(name=view, tail=tail, current=current, old=lists["c"], new=lists["n"])
