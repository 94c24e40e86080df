"""The warm-up compiles what a node would otherwise compile while a client waits."""

import subprocess
import sys

SCRIPT = """
from upriver.node.warmup import warm_up
from upriver.store.disk.kernels import checksum, nodes
from upriver.store.index import kernels as keys
from upriver.store.log.kernels import ingest, runs, surveys

called_from_python = [value for value in vars(runs).values() if getattr(value, "__module__", "") == runs.__name__]
called_from_python += [ingest.ingest, ingest.ingest_many, surveys.replaced, surveys.survey]
called_from_python += [checksum.block_state, checksum.seal_block, checksum.checksum]
called_from_python += [nodes.copy_value, nodes.file_begin, nodes.value_end]
called_from_python += [keys.find, keys.rehash, keys.merge_into, keys.fill_filter]
called_from_python += [keys.drop_entries, keys.hashes_of, keys.mark_known]
warm_up()
print(len(called_from_python), *[kernel.__name__ for kernel in called_from_python if not kernel.signatures])
"""


def test_the_warm_up_covers_every_kernel_that_the_store_calls():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    count, *missing = done.stdout.split()
    assert int(count) >= 30
    assert not missing
