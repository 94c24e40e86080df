"""A node as a member of a cluster: the map, durable writes, and the manifest that its manager decides on.

The newest map alone says what a vbucket is here; it is on disk before it is obeyed, and an older one is refused.
The manager itself is in ``upriver.cluster``; it reaches a node through the routes of ``membership``.
"""
