"""A streaming query under fire for a while: ``SEED=7 MINUTES=10 python tests/spark/chaos.py``."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from spark_chaos import Chaos


def main() -> None:
    seed = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    seconds = float(os.environ.get("MINUTES", "2")) * 60
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(seed, Path(folder))
        try:
            print(chaos.run(seconds))
        finally:
            chaos.kill_driver()


if __name__ == "__main__":
    main()
