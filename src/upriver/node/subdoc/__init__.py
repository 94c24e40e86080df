"""Sub-document commands: read and change paths inside a JSON document or its extended attributes.

``commands`` has the handlers; everything below them is pure (``specs``, ``paths``, ``xattrs``, ``view``) except
``write``, which reads and writes the vbucket. A document is spliced, never parsed and written again.
"""
