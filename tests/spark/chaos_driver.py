"""The query that the chaos test kills: change rows into one Parquet folder per batch, on two real executors.

A replayed batch overwrites its folder, so the folders always hold what the query delivered exactly once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import upriver.spark


def main(connection: str, folder: Path, trigger: str, master: str) -> None:
    settings = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    spark = upriver.spark.session(master, "chaos", settings)
    spark.sparkContext.setLogLevel("ERROR")

    def keep(frame, batch_id):
        frame.write.mode("overwrite").parquet(str(folder / "rows" / f"batch={batch_id:06d}"))

    source = spark.readStream.format("dcp").option("connection", connection)
    source = source.option("maxRowsPerTrigger", "50000").option("timeoutSeconds", "60").option("partitions", "2")
    writer = source.load().writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint"))
    how = {"availableNow": True} if trigger == "now" else {"processingTime": "100 milliseconds"}
    query = writer.trigger(**how).start()
    print("started", flush=True)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])
