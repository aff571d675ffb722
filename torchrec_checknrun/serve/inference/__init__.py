"""An inference model as a follower sees it: its tables, the forms of their rows, and its names.

Read ``replica.py`` first, which is one copy of a model; it finds its tables by ``tables.py``.
"""
