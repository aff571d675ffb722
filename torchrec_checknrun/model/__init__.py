"""Know TorchRec and FBGEMM: which rows of which tables a step changes, and where the rows live.

A ``TrackedModel`` finds the tables of a sharded model, marks rows as lookups and updates touch
them, and keeps the marks through resharding. Read ``tracked.py`` first, then ``hooks.py``.
"""
