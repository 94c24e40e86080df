"""Sockets towards nodes: connections, conversations (handshake, requests, answers) and waiting on several at once.

``aio`` and ``blocking`` connect and carry bytes; ``conversation`` and ``aio_conversation`` shake hands and ask;
``requests``, which both use, is pure. Client, node and replication talk to nodes through this room only.
"""
