"""A node as a member of a cluster: the map, durable writes, and the manifest that its manager decides on.

The newest map alone decides the states of vbuckets. It is on disk before it is applied, and an older one is refused.
The manager itself is in ``upriver.cluster``; it reaches a node through the routes of ``membership``.
"""
