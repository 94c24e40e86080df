"""The compiled half of ``wire.bulk``: numba kernels that work on raw addresses, cached on disk.

A kernel trusts its addresses and sizes, but never the bytes of a peer. Importing a kernel loads numba, so callers
import it only at the first call.
"""
