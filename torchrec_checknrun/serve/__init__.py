"""Serve a run: keep an inference model at the newest state that a root holds, while it predicts.

``follower.py`` is the entry: it plans (``plan.py``), reads what is new (``load.py``) and writes it
into a copy of the model that nobody reads (``copies.py``). ``inference/`` knows the model: its
tables and its names.
"""

from torchrec_checknrun.serve.follower import Follower
from torchrec_checknrun.serve.version import Version

__all__ = ["Follower", "Version"]
