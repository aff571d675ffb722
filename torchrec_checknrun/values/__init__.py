"""Turn plain values and state objects into bytes and back, without pickle.

Read ``state.py`` first. Nothing here knows of checkpoints.
"""
