"""Decide which checkpoints of a root count, who may write there, and what may be deleted.

A root is one folder with all checkpoints of a run. Chains lead from a checkpoint to its baseline;
a lease and claims ensure a single writer; policies choose full or differential, retention chooses
what is kept. Read ``chain.py`` first, then ``lease.py``.
"""
