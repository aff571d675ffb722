"""Seed PyTorch in tests that build hundreds of jobs.

``torch.manual_seed`` also notes what GPUs of three kinds would have to do once there are any, each
with the whole stack as text: 9 ms beside pytest, a sixth of what it takes to shard a small model.
"""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    """Seed the CPU's generator, from which models and batches of tests are drawn."""
    torch.default_generator.manual_seed(number)
