"""Accompany a training job: when to save, on which ranks, and how to end in time.

``Checkpointer`` is what users call; it compares the ranks' arguments, restores, decides together
with the other ranks when a save is due, and hears SIGTERM. Read ``checkpointer.py`` first.
"""
