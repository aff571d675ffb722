"""Test the package; room by room in `unit`, and whole jobs beside it.

Everything computes with one thread, the processes that tests start as well: `make test` runs
several groups at once, and the threads of a pool wait for each other by turning over, on a core
that another group could use.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
