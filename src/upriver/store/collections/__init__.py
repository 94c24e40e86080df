"""Scopes and collections: the manifest, the transition from one to the next, and how each vbucket applies it.

``manifest`` is pure. A bucket keeps a new manifest on disk before any vbucket writes its events, so that after a crash
the next start can apply the rest.
"""
