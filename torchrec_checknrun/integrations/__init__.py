"""Use checkpoints in trainers of other libraries: callbacks, and state that every job has.

Read ``rng.py`` first; ``lightning.py`` and ``torchtnt.py`` each hold one callback and are imported
by name, since each needs its own library (the extras ``lightning`` and ``torchtnt``).
"""

from torchrec_checknrun.integrations.rng import RngState as RngState
