"""Upkeep of the store: compaction, expiry, rollback, emptying, and a check of everything on disk.

Compaction and expiry work on one vbucket at a time. Except during a rollback, other threads read and write meanwhile.
Nothing that a reader of a disk snapshot still needs is removed.
"""
