"""Keep each rank's files of the newest chain in its own machine's memory, for the next restore.

For what can't have images, above all tables on a GPU: its memory goes with the process, this one's
does not. A copy counts only with the manifest in the storage, as the file there does; all of this
is an extra, without which a restore reads the storage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.format.rank_file import rank_file_name
from torchrec_checknrun.memory.images import HostCopies
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.checkpoints import expect
from torchrec_checknrun.shared_memory.space import require_space
from torchrec_checknrun.store.copied_folder import CopiedFolder
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.copies_folder import CopiesFolder, folders_of_run
from torchrec_checknrun.tiers.outgoing import INDEXES, OutgoingCopies, logger


def make_host_files(wanted: object, root: Folder, ranks: Ranks, bytes: int) -> HostFiles | None:
    """Prepare a rank's copies; None if none are wanted.

    Args:
        wanted: as ``Checkpointer`` is given ``survive``.

    Raises:
        ImagesRefused: the folder is none.
    """
    if not isinstance(wanted, HostCopies):
        return None
    require_space(Path(wanted.folder), 0)
    return HostFiles(wanted, root, ranks.rank, ranks.world_size, bytes)


class HostFiles(OutgoingCopies):
    """The copies of one rank's files.

    Args:
        root: of the run's checkpoints.
        bytes: of the rank's tables with optimizer state, and of everything else.
    """

    def __init__(
        self, wanted: HostCopies, root: Folder, rank: int, world_size: int, bytes: int
    ) -> None:
        most = 2 * (bytes + INDEXES) if wanted.most_bytes is None else wanted.most_bytes
        super().__init__(
            CopiesFolder(wanted.path(root.place, rank, world_size)),
            rank,
            full_bytes=bytes + INDEXES,
            most=most,
            missing="copies are missing, and would be read from the storage",
        )
        self._root, self._keep_hours = root, wanted.keep_hours
        self._is_swept = False

    def committed(self, manifest: Manifest) -> None:
        """Keep the copy of a committed checkpoint, and those of its chain; must not fail."""
        try:
            self._keep(manifest)
            if not self._is_swept:  # not before: a restore may have read those of other ranks
                self._is_swept = True
                for line in self.folder.sweep(self._keep_hours):
                    logger.info("%s", line)
        except Exception as error:
            self._tell(f"they could not be kept: {error!r}")
        finally:
            self.folder.empty_outbox()

    def _keep(self, manifest: Manifest) -> None:
        kept, name = self.folder.kept(self._rank), rank_file_name(self._rank)
        kept.keep_only([*self._chain, manifest.id])
        outbox = self.folder.outbox(self._rank)
        size = next((file.size for file in manifest.files if file.name == name), None)
        if size is None or outbox.sizes().get(manifest.id) != size:
            return  # told already
        if (total := sum(kept.sizes().values()) + size) > self._most:
            self._tell(f"{total:,} bytes are more than most_bytes={self._most:,}")
            return
        target = self.folder.kept_path / manifest.id
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.rename(outbox.path(manifest.id), target / name)

    @property
    def readable(self) -> CopiedFolder:
        """Return the root of the checkpoints, read from the copies of all ranks on this machine."""
        folders = folders_of_run(self.folder.path)
        expect(self._root, _newest(folders))
        return CopiedFolder(self._root, [folder.kept_path for folder in folders])

    def close(self, over: bool) -> None:
        """End with these copies.

        Args:
            over: the run is over; else other processes may restore from them.
        """
        if over:
            self.folder.remove()


def _newest(folders: Iterable[CopiesFolder]) -> list[str]:
    """Return the id of the newest checkpoint of which there are copies, if there are any."""
    names = (path.name for folder in folders for path in folder.kept_path.glob("*"))
    ids = [id for name in names if (id := parse_id(name)) is not None]
    return [max(ids, key=lambda id: id.age).name] if ids else []
