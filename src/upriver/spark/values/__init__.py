"""The ``key`` and ``value`` columns in the form that a query asks for: bytes, text, VARIANT or a typed struct.

A value that does not fit its type never fails a query: the field is null, and ``value_unfit`` has what was there.
"""
