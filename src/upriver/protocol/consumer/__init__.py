"""The consuming end of a DCP connection, pure: no socket, loop, thread or clock.

``machine.Consumer`` is one connection: ``receive``, ``receive_eof``, ``data_to_send`` and ``tick``. ``negotiation`` is
what it asks for first, ``setup`` how it opens and ends streams, ``rows`` and ``apply`` how documents and other changes
become records. Stores nothing that it could not tell in order. Needs a store that fits ``streams.ReplicaStore``.
"""
