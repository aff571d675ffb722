"""Save and restore the random number generators that a training loop draws from."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_checknrun.memory.generators import generators_state, set_generators
from torchrec_checknrun.options.arguments import PerRank

logger = logging.getLogger(__name__)

_MERGED, _OWN = "seeds", "own"

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class RngState(PerRank):
    """The state of all global random number generators, each rank's own: PyTorch's on the CPU and
    on the current CUDA device, NumPy's legacy generator and Python's ``random``.

    Give one to a Checkpointer: ``state={"rng": RngState()}``, with the generators that the program
    makes itself under names of theirs: ``RngState(negatives=torch.Generator())``.

    A ``DataLoader`` draws a seed from PyTorch's generator whenever iteration begins, which a run
    that is resumed does once more: give the loader a generator of its own.

    On another number of ranks than the checkpoint's, no rank has a state to go on with: every rank
    then seeds its generators from all saved states and its own number, and a warning says so.
    Ranks draw different numbers, and the same ones again after another such restore. So does a
    rank that was lost in a partial recovery, from its own state in the newest checkpoint.

    Args:
        own: more generators, by name: ``torch.Generator``, ``numpy.random.Generator``
            (``numpy.random.default_rng()``), ``numpy.random.RandomState`` and ``random.Random``.
            One that the checkpoint lacks goes on as the program has made it, with a warning.

    Raises:
        TypeError: a value is no generator; names it.
    """

    def __init__(self, **own: Generator) -> None:
        for name, generator in own.items():
            if not isinstance(generator, Generator):
                raise TypeError(
                    f"RngState({name}=…) takes a torch.Generator, numpy.random.Generator, "
                    f"numpy.random.RandomState or random.Random, not a {type(generator).__name__}"
                )
        super().__init__(_Generators(own), merge=_seeds, lost=_seed_of_lost)


class _Generators:
    """The generators of this process, as a Stateful.

    Args:
        own: those beside the global ones, by name.
    """

    def __init__(self, own: Mapping[str, Generator]) -> None:
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        state = generators_state()
        state[_OWN] = {name: _state_of(generator) for name, generator in self._own.items()}
        if torch.cuda.is_available():  # asked for by name, and the same keys at every save
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if _MERGED in state:
            self._seed(state[_MERGED])
        else:
            saved = state[_OWN]
            for name, generator in self._own.items():
                if name in saved:
                    _require_kind(name, generator, saved[name])
            set_generators(state)
            for name in self._own.keys() & saved.keys():
                _set(self._own[name], saved[name])
            if differ := sorted(self._own.keys() ^ saved.keys()):
                logger.warning(
                    "random number generators %s are not in both the checkpoint and "
                    "RngState(…=generator): those of the program go on as it has made them",
                    differ,
                )

    def _seed(self, seeds: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        digest = hashlib.sha256(f"{seeds}/{rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))  # CUDA's devices, too
        np.random.seed(int.from_bytes(digest[8:12], "little"))
        random.seed(digest)
        for name, generator in self._own.items():
            _seed_one(generator, hashlib.sha256(digest + name.encode()).digest())
        logger.warning(
            "random number generators of rank %d are seeded anew: there are none of this rank to "
            "go on with",
            rank,
        )


def _state_of(generator: Generator) -> torch.Tensor | str:
    """Return a generator's state: PyTorch's as bytes; else JSON, its kind first."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(["random.Random", generator.getstate()])
    state: Any = _numpy_state_of(generator)
    return json.dumps([state["bit_generator"], state], default=np.ndarray.tolist)


def _numpy_state_of(generator: np.random.Generator | np.random.RandomState) -> Mapping[str, Any]:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    found: Any = generator.get_state(legacy=False)
    return {**found}


def _require_kind(name: str, generator: Generator, saved: torch.Tensor | str) -> None:
    """Require that a generator is of the kind that a state was saved of."""
    kinds = [
        "torch.Generator" if isinstance(state, torch.Tensor) else json.loads(state)[0]
        for state in (saved, _state_of(generator))
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"random number generator {name!r} was a {kinds[0]} when it was saved, and is a "
            f"{kinds[1]} now: make the same kind, or give it another name in RngState(…)"
        )


def _set(generator: Generator, saved: torch.Tensor | str) -> None:
    if isinstance(generator, torch.Generator):
        assert isinstance(saved, torch.Tensor)
        generator.set_state(saved)
        return
    assert isinstance(saved, str)
    state = json.loads(saved)[1]
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _seed_one(generator: Generator, seed: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(int.from_bytes(seed[:7], "little"))
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        kind = getattr(np.random, _numpy_state_of(generator)["bit_generator"])
        fresh = kind(np.random.SeedSequence(int.from_bytes(seed, "little"))).state
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = fresh
        else:  # it may keep a second normal number back
            generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _seed_of_lost(saved: dict[str, Any], steps: int) -> dict[str, Any]:
    """Make what a lost rank seeds its generators from: other numbers than it has drawn before."""
    own = _seeds([saved])[_MERGED]
    return {_MERGED: hashlib.sha256(f"{own}/{steps}".encode()).hexdigest()}


def _seeds(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' states into what each rank seeds its generators from."""
    digest = hashlib.sha256()
    for state in states:
        if _MERGED in state:
            digest.update(state[_MERGED].encode())
            continue
        digest.update(state["torch"].numpy())
        for own in state[_OWN].values():
            digest.update(own.encode() if isinstance(own, str) else own.numpy())
    return {_MERGED: digest.hexdigest()}
