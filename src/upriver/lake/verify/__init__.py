"""Do the tables equal the bucket? A judge that shares no code with what writes the tables.

It may use the client, a Delta reader and the documented meaning of a row (``docs/sync.md``), and nothing of the rest of
`upriver.lake` but the options. import-linter checks it: a mistake that both made would be equal on both sides.
"""
