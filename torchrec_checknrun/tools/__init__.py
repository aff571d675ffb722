"""Work on a root without a model: verify, compact, export, compare, forecast, take over.

The modules here hold the functions behind the ``checknrun`` commands. Read ``verify.py`` first.
"""
