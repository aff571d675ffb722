"""Grant the right to write to a root to one run at a time, and tell whether its holder still lives.

Read ``claims.py`` first: what stands in the root's folder ``writers/``.
"""
