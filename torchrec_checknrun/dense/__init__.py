"""Save and restore state beside the tables: optimizers, their wrappers, schedules, buffers.

Training programs nest optimizers in wrappers with state that their ``state_dict`` omits; all of it
is restored bit for bit, or refused by name. Read ``optimizer.py`` first, then ``wrappers.py``.
"""
