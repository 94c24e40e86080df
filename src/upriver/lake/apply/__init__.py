"""Applying the change log: how changes, rollbacks and drops become rows of the tail and ``current``.

``policy`` and ``rows`` are pure. ``merge`` runs one task, here or on an executor, and commits nothing. ``plan`` decides
which tasks there are; `upriver.lake.collection` commits what they wrote.
"""
