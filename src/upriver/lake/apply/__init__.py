"""Applying the change log: how changes, rollbacks and drops become rows of the tail and ``current``.

``policy`` and ``rows`` are pure. ``plan`` decides which merge tasks there are; ``merge`` runs one, here or on an
executor, and commits nothing; `upriver.lake.collection` commits what the tasks wrote. ``rollbacks`` and ``reread`` deal
with rollbacks, ``reconcile`` with dropped collections. ``upkeep`` keeps files few and removes old ones.
"""
