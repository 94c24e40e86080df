"""The LMDB file of a bucket: its trees, its transactions, and the checksums of all that lies in it.

What is read here is whole, or an error says what is damaged. Nothing above this room calls LMDB's own functions on a
file that has not been checked.
"""
