"""Work on a root without a model: verify, compact, export, compare, forecast, take over.

These are the functions behind the ``checknrun`` commands. Read ``verify.py`` first.
"""
