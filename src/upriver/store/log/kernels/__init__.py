"""Kernels over packed records: take them in, gather and mark runs of them, survey them for a snapshot.

The only code that visits every record.
"""
