"""The rules of DCP as state machines for both ends: producer, consumer, feed, positions, sessions.

Pure: no sockets, clocks, threads or logging; ``now`` is a parameter. The machine of a connection has three doors:
``receive``, ``receive_eof`` and ``data_to_send``. The specification is in docs/protocol/.
"""
