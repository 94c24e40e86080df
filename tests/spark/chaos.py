"""A streaming query under fire for a while: ``python tests/spark/chaos.py --seed 7 --minutes 10``."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from tests.spark.spark_application import Application
from tests.spark.spark_chaos import Chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Application(Path(folder) / "driver.log") as running:
        chaos = Chaos(given.seed, Path(folder), running, say=partial(print, flush=True))
        print(chaos.run(given.minutes * 60))


if __name__ == "__main__":
    main()
