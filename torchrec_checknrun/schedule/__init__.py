"""Decide when a checkpoint is begun, with one answer on all ranks.

Read ``triggers.py`` first.
"""
