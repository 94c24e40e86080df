"""The key index: where a vbucket finds its keys, in an overlay in memory and in tables on disk.

A lookup sees every write that was made before it. Memory for keys is bounded by the bucket's quota.
"""
