"""Come back after a failure: from images in memory, in part from a checkpoint, or from the start.

Read ``survival.py`` first.
"""
