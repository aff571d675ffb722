"""Save one checkpoint or publication after the other: all ranks agree on it, begin it, and note
what became of it.

Read ``saver.py`` first.
"""
