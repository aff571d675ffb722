"""Show online training: a stream is predicted, then trained on; the served model follows.

``python -m recipes.dlrm_criteo.online_demo``; ``run.py`` is the file to read first.
"""
