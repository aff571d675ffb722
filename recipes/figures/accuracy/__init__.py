"""Measure what restores from lossy checkpoints cost a model; `__main__.py` says how."""
