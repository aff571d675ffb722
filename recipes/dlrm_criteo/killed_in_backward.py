"""Train as `recipes.dlrm_criteo.train` does, and die in the middle of backward when asked to.

The demo asks for it, by a file in the run's directory: from outside, nobody can tell where in a
step a process is. One rank of the first attempt dies, once the gradient of a dense parameter is
there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from recipes.dlrm_criteo import train
from recipes.dlrm_criteo.model import Architecture

KILLED_RANK = 1
REQUEST = "kill"
"""Name of the file that asks for the kill."""

_build = train.build


def build(
    cfg: DictConfig, architecture: Architecture, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Build the trainer's model, with a hook on one of its dense parameters."""
    model, optimizer = _build(cfg, architecture, device)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if dist.get_rank() == KILLED_RANK and attempt == 0:
        request = Path(cfg.run_dir) / REQUEST

        def die(_: torch.Tensor) -> None:
            if request.exists():
                os.kill(os.getpid(), signal.SIGKILL)

        dense = (p for name, p in model.named_parameters() if "dense_arch" in name)
        next(dense).register_post_accumulate_grad_hook(die)
    return model, optimizer


if __name__ == "__main__":
    train.build = build
    train.main()
