"""Kernels over what lies on disk: checksums of blocks, and values where LMDB keeps them."""
