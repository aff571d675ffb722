"""Keep files in memory that outlives a process: hold, grow and share them out, and find damage.

Read ``file.py`` first, then ``header.py``, whose records are whole or not there.
"""
