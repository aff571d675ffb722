"""Serve a run: keep an inference model at the newest state that a root holds, while it predicts.

``follower.py`` is the entry: it plans (``plan.py``), reads what is new (``load.py``) and writes it
into a copy of the model that nobody reads (``copies.py``). ``tables.py`` finds the model's tables.
"""

from torchrec_checknrun.serve.follower import Follower
from torchrec_checknrun.serve.version import Version

__all__ = ["Follower", "Version"]
