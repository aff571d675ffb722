"""Store how values have changed, in a few buckets: LC-Checkpoint (ICML 2020).

Read ``buckets.py`` first, which is the paper's; ``rows.py`` encodes the rows of a table by it.
"""

from torchrec_checknrun.delta.lc.buckets import LEAST_BITS, MOST_BITS, decode, encode

__all__ = ["LEAST_BITS", "MOST_BITS", "decode", "encode"]
