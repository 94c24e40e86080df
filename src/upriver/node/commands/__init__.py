"""The handlers of a node: one module per family of commands, and the table of all of them (``table``).

A handler takes a connection and one message, and answers through the connection. It may use the connection, its
bucket and its node; it may raise any ``StatusError``, which becomes the answer. ``kv_fast`` answers plain GETs and
SETs without a message object and leaves everything else to ``dispatch``.
"""
