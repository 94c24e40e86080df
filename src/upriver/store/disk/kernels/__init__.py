"""Kernels over what lies on disk: checksums of blocks, and values where LMDB keeps them.

They read memory that LMDB maps, within bounds that were checked before.
"""
