"""Adapt this package's engine to ``dcp.save`` and ``dcp.load``: planners, writer and reader.

The engine itself, ``save_checkpoint`` and ``ChainRestore``, doesn't use torch's distributed
checkpointing (DCP). These four classes take the same steps in the order of DCP's protocols; a
planner needs the writer, or the reader, of this package. Read ``save.py`` first.
"""

from torchrec_checknrun.dcp.load import LoadPlanner, StorageReader
from torchrec_checknrun.dcp.save import SavePlanner, StorageWriter, models_of
from torchrec_checknrun.restore.fit import Fit

__all__ = ["Fit", "LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter", "models_of"]
