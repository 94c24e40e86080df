"""The ``key`` and ``value`` columns in the form that a query asks for: bytes, text, VARIANT or a typed struct."""
