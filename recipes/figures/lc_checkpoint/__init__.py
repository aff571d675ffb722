"""Reproduce LC-Checkpoint beside what the paper compares it with; `__main__.py` says how."""
