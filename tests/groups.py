"""End a process group in a process that goes on."""

from __future__ import annotations

import time

import torch.distributed as dist

_REST = 0.05
"""Seconds in which gloo's threads may drop the work that they have done last."""


def end_process_group() -> None:
    """Destroy the default process group, if there is one.

    Threads of gloo need the interpreter's lock to drop what they have done last. PyTorch's
    destructor of the group waits for these threads, and holds the lock where a garbage collection
    calls it: on a busy machine both have waited for each other.
    """
    if dist.is_initialized():
        time.sleep(_REST)
        dist.destroy_process_group()
