"""Bound the numbers of stored values."""

LARGEST = 2**63 - 1
"""The largest number: the range of int64, for readers in other languages."""
