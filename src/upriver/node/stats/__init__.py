"""STAT: groups of figures under the names that existing tools read.

``command`` has the handler and the table of groups; each other module has the groups of one subject. A group only
reads, and yields one figure at a time, so that a long one does not stop the other connections.
"""
