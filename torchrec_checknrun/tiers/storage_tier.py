"""The farthest tier: the storage, which holds each rank's file of the committed checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.own_check import check_rank_file
from torchrec_checknrun.tiers.tier import NotHeld, Piece, Version

_PIECE = 8 << 20


class StorageTier:
    """A root as a tier of one rank.

    Args:
        root: of the checkpoints.
        file: name of the rank's files.
    """

    def __init__(self, root: Folder, file: str) -> None:
        self._root, self._file = root, file

    def put(self, version: Version, pieces: Iterable[Piece]) -> None:
        """Write the rank's file of a checkpoint, which counts once all ranks' files are committed;
        see ``Tier``.
        """
        folder = self._root / version.id
        folder.create()
        with folder.write(self._file) as file:
            for piece in pieces:
                file.write(piece)

    def newest(self) -> Version | None:
        """Return the newest checkpoint that a restore would take; see ``Tier``."""
        chain, _ = newest(self._root)
        return None if chain is None else Version(chain.head.step, chain.head.id)

    def get(self, version: Version) -> Iterator[memoryview]:
        """Return the rank's file of a checkpoint; see ``Tier``."""
        folder = self._root / version.id
        try:
            size = check_rank_file(folder, self._file).size
        except (CheckNRunError, OSError) as error:
            raise NotHeld(str(error)) from error
        return (
            memoryview(folder.read(self._file, at, min(_PIECE, size - at)))
            for at in range(0, size, _PIECE)
        )
