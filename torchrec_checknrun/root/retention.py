"""Which checkpoints may go: plain decisions on manifests; ``pruning`` carries them out.

The unit is the chain: whatever a kept checkpoint needs is kept. Forks that were left behind go
first. What can't be read is never chosen here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.checks import seal, unseal
from torchrec_checknrun.format.manifest import Manifest, sequence_of
from torchrec_checknrun.root.chain import age, incompatibility, is_copy, read_manifest
from torchrec_checknrun.store.folder import Folder


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay.

    Args:
        keep: the newest so many restorable points; a compacted checkpoint stands for what it was
            made of, and pinned ones aren't counted. With 1 a damaged newest one has no other to
            fall back to, except those that its own chain needs.
        every_hours: also the first point of every so many hours; None: of none.

    Raises:
        ValueError: out of range.
    """

    keep: int = 2
    every_hours: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise ValueError(
                f"keep must be at least 1, in whole ones, not {self.keep!r}: to keep all, give "
                "retention=None"
            )
        hours = self.every_hours
        is_number = isinstance(hours, (int, float)) and not isinstance(hours, bool)
        if hours is not None and not (is_number and hours >= 0.001):
            raise ValueError(
                f"every_hours must be positive, a number of hours, not {hours!r}: give at least "
                "0.001, such as 6, or None"
            )


@dataclass(frozen=True)
class Verdict:
    """What is to become of a root's checkpoints.

    Attributes:
        keep: by id, why it stays.
        delete: by id, why it goes; in this order, which never leaves one without its parent.
    """

    keep: Mapping[str, str]
    delete: Mapping[str, str]


def judge(
    manifests: Iterable[Manifest],
    retention: Retention,
    pinned: Collection[str] = (),
    in_use: Collection[str] = (),
    damaged: Collection[str] = (),
    ignored: Iterable[Manifest] = (),
) -> Verdict:
    """Decides on all committed checkpoints of a root.

    Args:
        manifests: of all that count, in any order.
        pinned: ids that a user wants to keep.
        in_use: ids that a writer goes on from.
        damaged: ids of those of which files are missing or too short: no restorable points.
        ignored: others, which don't count and aren't decided on; the pinned ones of them stay, and
            so does what they need.
    """
    history = _History.of(manifests, damaged)
    points, abandoned = history.points, history.abandoned
    by_id = {**{manifest.id: manifest for manifest in ignored}, **history.by_id}
    held = [id for id in pinned if id in by_id]
    # What is pinned may be of a fork, which nothing tells once the rest of it is gone.
    apart = {*held, *(m.id for id in held for m in _needs(by_id[id], by_id) or ())}
    newest = [point for point in points.values() if point.id not in apart][: retention.keep]
    reasons = {manifest.id: f"one of the newest {retention.keep}" for manifest in newest}
    if retention.every_hours is not None:
        others = [point for point in points.values() if point.id not in apart]
        for manifest in _first_of_each(others, 3600 * retention.every_hours):
            reasons.setdefault(manifest.id, f"the first of {retention.every_hours:g} hours")
    for ids, reason in ((held, "pinned"), (in_use, "in use")):
        for id in ids:
            if id in by_id:
                reasons.setdefault(id, reason)
    for id in list(reasons):
        for parent in _needs(by_id[id], by_id) or ():
            reasons.setdefault(parent.id, f"{id} needs it")
    restorable = {manifest.id for manifest in history.whole}
    delete = {}
    # Children before their parents, forks first.
    for manifest in sorted(history.ordered, key=lambda m: m.id not in abandoned):
        if manifest.id in reasons:
            continue
        if manifest.id in abandoned:
            delete[manifest.id] = "on a fork that was left behind"
        elif (point := points.get(manifest.id, manifest)) is not manifest and point.id in reasons:
            delete[manifest.id] = f"compacted into {point.id}"
        elif manifest.id in restorable:
            delete[manifest.id] = "older than what is kept"
        elif len(newest) == retention.keep and manifest.sequence < newest[-1].sequence:
            # One that is newer, or while there is little else, may yet be mended.
            delete[manifest.id] = "damaged, or what it builds on is"
    return Verdict(reasons, delete)


def abandoned_ids(manifests: Iterable[Manifest], damaged: Collection[str] = ()) -> set[str]:
    """Ids of checkpoints on forks that the run didn't go on from; arguments as of ``judge``."""
    return _History.of(manifests, damaged).abandoned


@dataclass(frozen=True)
class _History:
    """All checkpoints, newest first: which can be restored, and which were left behind.

    Attributes:
        whole: those of which nothing is damaged or missing.
        points: what stands for each state that wasn't left behind, by the id of the checkpoint that
            a run saved it in: that one, or the compacted copy of it.
    """

    ordered: list[Manifest]
    by_id: Mapping[str, Manifest]
    whole: list[Manifest]
    points: Mapping[str, Manifest]
    abandoned: set[str]

    @classmethod
    def of(cls, manifests: Iterable[Manifest], damaged: Collection[str]) -> _History:
        ordered = sorted(manifests, key=lambda m: age(m.sequence, m.id), reverse=True)
        by_id = {manifest.id: manifest for manifest in ordered}
        sound = {id: manifest for id, manifest in by_id.items() if id not in damaged}
        whole = [m for m in ordered if m.id in sound and _needs(m, sound) is not None]
        abandoned = _abandoned(whole, by_id)
        points: dict[str, Manifest] = {}
        for manifest in whole:
            if manifest.id not in abandoned:
                points.setdefault(original_of(manifest), manifest)  # a copy comes before it
        return cls(ordered, by_id, whole, points, abandoned)


def original_of(manifest: Manifest) -> str:
    """The id of the checkpoint that a run saved this state in: its own, unless it is compacted."""
    link = manifest.previous
    if link is None or manifest.kind != "full" or not is_copy(manifest.id):
        return manifest.id
    return link.id if sequence_of(link.id) in (None, manifest.sequence) else manifest.id


def _needs(manifest: Manifest, by_id: Mapping[str, Manifest]) -> list[Manifest] | None:
    """What a restore needs beside the manifest itself; None if that isn't all there."""
    found: list[Manifest] = []
    while (link := manifest.parent) is not None:
        parent = by_id.get(link.id)
        if parent is None or incompatibility(manifest, parent) is not None:
            return None
        found.append(parent)
        manifest = parent
    return found


def _abandoned(whole: Sequence[Manifest], by_id: Mapping[str, Manifest]) -> set[str]:
    """Those that the newest one's lineage has jumped over: an older one was gone on from."""
    copies = {original_of(manifest): manifest for manifest in whole}  # of some nothing else is left
    lineage: set[str] = set()
    jumps: list[tuple[int, int]] = []
    at = whole[0] if whole else None
    while at is not None and at.id not in lineage:
        lineage.add(at.id)
        link = at.previous
        before = by_id.get(link.id) or copies.get(link.id) if link else None
        if before is not None:
            jumps.append((before.sequence, at.sequence))
        at = before
    return {
        manifest.id
        for manifest in whole
        if manifest.id not in lineage and any(low < manifest.sequence < high for low, high in jumps)
    }


def _first_of_each(points: Sequence[Manifest], seconds: float) -> Iterable[Manifest]:
    first: dict[int, Manifest] = {}
    for manifest in points:  # newest first: the oldest of a time stays
        when = datetime.fromisoformat(manifest.created_at).timestamp()
        first[int(when // seconds)] = manifest
    return first.values()


PINNED = "pinned"
"""The file in a checkpoint's directory that keeps it."""


_MOST_BYTES = 1 << 16


def pin(root: Folder, id: str) -> None:
    """Keep a checkpoint, and what it needs, until it is unpinned.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is no such checkpoint.
    """
    read_manifest(root, id)
    write_pin(root, id)


def write_pin(root: Folder, id: str) -> None:
    """Write a checkpoint's pin, in the place of a damaged one as well."""
    (root / id).put(PINNED, seal("pin", {"id": id}))


def unpin(root: Folder, id: str) -> None:
    """Take a pin away, if there is one."""
    (root / id).delete(PINNED)


def is_pinned(folder: Folder) -> bool:
    """Return whether a checkpoint's directory holds a pin, or anything else under its name."""
    try:
        return PINNED in folder.names()
    except CorruptCheckpoint:  # the directory itself is a link: nothing in there is the root's
        return False


def pin_problem(root: Folder, id: str) -> str | None:
    """Say what is wrong with a checkpoint's pin; None if there is none, or a sound one.

    Raises:
        StorageFailed: the storage refused.
    """
    try:
        data = (root / id).read(PINNED, 0, _MOST_BYTES + 1)
        if unseal(data, "pin", _MOST_BYTES) == {"id": id}:
            return None
        what = "it is another checkpoint's"
    except FileNotFoundError:
        return None
    except (ValueError, CorruptCheckpoint) as error:
        what = str(error)
    return (
        f"{root}/{id}/{PINNED}: {what}. It keeps the checkpoint nevertheless; `checknrun repair "
        f"{root}` writes it anew, `checknrun unpin` takes it away"
    )
