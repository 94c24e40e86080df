"""The producing end of a DCP connection, pure: no socket, loop, thread or clock.

``machine.Producer`` is one connection: requests and answers in (``receive`` for bytes, ``handle`` for decoded
messages), ``wake`` when time has passed or the store has something new, ``data_to_send`` out. ``requests`` is what it
does with each request, ``stream_request`` the decision on a new stream, ``stream`` one stream, ``turns`` their order,
``live`` the streams of all connections that have everything, ``takeover`` the handing over of a vbucket. Promises 6.1
to every reader. Needs a store that fits ``source.SourceStore``, and of ``wire`` the bulk encoders.
"""
