"""Names for the places in a vbucket's two uint64 arrays that kernels update: its registers and its collection table."""

from __future__ import annotations

# Registers: high seqno, CAS clock, highest deleted revision, bytes used of the open checkpoint, overlay entries,
# records deduplicated in the open segment, last visible seqno; then last prepared seqno, why ``ingest`` stopped, first
# seqno that it wrote, tombstones, last completed seqno, earliest expiry, gaps in the received snapshot.
HIGH, CAS, DELETED_REV, USED, ENTRIES, DEDUPED, VISIBLE = range(7)
PREPARED, STOP, FIRST, TOMBSTONES, COMPLETED, EXPIRY, GAPS = range(7, 14)
REGISTERS = 16

# Columns of the collection table: id, live items, high seqno, start seqno, visible high seqno.
C_ID, C_ITEMS, C_HIGH, C_START, C_VISIBLE = range(5)
C_WORDS = 5
