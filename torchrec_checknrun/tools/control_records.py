"""Find damage in the control records: claims, pins, and whether any checkpoint counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    ClaimDamaged,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.root.retention import PINNED, pin_problem
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import tells_nothing
from torchrec_checknrun.writers.claims import FOLDER, claim_epoch, read_claims, require_claim


@dataclass(frozen=True)
class Damage:
    """The damage of a root's control records.

    Attributes:
        claims: problems of damaged claims, by path.
        forbidden: errors for claims and pins that may be sound, but that this process can't read,
            by path.
        pins: problems of unreadable pins, by checkpoint id.
        undecided: why the checkpoints that count can't be told; None if they can.
        will_count: whether each committed checkpoint counts, by id, newest first; if undecided,
            whether it will after ``takeover.repair``.
        doubtful: ids of checkpoints that will count, though only a lost claim could tell for sure.
        highest: the highest epoch that was claimed, 0 without one.
    """

    claims: dict[str, str]
    forbidden: dict[str, str]
    pins: dict[str, str]
    undecided: str | None
    will_count: dict[str, bool]
    doubtful: frozenset[str]
    highest: int

    @property
    def hidden(self) -> bool:
        """Return whether there are checkpoints of which none counts."""
        return bool(self.will_count) and not any(self.will_count.values())


def find_damage(root: Folder, known: Mapping[str, Manifest] | None = None) -> Damage:
    """Look at all control records of a root.

    Args:
        known: manifests that were read before, by id.

    Raises:
        StorageFailed: the storage refused.
    """
    claims = read_claims(root, every=True)
    manifests = dict(_manifests(root, known or {}))
    undecided: str | None = None
    lost = max((claim_epoch(name) or 0 for name in claims.undecided), default=0)
    try:
        latest = claims.decided()
        for id, manifest in manifests.items():
            if latest is not None and manifest is not None and manifest.epoch > latest.epoch:
                require_claim(root, id, manifest.epoch)
    except ClaimDamaged as error:
        undecided = str(error)
        lost = max([lost, *(m.epoch for m in manifests.values() if m is not None)])
    latest = claims.latest
    decides = latest.before if latest is not None and latest.earlier is None else latest
    listed = set(decides.earlier or ()) if decides is not None else set[str]()
    will_count: dict[str, bool] = {}
    doubtful = set()
    for id, manifest in manifests.items():
        will_count[id] = latest is None or manifest is None or latest.admits(id, manifest.epoch)
        sure = id in listed or (manifest is not None and manifest.epoch >= lost)
        if undecided is not None and will_count[id] and not sure:
            doubtful.add(id)
    unread = {f"{FOLDER}/{name}": what for name, what in claims.damaged.items()}
    forbidden = {f"{FOLDER}/{name}" for name in claims.forbidden}
    pins, unread_pins = _pins(root, manifests)
    return Damage(
        claims={path: what for path, what in unread.items() if path not in forbidden},
        forbidden={path: what for path, what in unread.items() if path in forbidden} | unread_pins,
        pins=pins,
        undecided=undecided,
        will_count=will_count,
        doubtful=frozenset(doubtful),
        highest=claims.highest,
    )


def _manifests(
    root: Folder, known: Mapping[str, Manifest]
) -> Iterator[tuple[str, Manifest | None]]:
    """Read the manifests of committed checkpoints; None for one that can't be read."""
    for id in committed(root):
        try:
            yield id, known.get(id) or read_manifest(root, id)
        except CheckpointNotFound:
            continue
        except (CheckNRunError, StorageFailed) as error:
            if isinstance(error, StorageUnreachable):
                raise
            yield id, None


def _pins(root: Folder, ids: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the problems of damaged pins by checkpoint id, and of unread ones by path."""
    damaged: dict[str, str] = {}
    unread: dict[str, str] = {}
    for id in ids:
        try:
            problem = pin_problem(root, id)
        except StorageUnreachable:
            raise
        except (CheckNRunError, StorageFailed) as error:
            if tells_nothing(error):
                unread[f"{id}/{PINNED}"] = str(error)
                continue
            problem = str(error)
        if problem is not None:
            damaged[id] = problem
    return damaged, unread
