"""Sockets to nodes: connections, conversations (handshake, requests, answers) and polling of several at once.

``aio`` and ``blocking`` connect and move bytes. ``conversation`` and ``aio_conversation`` do the handshake, send
requests and match answers; both use ``requests``, which is pure. All connections to nodes are made here.
"""
