"""Know which rows were modified: mark them, and cut the marks into layers for checkpoints.

Training marks live bytes. A cut freezes them as a layer in constant time; packing, uniting and
zeroing happen in other threads. ``priorities.py`` chooses the rows that matter most. Read
``marks.py`` first, then ``layers.py``.
"""
