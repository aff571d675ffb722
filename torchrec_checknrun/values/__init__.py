"""Turn plain values and state objects into bytes without pickle, and check untrusted JSON.

Read ``state.py`` first. Nothing here knows of checkpoints.
"""
