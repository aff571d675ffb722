"""Differential, quantized checkpoints for TorchRec, on torch.distributed.checkpoint.

The stub beside this file is the one list of public names. A name is imported at its first use:
Hydra imports this package in every app of an environment that has it installed, and must not pay
for torch and TorchRec there. The modules ``codecs``, ``dcp``, ``elastic``, ``errors``,
``integrations``, ``policy``, ``tracking`` and ``triggers`` hold the rest of the public interface;
all other modules are private.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
