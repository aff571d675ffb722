"""Which committed checkpoints count under a claim, and what becomes of those that can't be read.

A restore and a pruning have no use for one that can't be read. In the next claim's list it counts:
should it be read again later, nothing of it is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, MutableMapping

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest, sequence_of
from torchrec_checknrun.root.chain import committed, read_manifest
from torchrec_checknrun.root.claims import Claim, require_claim
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)


def counting(
    root: Folder,
    claim: Claim | None,
    names: Iterable[str] | None = None,
    known: MutableMapping[str, Manifest] | None = None,
) -> Iterator[Manifest]:
    """List the committed checkpoints that can be read and count, highest sequence number first.

    Args:
        claim: the latest; of earlier writers only what it admits counts.
        names: what is in the root, if that is known.
        known: manifests that were read before, by id; gets those that are read now.

    Raises:
        ClaimDamaged: the claim was deleted under which one of them was committed.
        StorageFailed: a manifest can't be read.
    """
    for _, manifest in _each_that_counts(root, claim, names, known):
        if isinstance(manifest, StorageFailed):
            raise manifest
        if isinstance(manifest, Manifest):
            yield manifest


def counting_ids(
    root: Folder, claim: Claim | None, known: MutableMapping[str, Manifest] | None = None
) -> Iterator[str]:
    """List the ids of all committed checkpoints that count, for the next claim to name.

    Those that can't be read now are among them: of what could be read again later nothing is lost.
    Arguments as of ``counting``.

    Raises:
        ClaimDamaged: the claim was deleted under which one of them was committed.
        StorageUnreachable: the storage doesn't answer.
    """
    for name, _ in _each_that_counts(root, claim, None, known):
        yield name


def is_newest(root: Folder, claim: Claim | None, head: Manifest) -> bool:
    """Whether no checkpoint with a higher sequence number counts, or may count.

    Raises:
        ClaimDamaged, StorageUnreachable: as ``counting_ids``.
    """
    for name, manifest in _each_that_counts(root, claim, None, None):
        if isinstance(manifest, Manifest):
            return manifest.sequence <= head.sequence
        if (sequence_of(name) or 0) > head.sequence:
            return False
    return True


def highest_epoch(root: Folder, known: MutableMapping[str, Manifest] | None = None) -> int:
    """Return the highest epoch that a checkpoint was committed in, 0 without one.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    each = _each_that_counts(root, None, None, known)
    return max((m.epoch for _, m in each if isinstance(m, Manifest)), default=0)


def _each_that_counts(
    root: Folder,
    claim: Claim | None,
    names: Iterable[str] | None,
    known: MutableMapping[str, Manifest] | None,
) -> Iterator[tuple[str, Manifest | Exception]]:
    """List committed checkpoints with their manifests, or why these can't be read. Whether those
    count nothing tells: they do.
    """
    for name in committed(root, names):
        try:
            manifest = _known_manifest(root, name, known)
        except (CheckpointNotFound, StorageUnreachable) as error:
            if isinstance(error, StorageUnreachable):
                raise
            continue
        except (CheckNRunError, StorageFailed) as error:
            logger.warning("%s", error)
            yield name, error
            continue
        if claim is not None and manifest.epoch > claim.epoch:
            require_claim(root, manifest.id, manifest.epoch)
        if claim is None or claim.admits(manifest.id, manifest.epoch):
            yield name, manifest


def _known_manifest(
    root: Folder, name: str, known: MutableMapping[str, Manifest] | None
) -> Manifest:
    if known is None:
        return read_manifest(root, name)
    if name not in known:
        known[name] = read_manifest(root, name)
    return known[name]
