"""Accompany a training job: decide when to save, on all ranks alike, and end in time.

``Checkpointer`` is the class users call: it compares the ranks' arguments, restores, decides
together with the other ranks when a save is due, and handles SIGTERM. Read ``checkpointer.py``
first, then ``saver.py``.
"""
