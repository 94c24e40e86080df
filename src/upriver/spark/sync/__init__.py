"""The sync: a streaming query that keeps the tables of a lake equal to a bucket.

The tasks of ``source`` write what they read into the change log. ``job`` commits each batch to the tables, and
``executors`` runs large merges. ``committed`` is what a sync has committed. ``run`` starts, watches and ends a run;
``plan`` says what a run would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from upriver.lake.options import SyncKeywords, SyncOptions
    from upriver.spark.sync.run import SyncProgress


def sync(
    spark: SparkSession,
    options: SyncOptions | None = None,
    *,
    stop: threading.Event | None = None,
    on_progress: Callable[[SyncProgress], None] | None = None,
    **keywords: Unpack[SyncKeywords],
) -> SyncProgress:
    """Make the tables under ``to`` equal to a bucket and, unless ``once``, keep them so until ``stop`` is set.

    The options are those of ``upriver sync``, as keywords or as `SyncOptions`; keywords override. ``on_progress`` is
    called about twice a second. What the run did is returned.
    """
    from upriver.lake.options import SyncOptions
    from upriver.spark.sync.run import run

    chosen = SyncOptions.parse(keywords) if options is None else options.with_(**keywords)
    return run(spark, chosen, stop=stop, on_progress=on_progress)
