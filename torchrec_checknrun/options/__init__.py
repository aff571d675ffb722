"""Check a Checkpointer's arguments, and hold them in their final form.

Read ``options.py`` first.
"""
