"""Records: the Arrow schemas of the change feed, and columns off the wire as Arrow batches.

``schema`` declares the schemas that the client, the lake and Spark derive theirs from; ``batches`` makes batches of
them. This package knows Arrow and ``wire``, no socket and no store.
"""
