"""Explains frames: ``dump`` shows one frame, ``conversation`` reads both directions of a captured connection.

No input raises an error: a broken frame is shown as far as it can be read, with the rule that it breaks.
"""
