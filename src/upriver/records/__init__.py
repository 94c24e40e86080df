"""Changes as Arrow data: the schemas of the change feed, and batches made from decoded columns.

``schema`` declares the schemas from which the client, the lake and Spark derive theirs; ``batches`` fills them. This
package imports Arrow and ``wire``, and touches neither sockets nor the store.
"""
