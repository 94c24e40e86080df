"""Arrow: the one schema of the change feed, and columns off the wire as record batches."""
