"""List the committed checkpoints that count under a claim.

Restores and prunings skip checkpoints that can't be read. The next claim lists them nevertheless:
should they become readable again, nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    IncompatibleCheckpoint,
    RootInUse,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import sequence_of
from torchrec_checknrun.root.checkpoints import Listing, committed, read_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import Claim, require_claim

logger = logging.getLogger(__name__)


def counting(
    root: Folder,
    claim: Claim | None,
    listing: Listing | None = None,
    known: MutableMapping[str, Manifest] | None = None,
) -> Iterator[Manifest]:
    """List the committed checkpoints that can be read and count, highest sequence number first.

    Args:
        claim: the latest; checkpoints of earlier writers count only if it admits them.
        listing: the names in the root, if listed already.
        known: manifests read before, by id; receives the ones read now.

    Raises:
        ClaimDamaged: the claim under which one of them was committed was deleted.
        StorageFailed: a manifest can't be read.
    """
    for _, manifest in _each_that_counts(root, claim, listing, known):
        if isinstance(manifest, StorageFailed):
            raise manifest
        if isinstance(manifest, Manifest):
            yield manifest


def counting_ids(
    root: Folder, claim: Claim | None, known: MutableMapping[str, Manifest] | None = None
) -> Iterator[str]:
    """List the ids of all committed checkpoints that count, for the next claim, including those
    that can't be read now. Arguments as in ``counting``.

    Raises:
        ClaimDamaged: the claim under which one of them was committed was deleted.
        StorageUnreachable: the storage doesn't answer.
    """
    for name, _ in _each_that_counts(root, claim, None, known):
        yield name


def is_newest(root: Folder, claim: Claim | None, head: Manifest) -> bool:
    """Return whether no checkpoint with a higher sequence number counts, or may count.

    Raises:
        ClaimDamaged, StorageUnreachable: as in ``counting_ids``.
    """
    for name, manifest in _each_that_counts(root, claim, None, None):
        if isinstance(manifest, Manifest):
            return manifest.sequence <= head.sequence
        if (sequence_of(name) or 0) > head.sequence:
            return False
    return True


def highest_epoch(root: Folder, known: MutableMapping[str, Manifest] | None = None) -> int:
    """Return the highest epoch in which a checkpoint was committed; 0 if there is none.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    each = _each_that_counts(root, None, None, known)
    return max((m.epoch for _, m in each if isinstance(m, Manifest)), default=0)


def require_publications(root: Folder, known: MutableMapping[str, Manifest] | None = None) -> None:
    """Refuse a root for publications that holds a run's own checkpoints, counting or not: the rule
    for how many publications stay would delete them.

    Raises:
        IncompatibleCheckpoint: names one of them.
        StorageUnreachable: the storage doesn't answer.
    """
    for _, manifest in _each_that_counts(root, None, None, known):
        if isinstance(manifest, Manifest) and not _is_for_serving(manifest):
            raise IncompatibleCheckpoint(
                f"{root} holds {manifest.id}, a checkpoint with optimizer or training state, which "
                "the publications' `keep` would delete: publish to a folder of its own"
            )


def require_newest(
    root: Folder,
    number: int,
    counts: Iterable[str],
    known: Mapping[str, Manifest],
    passed_over: Collection[str],
) -> None:
    """Refuse a claim if the run would abandon what was committed between restore and claim, as by
    ranks that outlive their agent.

    Args:
        number: the sequence number of the checkpoint that the run goes on from; 0: of none.
        counts: ids of the checkpoints that count.
        known: manifests by id.
        passed_over: what the run can't go on from, each line with an id and a reason.

    Raises:
        RootInUse: names the newest.
    """

    def number_of(id: str) -> int:
        return known[id].sequence if id in known else sequence_of(id) or 0

    newest = max(
        (id for id in counts if not any(line.startswith(f"{id}: ") for line in passed_over)),
        key=number_of,
        default=None,
    )
    if newest is not None and number_of(newest) > number:
        raise RootInUse(
            f"{newest} was committed to {root}, or adopted, by another process after this run's "
            "restore(), and would be abandoned: restore() again, or start this process again"
        )


def require_apart(root: Folder, published: Folder) -> None:
    """Refuse roots of which one lies in the other: each deletes what it doesn't know.

    Raises:
        ValueError: one does.
    """
    one, other = (f"{folder.place}/" for folder in (root, published))
    if one.startswith(other) or other.startswith(one):
        raise ValueError(
            f"publish: root {published} must lie outside of the checkpoints' root {root}: give it "
            "a folder of its own beside that"
        )


def _is_for_serving(manifest: Manifest) -> bool:
    """Return whether a checkpoint holds what a prediction needs alone, as publications do."""
    return all(name.partition(".")[0] == "model" for name in manifest.states) and not any(
        table.optimizer_bytes or table.learning_rate is not None
        for table in manifest.tables.values()
    )


def _each_that_counts(
    root: Folder,
    claim: Claim | None,
    listing: Listing | None,
    known: MutableMapping[str, Manifest] | None,
) -> Iterator[tuple[str, Manifest | Exception]]:
    """List committed checkpoints with their manifests, or with the error of reading them; the
    latter count, since nothing tells otherwise.
    """
    for name in committed(root, listing):
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
