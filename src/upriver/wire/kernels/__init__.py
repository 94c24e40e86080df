"""The compiled half of ``wire.bulk``: numba kernels over raw addresses, cached on disk.

A kernel trusts its addresses and sizes, never the bytes of a peer. Importing one loads numba, so nothing imports
them before the first call.
"""
