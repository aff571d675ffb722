"""Save and restore state beside the tables: optimizers, their wrappers, schedules, buffers.

Training programs nest optimizers in wrappers that know things their ``state_dict`` omits; all of it
comes back bit for bit, or is refused by name. Read ``optimizer.py`` first, then ``wrappers.py``.
"""
