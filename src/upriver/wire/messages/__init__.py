"""Every message of the protocol as one declared class, by family; ``upriver.wire.message`` explains the declaration.

Field order is byte order. A class checks its own rules and nothing that needs a connection or a store.
"""
