"""The nearest tier: a rank's own image, which holds everything beside rows as of two steps.

The rows themselves need not be moved: they lie in the image, and its journals put them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrec_checknrun.memory.step_states import StepStates
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import as_piece
from torchrec_checknrun.tiers.tier import NotHeld, Piece, Version


class ImageTier:
    """The states of an image as a tier.

    Args:
        states: of the image.
    """

    def __init__(self, states: StepStates) -> None:
        self._states = states

    def put(self, version: Version, pieces: Iterable[Piece]) -> None:
        """Keep a step's state in place of the older of two; see ``Tier``."""
        content = [as_piece(bytes(piece)) for piece in pieces]
        newest = self.newest()
        if newest is None:
            self._states.clear(content)
        self._states.write(version.step, content, keep=None if newest is None else newest.step)

    def newest(self) -> Version | None:
        """Return the newest step whose state is there; see ``Tier``."""
        try:
            steps = self._states.steps
        except NoImage:
            return None
        return Version(max(steps)) if steps else None

    def get(self, version: Version) -> Iterator[memoryview]:
        """Return a step's state; see ``Tier``."""
        try:
            return iter([self._states.read(version.step)])
        except NoImage as error:
            raise NotHeld(str(error)) from None
