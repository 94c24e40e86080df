"""Runs one atheris fuzzer: ``python fuzz/run.py frames|value|bulk SECONDS``. Inputs that fail are kept in .fuzz/."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed; it has wheels for CPython on Linux x86-64 only: pip install atheris")

sys.path.insert(0, str(Path(__file__).resolve().parent))
# numba compiles these from their bytecode, so it must not be instrumented.
KERNELS = ["upriver.wire.kernels.decode", "upriver.wire.kernels.intrinsics", "upriver.wire.kernels.encode"]

with atheris.instrument_imports(include=["upriver"], exclude=KERNELS, enable_loader_override=False):
    import targets

    import upriver.wire.messages.stream_value  # noqa: F401  the targets import it late


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    kept = Path(".fuzz")
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(targets.seeds(name)):
            Path(corpus, str(number)).write_bytes(seed)
        targets.TARGETS[name](targets.seeds(name)[0])  # compile kernels before the clock runs
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={kept}/{name}-", "-timeout=20", "-max_len=1024"]
        atheris.Setup([sys.argv[0], corpus, *options], targets.TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
