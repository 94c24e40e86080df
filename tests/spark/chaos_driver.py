"""The application that the chaos test kills: change rows into one Parquet folder per batch, on two real executors.

Each line of its input is the connection and folder of the query to run from now on, or ``stop``. A replayed batch
overwrites its folder, so the folders always hold what the query delivered exactly once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import upriver.spark


def start(spark: Any, connection: str, folder: Path) -> Any:
    def keep(frame: Any, batch_id: int) -> None:
        frame.write.mode("overwrite").parquet(str(folder / "rows" / f"batch={batch_id:06d}"))

    source = spark.readStream.format("dcp").option("connection", connection)
    source = source.option("maxRowsPerTrigger", "50000").option("timeoutSeconds", "60").option("partitions", "2")
    writer = source.load().writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(processingTime="100 milliseconds").start()


def main(master: str) -> None:
    settings = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    spark = upriver.spark.session(master, "chaos", settings)
    spark.sparkContext.setLogLevel("ERROR")
    for line in sys.stdin:
        for query in spark.streams.active:
            query.stop()
        if line.strip() != "stop":
            connection, folder = line.split()
            start(spark, connection, Path(folder))
        print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
