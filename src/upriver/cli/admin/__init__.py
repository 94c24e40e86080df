"""Commands that run and manage nodes and clusters: one module each, imported when it is called.

``management`` is how they talk to a node's management port. ``upriver.cli.GROUPS`` lists them.
"""
