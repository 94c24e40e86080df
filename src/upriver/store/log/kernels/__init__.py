"""Kernels over packed records: append them to the log, gather and mark runs of them, survey them for a snapshot.

This is the only code that visits every record.
"""
