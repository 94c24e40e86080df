"""Scopes and collections: the manifest, the change from one to the next, and what each vbucket makes of it.

``manifest`` is pure. A bucket keeps its manifest on disk before any vbucket writes the events, so that a crash in
between is made up for at the next start.
"""
