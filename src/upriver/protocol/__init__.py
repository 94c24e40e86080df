"""The rules of DCP as state machines for both ends: producer, consumer, feed, positions, sessions.

Pure: no socket, clock, thread or log; ``now`` is a parameter. A machine of a connection has three doors: ``receive``,
``receive_eof`` and ``data_to_send``. The specification is in docs/protocol/.
"""
