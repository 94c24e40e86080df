"""What keeps a store small and right: compaction, expiry, rollback, emptying, and a check of everything on disk.

Each works on one vbucket at a time and lets others read and write meanwhile, except for a rollback. What a reader of a
disk snapshot still needs is never removed.
"""
