"""Save and restore the random number generators that a training loop draws from."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_checknrun.memory.generators import generators_state, set_generators
from torchrec_checknrun.options.arguments import PerRank

logger = logging.getLogger(__name__)

_MERGED = "seeds"


class RngState(PerRank):
    """The state of all global random number generators, each rank's own: PyTorch's on the CPU and
    on the current CUDA device, NumPy's legacy generator and Python's ``random``.

    Give one to a Checkpointer: ``state={"rng": RngState()}``. Generators that a program makes
    itself (``torch.Generator``, ``numpy.random.default_rng()``) are not included.

    A ``DataLoader`` draws a seed from PyTorch's generator whenever iteration begins, which a run
    that is resumed does once more: give the loader a generator of its own.

    On another number of ranks than the checkpoint's, no rank has a state to go on with: every rank
    then seeds its generators from all saved states and its own number, and a warning says so.
    Ranks draw different numbers, and the same ones again after another such restore. So does a
    rank that was lost in a partial recovery, from its own state in the newest checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(_Generators(), merge=_seeds, lost=_seed_of_lost)


class _Generators:
    """The generators of this process, as a Stateful."""

    def state_dict(self) -> dict[str, Any]:
        state = generators_state()
        if torch.cuda.is_available():  # asked for by name, and the same keys at every save
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if _MERGED in state:
            self._seed(state[_MERGED])
        else:
            set_generators(state)

    def _seed(self, seeds: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        digest = hashlib.sha256(f"{seeds}/{rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))  # CUDA's devices, too
        np.random.seed(int.from_bytes(digest[8:12], "little"))
        random.seed(digest)
        logger.warning(
            "random number generators of rank %d are seeded anew: there are none of this rank to "
            "go on with",
            rank,
        )


def _seed_of_lost(saved: dict[str, Any], steps: int) -> dict[str, Any]:
    """Make what a lost rank seeds its generators from: other numbers than it has drawn before."""
    own = _seeds([saved])[_MERGED]
    return {_MERGED: hashlib.sha256(f"{own}/{steps}".encode()).hexdigest()}


def _seeds(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' states into what each rank seeds its generators from."""
    digest = hashlib.sha256()
    for state in states:
        digest.update(state[_MERGED].encode() if _MERGED in state else state["torch"].numpy())
    return {_MERGED: digest.hexdigest()}
