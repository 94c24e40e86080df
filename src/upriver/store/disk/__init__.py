"""The LMDB file of a bucket: its trees, its transactions, and the checksums of everything in it.

Whatever is read here is whole, or an error says what is damaged. LMDB opens only files that were checked before.
"""
