"""Compare this package with its peers: one model, one access trace, one run.

Read ``run.py`` first, then ``systems.py``, which has a class for each system.
"""
