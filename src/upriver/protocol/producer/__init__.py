"""The producing end of a DCP connection, pure: no socket, loop, thread or clock.

``machine.Producer`` is one connection: ``receive`` takes bytes, ``handle`` takes decoded requests, ``wake`` is called
when time has passed or the store has news, ``data_to_send`` gives the bytes. ``requests`` handles each request and
``stream_request`` decides on new streams. ``stream`` is one stream, ``frames`` its bytes, ``turns`` the order of
streams, ``live`` the live streams of all connections, ``takeover`` the handover of a vbucket. Every stream keeps the
promises of docs/protocol/snapshots.md#promises. Needs a store that fits ``source.SourceStore``.
"""
