"""Bring a chain of checkpoints back into a model, on other ranks and sharding plans as well.

Every rank reads the parts that it needs, newest first, and each row is decoded once. Read
``restore.py`` first, then ``plan.py``.
"""
