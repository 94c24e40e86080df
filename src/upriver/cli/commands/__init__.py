"""Commands that read and write buckets, keep tables, and explain: one module each, imported when it is called.

Commands that run nodes and clusters are in ``cli/admin``. ``upriver.cli.GROUPS`` lists them all.
"""
