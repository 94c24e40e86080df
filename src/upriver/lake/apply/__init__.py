"""Applying the change log: how changes, rollbacks and drops become rows of the tail and ``current``.

``policy`` and ``rows`` are pure. ``plan`` decides which merge tasks there are; ``merge`` runs one, here or on an
executor, and commits nothing; `upriver.lake.collection` commits what the tasks wrote. ``voiding``, ``epochs``,
``reread`` and ``ahead`` deal with rollbacks, ``reconcile`` with dropped collections, ``foreign`` with other tools that
rewrite files. ``upkeep`` keeps files few and removes old ones.
"""
