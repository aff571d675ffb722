"""Compact a chain into one full checkpoint, from storage to storage, without a model or ranks.

Read ``compact.py`` first; the other modules take rows out of chunks, hold and join them, undecoded.
"""
