"""The Arrow schemas, declared once: document messages as they come off the wire, and rows of the change feed.

Spark, the client and the lake's files derive theirs from ``CHANGES``. It has only types that Spark has: no unsigned
numbers, no large or view types. A u64 is stored as the same 64 bits in a signed number (``model.signed``).
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# The columns of a bulk decode; ``event`` is the opcode, and ``stream_id`` 0 means that the stream has none.
WIRE = pa.schema(
    [
        pa.field("event", pa.uint8(), nullable=False),
        pa.field("vbucket", pa.uint16(), nullable=False),
        pa.field("collection_id", pa.uint32(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("datatype", pa.uint8(), nullable=False),
        pa.field("seqno", pa.uint64(), nullable=False),
        pa.field("rev_seqno", pa.uint64(), nullable=False),
        pa.field("cas", pa.uint64(), nullable=False),
        pa.field("flags", pa.uint32(), nullable=False),
        pa.field("expiry", pa.uint32(), nullable=False),
        pa.field("delete_time", pa.uint32(), nullable=False),
        pa.field("lock_time", pa.uint32(), nullable=False),
        pa.field("stream_id", pa.uint16(), nullable=False),
        pa.field("opaque", pa.uint32(), nullable=False),
    ]
)


class Event(StrEnum):
    """What a row of the change feed says."""

    MUTATION = "mutation"
    DELETION = "deletion"
    EXPIRATION = "expiration"
    ROLLBACK = "rollback"
    COLLECTION_CREATED = "collection_created"
    COLLECTION_DROPPED = "collection_dropped"
    COLLECTION_FLUSHED = "collection_flushed"
    COLLECTION_MODIFIED = "collection_modified"
    SCOPE_CREATED = "scope_created"
    SCOPE_DROPPED = "scope_dropped"


XATTRS = pa.map_(pa.string(), pa.binary())

# Rows of the change feed. Only documents fill every column; a rollback has a vbucket, seqno, epoch and vbuuid.
CHANGES = pa.schema(
    [
        pa.field("event", pa.string(), nullable=False),
        pa.field("vbucket", pa.int32(), nullable=False),
        pa.field("seqno", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),  # how many rollbacks of the vbucket the reader has seen
        pa.field("vbuuid", pa.int64(), nullable=False),
        pa.field("rev_seqno", pa.int64()),
        pa.field("cas", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),  # from the CAS, which is a clock
        pa.field("scope", pa.string()),
        pa.field("collection", pa.string()),
        pa.field("collection_id", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),  # null for tombstones
        pa.field("datatype", pa.int32()),  # of ``value`` in this row: inflated, without xattrs
        pa.field("flags", pa.int64()),
        pa.field("expiry", pa.int64()),  # Unix seconds, 0: never
        pa.field("delete_time", pa.int64()),  # Unix seconds, 0: unknown
        pa.field("xattrs", XATTRS),
        pa.field("snapshot_start", pa.int64()),
        pa.field("snapshot_end", pa.int64()),
    ]
)


def signed_column(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """A u64 column as Arrow and Spark store it: the same 64 bits, read as signed numbers.

    Equality and uniqueness are preserved, and so is order below 2^63. Seqnos never get near that, and a CAS, which
    counts nanoseconds since 1970, reaches it in 2262.
    """
    return numbers.view(np.int64)
