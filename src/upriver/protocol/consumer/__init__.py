"""The consuming end of a DCP connection, pure: no socket, loop, thread or clock.

``machine.Consumer`` is one connection, with the doors ``receive``, ``receive_eof``, ``data_to_send`` and ``wake``.
``negotiation`` has the controls that it asks for first; ``setup`` opens and ends streams; ``records`` turns received
changes into records. It never stores a change after one that it refused. It needs a store that fits
``streams.ReplicaStore``.
"""
