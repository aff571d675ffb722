"""Tell a root from another one in its place: after a changed link, a mount, a copy put there.

A writer whose claim is gone writes it anew: somebody has deleted it, or the whole root. In another
root that claim, with its list of what counts, would hide every checkpoint there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchrec_checknrun.errors import CorruptCheckpoint, RootInUse
from torchrec_checknrun.format.names import MANIFEST_NAME, parse_ids
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import FOLDER, Claim, epochs, read_claim


@dataclass
class Signs:
    """The signs by which a writer knows its root again; one of them is enough.

    Attributes:
        committed: ids of the checkpoints that it has committed there, beside those in its claim.
        before: the claim that it has found there.
    """

    committed: set[str] = field(default_factory=set)
    before: Claim | None = None

    def is_gone(self, root: Folder, claim: Claim) -> bool:
        """Return whether the file of the writer's claim is gone from its root.

        Raises:
            RootInUse: the root is another: it holds claims or checkpoints, and none that the
                writer knows.
            StorageFailed: the storage refused.
        """
        folder = root / FOLDER
        if folder.size(claim.name) is not None:
            return False
        names = root.names()
        if not self.committed.union(claim.earlier or (), claim.uses).isdisjoint(names):
            return True
        found = [*_claims(folder)]
        if self.before is not None and any(_same(self.before, other) for other in found):
            return True
        strange = [f"{FOLDER}/{other.name}" for other in found] or [*_committed(root, names)]
        if strange:
            raise RootInUse(
                f"another folder is in place of {root}, which this process has claimed: it holds "
                f"{strange[-1]}, and nothing that this process knows. A link, a mount or a copy "
                "has changed; nothing more is saved there: put the run's own folder back, or end "
                "this process and start the run again"
            )
        return True


def _same(one: Claim, other: Claim) -> bool:
    return (one.epoch, one.holder) == (other.epoch, other.holder)


def _claims(folder: Folder) -> Iterator[Claim]:
    """Yield the claims that can be read."""
    for epoch in epochs(folder.names()):
        try:
            yield read_claim(folder, epoch)
        except (FileNotFoundError, ValueError, CorruptCheckpoint):
            continue


def _committed(root: Folder, names: Iterable[str]) -> Iterator[str]:
    """Yield the names of committed checkpoints, of this package's naming."""
    for name in parse_ids(names):
        if not root.is_link(name) and (root / name).size(MANIFEST_NAME) is not None:
            yield name
