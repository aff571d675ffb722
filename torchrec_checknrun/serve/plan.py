"""Decide what to read: nothing new, or which of the newest chain's checkpoints aren't served yet.

Most looks at a root end at its listing: nothing was committed since the last one.

A differential replaces rows wholly, so the version served needs only those after it. Where the run
went another way (it fell back, or its policy stores differences to the full checkpoint), the two
chains have their first part in common: rows beyond that on either side are read anew. Where not
even the full checkpoint is the same, all rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_checknrun.errors import ChainBroken, CheckpointNotFound
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.checkpoints import may_be_newer, read_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import FOLDER


@dataclass(frozen=True)
class Plan:
    """The part of a chain to read.

    Attributes:
        common: number of the chain's checkpoints, from the full one on, that the served version is
            built of, too; 0: all rows are read.
        follows: whether the served version is the last of these.
    """

    chain: Chain
    common: int
    follows: bool

    @property
    def current(self) -> bool:
        """Return whether the chain's head is served already."""
        return self.follows and self.common == len(self.chain.manifests)


def plan(chain: Chain, served: Sequence[Manifest]) -> Plan:
    """Compare a chain with the checkpoints that the served version is built of, oldest first."""
    if served:
        for place, manifest in enumerate(chain.manifests):
            if _same(manifest, served[-1]):
                return Plan(chain, place + 1, True)
    pairs = zip(chain.manifests, served, strict=False)
    same = [manifest.link == other.link for manifest, other in pairs]
    common = same.index(False) if False in same else len(same)
    if chain.head.deltas:  # rows that build on each other are followed in order, or from the base
        common = 0
    return Plan(chain, common, False)


def _same(manifest: Manifest, served: Manifest) -> bool:
    """Tell whether a checkpoint restores what is served: itself, or its compacted copy."""
    if manifest.link == served.link:
        return True
    same = manifest.previous == served.link and manifest.sequence == served.sequence
    return same and is_copy(manifest)


def is_copy(manifest: Manifest) -> bool:
    """Tell whether a checkpoint is the compacted copy of another, its ``previous``."""
    id = parse_id(manifest.id)
    return id is not None and id.is_copy and manifest.kind == "full"


def stays(root: Folder, shown: Manifest | None, chain: Chain, problems: str) -> bool:
    """Tell whether what is served is newer than the newest chain that was found, and is still
    there: listings of some stores are as of an earlier moment.

    Args:
        shown: the checkpoint that is served.
        problems: why newer ones can't be read.

    Raises:
        ChainBroken: it may be newer ones that can't be read.
    """
    if shown is None or chain.head.sequence >= shown.sequence:
        return False
    if problems:
        raise ChainBroken(f"newer checkpoints can't be read: {problems}")
    try:
        return read_manifest(root, shown.id).link == shown.link
    except CheckpointNotFound:
        return False


class Glance:
    """The names that a root held at the last look.

    A commit adds a directory, or a manifest to one that was there: those are looked at that could
    be newer than what is served. What is deleted is missing in the listing.
    """

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._names: list[str] | None = None

    def is_quiet(self, served: Manifest | None) -> bool:
        """List the root, and tell whether it is as at the last call, with nothing new committed.

        Args:
            served: the newest checkpoint of the last look; None: look in any case.

        Raises:
            StorageFailed: the storage failed.
        """
        names, before = self._root.names(), self._names
        self._names = names
        if served is None or names != before:
            return False
        return not any(
            may_be_newer(self._root, name) for name in names if self._could_be(name, served)
        )

    @staticmethod
    def _could_be(name: str, served: Manifest) -> bool:
        if name in (served.id, FOLDER) or name.startswith("."):
            return False
        id = parse_id(name)
        return id is None or id.sequence >= served.sequence
