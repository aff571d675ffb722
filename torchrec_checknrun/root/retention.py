"""Decide which checkpoints may go, from manifests alone (``prune`` carries it out); keep pins.

The unit is the chain: everything that a kept checkpoint needs is kept. Abandoned forks go first.
Checkpoints that can't be read are never chosen. A pin is a small file in a checkpoint's directory
that keeps the checkpoint, and its chain, until it is unpinned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from torchrec_checknrun.errors import ChainBroken, CheckpointNotFound, CorruptCheckpoint
from torchrec_checknrun.format.checks import Record, Text, seal, unseal
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import CheckpointId, parse_ids
from torchrec_checknrun.root.chain import incompatibility, walk
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.root.lineage import ancestors, copy_among, parent_among
from torchrec_checknrun.store.folder import Folder

PINNED = "pinned"
"""The file in a checkpoint's directory that keeps it."""
_MOST_BYTES = 1 << 16
"""The largest pin that is read."""


@dataclass(frozen=True)
class Retention:
    """A rule for how many checkpoints stay.

    Args:
        keep: number of newest restorable points; a compacted checkpoint stands for its originals,
            and pinned ones aren't counted. With 1, a damaged newest checkpoint leaves only those
            of its own chain to fall back to.
        every_hours: also keep the first point of every so many hours; None for none.

    Raises:
        ValueError: out of range.
    """

    keep: int = 2
    every_hours: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise ValueError(
                f"keep must be at least 1, an int, not {self.keep!r}: to keep all checkpoints, "
                "give retention=None (keep=null in Hydra)"
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
    """A decision on a root's checkpoints.

    Attributes:
        keep: by id, the reason to stay.
        delete: by id, the reason to go; in an order that never leaves one without its parent.
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
    ids: Mapping[str, CheckpointId] | None = None,
) -> Verdict:
    """Decide on all committed checkpoints of a root.

    Args:
        manifests: of all checkpoints that count, in any order.
        pinned: ids of checkpoints that a user keeps.
        in_use: ids of checkpoints that a writer resumes from or builds on.
        damaged: ids of checkpoints with missing or short files: no restorable points.
        ignored: checkpoints that don't count and are not decided on; pinned ones stay nevertheless,
            with those that they need. One that counts may build on one of these: it was adopted.
        ids: the checkpoints' names, if parsed already.
    """
    others = {manifest.id: manifest for manifest in ignored}
    history = _History.of(manifests, damaged, others, ids)
    by_id = {**others, **history.by_id}
    sound = {id: manifest for id, manifest in by_id.items() if id not in damaged}
    held = [id for id in pinned if id in by_id]
    # A pinned checkpoint may be of a fork, which can't be told once the rest of the fork is gone.
    apart = {*held, *(m.id for id in held for m in _needs(by_id[id], by_id) or ())}
    candidates = [point for point in history.points.values() if point.id not in apart]
    newest = candidates[: retention.keep]
    keep = {manifest.id: f"one of the newest {retention.keep}" for manifest in newest}
    if retention.every_hours is not None:
        for manifest in _first_of_each(candidates, 3600 * retention.every_hours):
            keep.setdefault(manifest.id, f"the first of {retention.every_hours:g} hours")
    for which, reason in ((held, "pinned"), (in_use, "in use")):
        for id in which:
            if id in by_id:
                keep.setdefault(id, reason)
    followed: set[str] = set()  # what these need is needed by a later one that is kept
    for id in sorted(keep, key=lambda id: by_id[id].sequence, reverse=True):
        if id in followed:
            continue
        whole = _needs(by_id[id], sound) or ()
        followed.update(parent.id for parent in whole)
        for parent in whole or _needs(by_id[id], by_id) or ():
            keep.setdefault(parent.id, f"{id} needs it")
    # A damaged checkpoint stays while newer than these, or while these are few: it may be fixed.
    last = newest[-1].sequence if len(newest) == retention.keep else None
    for manifest in history.ordered:
        newer = last is None or manifest.sequence > last
        if newer and manifest.id in damaged and manifest.id not in history.points:
            for parent in _needs(manifest, by_id) or ():
                keep.setdefault(parent.id, f"{manifest.id}, which may be fixed, needs it")
    return Verdict(keep, _deletable(history, keep, last))


def _deletable(history: _History, keep: Collection[str], last: int | None) -> dict[str, str]:
    """Return the checkpoints to delete, with reasons: children before their parents, forks first.

    Args:
        last: delete damaged checkpoints with lower sequence numbers; None for none.
    """
    points, abandoned = history.points, history.abandoned
    restorable = {manifest.id for manifest in history.whole}
    delete = {}
    for manifest in sorted(history.ordered, key=lambda m: m.id not in abandoned):
        if manifest.id in keep:
            continue
        if manifest.id in abandoned:
            delete[manifest.id] = "on an abandoned fork"
        elif (point := points.get(manifest.id, manifest)) is not manifest and point.id in keep:
            delete[manifest.id] = f"compacted into {point.id}"
        elif manifest.id in restorable:
            delete[manifest.id] = "older than what is kept"
        elif last is not None and manifest.sequence < last:
            delete[manifest.id] = "damaged, or what it builds on is"
    return delete


def abandoned_ids(
    manifests: Iterable[Manifest],
    damaged: Collection[str] = (),
    ignored: Iterable[Manifest] = (),
) -> set[str]:
    """Return ids of checkpoints on forks that the run abandoned; arguments as in ``judge``."""
    return _History.of(manifests, damaged, {one.id: one for one in ignored}).abandoned


@dataclass(frozen=True)
class _History:
    """All checkpoints of a root.

    Attributes:
        ordered: newest first.
        whole: checkpoints of complete, undamaged chains, newest first.
        points: restorable points, by the id of the checkpoint in which the run saved that state:
            the checkpoint itself, or its compacted copy.
        abandoned: ids of checkpoints on forks that the run abandoned.
    """

    ordered: list[Manifest]
    by_id: Mapping[str, Manifest]
    whole: list[Manifest]
    points: Mapping[str, Manifest]
    abandoned: set[str]

    @classmethod
    def of(
        cls,
        manifests: Iterable[Manifest],
        damaged: Collection[str],
        ignored: Mapping[str, Manifest],
        ids: Mapping[str, CheckpointId] | None = None,
    ) -> _History:
        found = {manifest.id: manifest for manifest in manifests}
        there = {**ignored, **found}  # restores read whatever a chain needs
        ids = parse_ids(there) if ids is None else ids
        copies = {name for name, id in ids.items() if id.is_copy}
        ordered = sorted(
            there.values(), key=lambda m: (m.sequence, m.id in copies, m.id), reverse=True
        )
        sound = {id: manifest for id, manifest in there.items() if id not in damaged}
        whole = [manifest for manifest in _whole(ordered, sound) if manifest.id in found]
        ordered = [manifest for manifest in ordered if manifest.id in found]
        by_id = {manifest.id: manifest for manifest in ordered}
        originals = originals_of(whole)
        abandoned = _abandoned(whole, by_id, originals)
        points: dict[str, Manifest] = {}
        for manifest in whole:
            if manifest.id not in abandoned:
                points.setdefault(originals[manifest.id], manifest)  # a copy comes before it
        return cls(ordered, by_id, whole, points, abandoned)


def originals_of(manifests: Iterable[Manifest]) -> dict[str, str]:
    """Return by id the ids of compacted copies' originals; for other checkpoints their own ids."""
    originals: dict[str, str] = {}
    links = {}
    for manifest in manifests:
        originals[manifest.id] = manifest.id
        if manifest.previous is not None and manifest.kind == "full":
            links[manifest.id] = manifest.previous.id, manifest.sequence
    ids = parse_ids({*links, *(original for original, _ in links.values())}) if links else {}
    for copy, (original, sequence) in links.items():
        fits = original not in ids or ids[original].sequence == sequence
        if fits and copy in ids and ids[copy].is_copy:
            originals[copy] = original
    return originals


def original_of(manifest: Manifest) -> str:
    """Return the id under which the run saved a checkpoint's state: of a compacted copy that of
    its original, of any other its own.
    """
    return originals_of([manifest])[manifest.id]


def next_parents(manifests: Iterable[Manifest], epoch: int, *, copies: bool) -> list[str]:
    """Return the ids of checkpoints on which a live writer's next one may build: of its last, and
    of compacted copies that are newer than that one's baseline.

    Args:
        manifests: of all checkpoints that count.
        epoch: the writer's.
        copies: whether the writer may go on from a copy that was made behind its training, as
            nobody else can tell.
    """
    known = {manifest.id: manifest for manifest in manifests}
    originals = originals_of(one for one in known.values() if one.epoch == epoch)
    own = [known[id] for id, original in originals.items() if original == id]
    if not own:
        return []
    last = max(own, key=lambda manifest: manifest.sequence)
    base = ancestors(last, known)[-1]
    of_copies = (id for id, original in originals.items() if original != id and copies)
    return [last.id, *(id for id in of_copies if known[id].sequence > base.sequence)]


def _whole(ordered: Sequence[Manifest], sound: Mapping[str, Manifest]) -> list[Manifest]:
    """Return the sound checkpoints of complete chains, in their order. However long chains are,
    each checkpoint is looked at once, after what it builds on.

    Args:
        ordered: newest first.
        sound: by id.
    """
    whole: set[str] = set()

    def is_whole(manifest: Manifest) -> bool:
        parent = parent_among(manifest, sound)
        if manifest.parent is None or parent is None:
            return manifest.parent is None
        fits = parent.id in whole and incompatibility(manifest, parent) is None
        return fits or copy_among(manifest, sound.values()) is not None

    for manifest in reversed(ordered):
        if manifest.id in sound and is_whole(manifest):
            whole.add(manifest.id)
    return [manifest for manifest in ordered if manifest.id in whole]


def _needs(manifest: Manifest, by_id: Mapping[str, Manifest]) -> list[Manifest] | None:
    """Return the checkpoints that a restore needs beside the given one; None if any is missing."""

    def find(child: Manifest, id: str) -> Manifest:
        parent = parent_among(child, by_id)
        if parent is None:
            raise ChainBroken(f"{child.id} needs {id}")
        return parent

    def stand_in(child: Manifest) -> Manifest | None:
        return copy_among(child, by_id.values())

    try:
        return list(walk(manifest, find, stand_in))[1:]
    except ChainBroken:
        return None


def _abandoned(
    whole: Sequence[Manifest], by_id: Mapping[str, Manifest], originals: Mapping[str, str]
) -> set[str]:
    """Return the ids that the newest lineage has jumped over by resuming from an older one."""
    copies = {originals[manifest.id]: manifest for manifest in whole}  # originals may be deleted
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
    for manifest in points:  # newest first: the oldest of each period stays
        when = datetime.fromisoformat(manifest.created_at).timestamp()
        first[int(when // seconds)] = manifest
    return first.values()


def pin(root: Folder, id: str) -> None:
    """Keep a checkpoint, and what it needs, until it is unpinned.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is no such checkpoint, or no more since a
            pruning has deleted it meanwhile; or its manifest is damaged.
    """
    read_manifest(root, id)
    try:
        write_pin(root, id)
        read_manifest(root, id)
    except (FileNotFoundError, CheckpointNotFound) as error:
        with suppress(FileNotFoundError):
            unpin(root, id)
        (root / id).remove()
        raise CheckpointNotFound(
            f"{root}/{id} was deleted while it was being pinned: pin another one"
        ) from error


class Pin(Record, frozen=True):
    """A pin's content: the id of the checkpoint that is kept."""

    id: Text


def write_pin(root: Folder, id: str) -> None:
    """Write a checkpoint's pin, replacing a damaged one."""
    (root / id).put(PINNED, seal("pin", {"id": id}))


def unpin(root: Folder, id: str) -> None:
    """Delete a checkpoint's pin, if there is one."""
    (root / id).delete(PINNED)


def is_pinned(folder: Folder) -> bool:
    """Return whether a checkpoint's directory holds a pin, or anything else of that name."""
    try:
        return PINNED in folder.names()
    except CorruptCheckpoint:  # the directory is a link: its content is not the root's
        return False


def pin_problem(root: Folder, id: str) -> str | None:
    """Return what is wrong with a checkpoint's pin; None if there is none, or a valid one.

    Raises:
        StorageFailed: the storage refused.
    """
    try:
        data = (root / id).read(PINNED, 0, _MOST_BYTES + 1)
        if unseal(data, Pin, _MOST_BYTES).id == id:
            return None
        what = "the pin of another checkpoint"
    except FileNotFoundError:
        return None
    except (ValueError, CorruptCheckpoint) as error:
        what = str(error)
    return (
        f"{root}/{id}/{PINNED}: {what}. It keeps the checkpoint nevertheless; `checknrun repair "
        f"{root}` rewrites it, `checknrun unpin` removes it"
    )
