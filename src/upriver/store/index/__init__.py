"""The key index: finds the keys of a vbucket, in an overlay in memory and in tables on disk.

A lookup sees every write that was made before it. Memory for keys is bounded by the bucket's quota.
"""
