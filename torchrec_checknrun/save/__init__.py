"""Take a snapshot to storage behind training: a plan of all ranks, rank files, the commit.

A thread or a process encodes and writes while training goes on. A checkpoint counts from the moment
its manifest exists. Read ``background.py`` first, then ``commit.py``.
"""
