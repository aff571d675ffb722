"""Deletes what no kept checkpoint needs, and what crashed saves have left.

A checkpoint's manifest goes first, so that a crash half-way leaves either the whole checkpoint or
something that is no checkpoint, which the next pruning removes.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass

from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
    SaveFailed,
    StorageFailed,
    StorageUnreachable,
    UnsupportedFormat,
)
from torchrec_checknrun.format.manifest import MANIFEST_NAME, Manifest, sequence_of
from torchrec_checknrun.root.chain import committed, read_manifest
from torchrec_checknrun.root.claims import FOLDER, Claim, latest_claim
from torchrec_checknrun.root.counting import counting, counting_ids, highest_epoch
from torchrec_checknrun.root.deletion import Deletion, with_parents
from torchrec_checknrun.root.lease import Lease
from torchrec_checknrun.root.liveness import clean_up, is_abandoned, standing_of
from torchrec_checknrun.root.retention import (
    PINNED,
    Retention,
    Verdict,
    is_pinned,
    judge,
    original_of,
)
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(manifest\.json|pinned)\.[0-9a-f]+")


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or would be.

    Attributes:
        verdict: on the committed checkpoints.
        leftovers: directories of saves that were never committed.
        bytes: that the deleted checkpoints had.
        problems: what stays although it should go, since it is no file of this package's.
    """

    verdict: Verdict
    leftovers: tuple[str, ...]
    bytes: int
    problems: tuple[str, ...] = ()


def prune(
    root: Folder,
    retention: Retention,
    *,
    in_use: Collection[str] = (),
    own: Claim | None = None,
    still_ours: Callable[[], object] = lambda: None,
    below: int | None = None,
    known: MutableMapping[str, Manifest] | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Deletes what no kept checkpoint needs.

    Args:
        in_use: ids that stay whatever the retention says.
        own: the claim of the writer that asks; None for a person, who leaves alone what a live
            writer may be working on, and also deletes what readers ignore: checkpoints that
            replaced writers have committed.
        still_ours: raises an error once the writer that asks was replaced; called before each
            checkpoint that is deleted.
        below: only leftovers of lower sequence numbers are certain to be dead; None: all, if no
            writer lives.
        known: manifests that earlier calls have read; gets those that this one reads.

    Raises:
        RootInUse: the writer that asks was replaced.
        IncompatibleCheckpoint: a person asks, and no whole checkpoint counts, but others are there,
            which replaced writers have committed; nothing was deleted.
        ClaimDamaged: which checkpoints count can't be told; nothing was deleted.
        CorruptCheckpoint: a pinned checkpoint's manifest is damaged, so that nothing tells what it
            needs; nothing was deleted.
        UnsupportedFormat: a newer release has written something here, and only that one knows what
            it needs; nothing was deleted.
        StorageFailed: the storage refused; pruning again goes on where it stopped.
    """
    claim = latest_claim(root)
    if own is not None and (claim is None or claim.epoch < own.epoch):
        claim = own  # a listing lags behind
    if own is not None and claim is not None and claim.epoch > own.epoch:
        raise RootInUse(f"{root} has another writer now: it decides what is deleted")
    names = root.names()
    others_live = own is None and claim is not None and _may_live(root, claim)
    known = {} if known is None else known
    temporary: list[tuple[str, str]] = []
    for id in known.keys() - set(names):
        del known[id]  # a long run's would grow
    found = list(counting(root, claim, names, known))
    used = {*in_use}
    if claim is not None and (own is not None or others_live):
        used |= {*claim.uses, *_committed_last(claim, found)}
    apart = set(names) - {manifest.id for manifest in found}
    others = [manifest for id, manifest in known.items() if id in apart]
    verdict = judge(found, retention, in_use=used)
    if verdict.delete or (others and own is None):  # else pins and damage make no difference
        pinned, damaged, gone, temporary = _look(root, [*found, *others])
        for id in gone:  # deleted by somebody else since it was read, perhaps not to the end
            del known[id]
        found, others = [[m for m in ms if m.id not in gone] for ms in (found, others)]
        verdict = judge(found, retention, pinned, used, damaged, others)
        if own is None:
            _require_counting(root, [m for m in found if m.id not in damaged], others)
            needed = with_parents(known, {*verdict.keep, *(m.id for m in found)})
            ignored = {m.id: "of a replaced writer" for m in others if m.id not in needed}
            verdict = Verdict(verdict.keep, {**ignored, **verdict.delete})
    sizes = {manifest.id: manifest.stored_bytes for manifest in [*found, *others]}
    unknown = sorted(set(names) - sizes.keys())
    problems: list[str] = []
    leftovers = () if others_live else tuple(_leftovers(root, unknown, below, problems))
    if verdict.delete:
        _check_readable(root, set(names) - known.keys())
    if not dry_run:
        if leftovers and own is None and claim is not None and not _fence(root, claim):
            leftovers = ()
        delete = Deletion(root, known, still_ours)
        for id in verdict.delete:
            delete(id, _delete)
        gone_now = []
        for name in leftovers:
            # Looked at again: a save or a compaction may have gone on meanwhile.
            for still in _leftovers(root, [name], below, problems):
                gone_now += [name] if delete(still, _delete_uncommitted) else []
        leftovers = tuple(gone_now)
        problems += delete.odd
        if delete.failed:
            raise delete.failed[0]
        try:
            clean_up(root, others=temporary)
        except StorageUnreachable:
            raise
        except StorageFailed as error:
            problems.append(f"temporary files in {root} stay: {error}")
    bytes = sum(sizes[id] for id in verdict.delete)
    return Pruned(verdict, leftovers, bytes, tuple(dict.fromkeys(problems)))


def _may_live(root: Folder, claim: Claim) -> bool:
    """Return whether a claim's holder may be at work. Where nothing can be written, as on a disk
    that is full, it may: what can be deleted for certain is deleted nevertheless.
    """
    try:
        return not standing_of(root, claim).free
    except StorageUnreachable:
        raise
    except StorageFailed as error:
        logger.warning("it can't be told whether %s is written to: %s", root, error)
        return True


def _fence(root: Folder, claim: Claim) -> bool:
    """Begin an epoch that nobody holds if the holder of the latest is only silent: should it live,
    it commits nothing to what is taken for a leftover. Returns False if it is not silent any more.
    """
    if claim.released or claim.holder.gone:
        return True
    lease = Lease(root)
    above = highest_epoch(root)
    try:
        lease.acquire(lambda before: counting_ids(root, before), above=above, expected=claim.epoch)
    except RootInUse as error:
        logger.warning("what was never committed stays: %s", error)
        return False
    lease.release()
    return True


def _require_counting(root: Folder, whole: list[Manifest], others: list[Manifest]) -> None:
    """Refuse to delete what replaced writers have committed where nothing else could be restored.

    Raises:
        IncompatibleCheckpoint: names the newest of them.
    """
    if others and not whole:
        newest = max(others, key=lambda manifest: manifest.sequence).id
        raise IncompatibleCheckpoint(
            f"nothing is deleted from {root}: it holds {len(others)} checkpoint(s) that replaced "
            f"writers have committed, and no other that could be restored. `checknrun adopt {root} "
            f"{newest}` makes the newest one count"
        )


def _committed_last(claim: Claim, found: Iterable[Manifest]) -> Iterable[str]:
    """What a live writer's next checkpoint may build on: its last one, which needs the others. It
    knows nothing of a compacted copy.
    """
    own = [m for m in found if m.epoch == claim.epoch and original_of(m) == m.id]
    return [max(own, key=lambda m: m.sequence).id] if own else []


def _check_readable(root: Folder, names: Iterable[str]) -> None:
    for name in committed(root, names):
        try:
            read_manifest(root, name)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"nothing is deleted from {root}: {error}") from error
        except CheckNRunError as error:
            # Whatever it was, nothing can be restored from it; but somebody wants to keep it.
            if PINNED in (root / name).names():
                raise CorruptCheckpoint(
                    f"nothing is deleted from {root}: {name} is pinned, and nothing tells what it "
                    f"needs, since its manifest can't be read: {error}. Put that right, or "
                    f"`checknrun unpin {root} {name}`"
                ) from error


def _look(
    root: Folder, found: Iterable[Manifest]
) -> tuple[set[str], set[str], set[str], list[tuple[str, str]]]:
    """Find the ids of those that are pinned, of those that lack files or parts of them, and of
    those that are no checkpoints any more; and temporary files, by id and name.
    """
    pinned, damaged, gone = set[str](), set[str](), set[str]()
    temporary: list[tuple[str, str]] = []
    for manifest in found:
        files = (root / manifest.id).sizes()
        if MANIFEST_NAME not in files:
            gone.add(manifest.id)
            continue
        if is_pinned(root / manifest.id):
            pinned.add(manifest.id)
        temporary += [(manifest.id, name) for name in files if _TEMPORARY.fullmatch(name)]
        if any(files.get(file.name) != file.size for file in manifest.files):
            damaged.add(manifest.id)
    return pinned, damaged, gone, temporary


class Pruner:
    """Prunes in the background after a commit, one time after the other. Used on rank 0 only.

    Failures are logged: a checkpoint too many does no harm.
    """

    def __init__(self, prune: Callable[[int], Pruned]) -> None:
        self._prune = prune
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    def start(self, sequence: int) -> None:
        """After the checkpoint of this sequence number was committed."""
        if self._thread is not None and self._thread.is_alive():
            return  # the next commit comes
        self._thread = threading.Thread(
            target=self._run, args=(sequence,), name="checknrun-prune", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits for what is running, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, sequence: int) -> None:
        try:
            done = self._prune(sequence)
        except Exception as error:
            logger.warning("old checkpoints were not all deleted, the next try follows: %s", error)
            return
        for problem in done.problems:
            if problem not in self._told:
                self._told.add(problem)
                logger.warning("%s", problem)
        if done.verdict.delete or done.leftovers:
            logger.info(
                "deleted %d checkpoints (%.2f MB) and %d leftovers of failed saves",
                len(done.verdict.delete),
                done.bytes / 1e6,
                len(done.leftovers),
            )


def _leftovers(
    root: Folder, names: Iterable[str], below: int | None, problems: list[str]
) -> Iterator[str]:
    for name in names:
        sequence = sequence_of(name)
        if sequence is None or (below is not None and sequence >= below):
            continue
        try:
            if _is_leftover(root, name):
                yield name
        except (CheckNRunError, OSError) as error:
            if isinstance(error, StorageUnreachable):
                raise
            problems.append(f"{root}/{name} stays: {error}")


def _is_leftover(root: Folder, name: str) -> bool:
    if root.is_link(name) or root.size(name) is not None:
        return False  # a file of that name is none of ours
    folder = root / name
    if folder.is_link(MANIFEST_NAME) or folder.size(MANIFEST_NAME) is not None:
        return False
    if PINNED in folder.names():
        return False  # somebody wants to keep it, though its manifest is gone
    return is_abandoned(folder)  # a compaction has no epoch of the root's


def _delete(folder: Folder) -> list[str]:
    """Delete a checkpoint's files and the folder; returns the names of what is none of them."""
    folder.delete(MANIFEST_NAME)
    return _delete_files(folder)


def _delete_uncommitted(folder: Folder) -> list[str]:
    """As ``_delete``, of what has no manifest.

    Raises:
        SaveFailed: it has got one.
    """

    def look() -> None:
        if folder.size(MANIFEST_NAME) is not None:
            raise SaveFailed("it was committed meanwhile")

    return _delete_files(folder, look)


def _delete_files(folder: Folder, before_each: Callable[[], object] = lambda: None) -> list[str]:
    files, kept = folder.sizes(), []
    for name in folder.names():
        if name in files or folder.is_link(name):
            before_each()
            folder.delete(name)
        elif name == FOLDER:
            claims = folder / FOLDER
            for claim in claims.sizes():
                claims.delete(claim)
            claims.remove()
        else:
            kept.append(name)
    folder.remove()
    return kept
