"""Kernels over the file: checksums of blocks, and the places of values in LMDB's pages.

They read memory that LMDB maps, within bounds that were checked before.
"""
