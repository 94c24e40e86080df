"""Frames for people and programs: ``dump`` explains one frame, ``conversation`` reads both directions of a connection.

Never raises for what the bytes say: a broken frame is shown as far as it can be read, with the rule that it breaks.
"""
