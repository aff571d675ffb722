"""Record a job's whole state after each step, independently of the package: the oracle of kills.

The state is read from TorchRec's own state dicts and from the state objects before the package
saves anything. A second run over the same step must produce the same bytes. Where restores round
rows, each life has records of its own, and restored rows may be off by half a step.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.distributed import lc_bound, references
from tests.distributed.states import Part, State

Values = dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], np.ndarray]]
"""Pieces of tensors by name and offset: the whole tensor's size, and this rank's piece."""


def values_of(parts: Iterable[Part]) -> Values:
    """Copy the pieces of a rank."""
    return {(p.name, p.offset): (p.size, p.tensor.cpu().numpy().copy()) for p in parts}


class Record:
    """The states of one rank, a file for each step and life; all lives are 0 unless rows are
    rounded.

    Args:
        folder: shared by all ranks and lives.
        links: the method that stores rows as differences, which rounds them; empty: rows are whole.
    """

    def __init__(self, folder: Path, rank: int, links: str = "") -> None:
        self._folder = folder
        self._rank = rank
        self._links = links

    def note(self, step: int, life: int, found: Values) -> list[str]:
        """Keep a step's state; return its differences from an earlier life's."""
        file = self._file(step, life, self._rank)
        if file.exists():
            return compare(found, _load(file))
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(pickle.dumps(found))
        temporary.rename(file)  # atomic: a process may be killed while writing
        return []

    def differences(self, step: int, life: int, found: Values) -> list[str]:
        """Compare this rank's restored pieces with those of a step."""
        wanted = _load(self._file(step, life, self._rank))
        if not self._links:
            return compare(found, wanted)
        problems = [f"only in one of them: {name}" for name, _ in found.keys() ^ wanted.keys()]
        states = [{name: piece for (name, _), (_, piece) in v.items()} for v in (found, wanted)]
        if self._links == "lc":  # ``kills`` compares closer, once it knows what a link builds on
            return problems + lc_bound.beside_tables(states[0], states[1])
        log_state = self._links == "logdelta"
        return problems + references.differences(states[0], states[1], None, True, log_state)

    def whole(self, step: int, life: int, ranks: int) -> State:
        """Join the pieces of all ranks; leave out the state of single ranks."""
        state: State = {}
        for rank in range(ranks):
            for (name, offset), (size, piece) in _load(self._file(step, life, rank)).items():
                whole = state.setdefault(name, np.zeros(size, piece.dtype))
                ends = zip(offset, piece.shape, strict=True)
                whole[tuple(slice(start, start + length) for start, length in ends)] = piece
        return state

    def _file(self, step: int, life: int, rank: int) -> Path:
        return self._folder / f"step-{step}-life-{life}-rank-{rank}"


def _load(file: Path) -> Values:
    values: Values = pickle.loads(file.read_bytes())
    return values


def compare(found: Values, wanted: Values) -> list[str]:
    """List the pieces that differ in at least one bit."""
    problems = [f"only in one of them: {name}" for name, _ in found.keys() ^ wanted.keys()]
    for key in found.keys() & wanted.keys():
        (size, one), (other_size, other) = found[key], wanted[key]
        if size != other_size or one.dtype != other.dtype or one.shape != other.shape:
            problems.append(f"{key[0]}: {one.dtype}{size}, not {other.dtype}{other_size}")
        elif one.tobytes() != other.tobytes():
            rows = (one != other).reshape(len(one) if size else 1, -1).any(axis=1)
            problems.append(f"{key[0]}: rows {list(np.flatnonzero(rows))[:20]} differ")
    return problems
