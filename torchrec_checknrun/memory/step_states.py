"""Hold everything beside rows in an image, as of the ends of the last two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_checknrun.memory.held_states import size_of
from torchrec_checknrun.shared_memory.areas import Areas
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import HEAD_BYTES, Piece, Place

_NAMES = ("state-0", "state-1")


class StepStates:
    """Two places of an image, of which the older one is written.

    Args:
        areas: the image.
    """

    def __init__(self, areas: Areas) -> None:
        self._areas = areas
        self._places: dict[str, tuple[torch.Tensor, Place]] = {}

    @property
    def steps(self) -> list[int]:
        """Return the steps whose state is there, whole.

        Raises:
            NoImage: the image has no such places.
        """
        found = [self._place(name).read() for name in _NAMES]
        return [each[0] for each in found if each is not None]

    def read(self, step: int) -> memoryview:
        """Return the state as of a step, in shared memory.

        Raises:
            NoImage: it is damaged, or not there.
        """
        for name in _NAMES:
            found = self._place(name).read()
            if found is not None and found[0] == step:
                return found[1]
        raise NoImage(f"it has no state of step {step}")

    def clear(self, pieces: Sequence[Piece]) -> None:
        """Leave no state, but room for one as large as these pieces.

        Raises:
            ImagesRefused: too little memory is left.
        """
        for name in _NAMES:
            self._make_room(name, pieces)
            self._place(name).clear()

    def write(self, step: int, pieces: Sequence[Piece], keep: int | None = None) -> None:
        """Write a step's state over that of another step.

        Args:
            keep: the step whose state stays.

        Raises:
            ImagesRefused: too little memory is left; the state of ``keep`` is as before.
        """
        name = next(name for name in _NAMES if self._place(name).number != keep)
        self._make_room(name, pieces)
        self._place(name).write(step, pieces)

    def _make_room(self, name: str, pieces: Sequence[Piece]) -> None:
        needed = size_of(pieces) + HEAD_BYTES
        if not self._areas.has(name):
            self._areas.add(name, needed + needed // 4)
        elif len(self._areas.get(name)) < needed:
            self._place(name).clear()
            self._areas.grow(name, needed + needed // 2, HEAD_BYTES)

    def _place(self, name: str) -> Place:
        memory = self._areas.get(name)
        known = self._places.get(name)
        if known is None or known[0] is not memory:
            known = self._places[name] = memory, Place(memory)
        return known[1]
