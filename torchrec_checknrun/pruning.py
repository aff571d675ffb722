"""Deletes what no kept checkpoint needs, and what crashed saves have left.

A checkpoint's manifest goes first, so that a crash half-way leaves either the whole checkpoint or
something that is no checkpoint, which the next pruning removes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from torchrec_checknrun.chain import committed, counting, read_manifest
from torchrec_checknrun.errors import CheckNRunError, RootInUse, UnsupportedFormat
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.lease import FOLDER, Claim, latest_claim
from torchrec_checknrun.manifest import MANIFEST_NAME, Manifest, sequence_of
from torchrec_checknrun.retention import Retention, Verdict, judge, original_of

logger = logging.getLogger(__name__)

PINNED = "pinned"
"""The file in a checkpoint's directory that keeps it."""


@dataclass(frozen=True)
class Pruned:
    """What was deleted, or would be.

    Attributes:
        verdict: on the committed checkpoints.
        leftovers: directories of saves that were never committed.
        bytes: that the deleted checkpoints had.
    """

    verdict: Verdict
    leftovers: tuple[str, ...]
    bytes: int


def pin(root: Folder, id: str) -> None:
    """Keeps a checkpoint, and what it needs, until it is unpinned.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is no such checkpoint.
    """
    read_manifest(root, id)
    (root / id).put(PINNED, b"")


def unpin(root: Folder, id: str) -> None:
    """Takes a pin away, if there is one."""
    (root / id).delete(PINNED)


def prune(
    root: Folder,
    retention: Retention,
    *,
    in_use: Collection[str] = (),
    own: Claim | None = None,
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
        below: only leftovers of lower sequence numbers are certain to be dead; None: all, if no
            writer lives.
        known: manifests that earlier calls have read; gets those that this one reads.

    Raises:
        RootInUse: the writer that asks was replaced.
        UnsupportedFormat: a newer release has written something here, and only that one knows what
            it needs; nothing was deleted.
        StorageFailed: the storage refused; pruning again goes on where it stopped.
    """
    claim = latest_claim(root)
    if own is not None and (claim is None or claim.epoch != own.epoch):
        raise RootInUse(f"{root} has another writer now: it decides what is deleted")
    names = root.names()
    alive = own is None and claim is not None and claim.alive
    known = {} if known is None else known
    for id in known.keys() - set(names):
        del known[id]  # a long run's would grow
    found = list(counting(root, claim, names, known))
    used = {*in_use}
    if claim is not None and claim.alive:
        used |= {*claim.uses, *_committed_last(claim, found)}
    apart = set(names) - {manifest.id for manifest in found}
    others = [manifest for id, manifest in known.items() if id in apart]
    verdict = judge(found, retention, in_use=used)
    if verdict.delete or (others and own is None):  # else pins and damage make no difference
        pinned, damaged, gone = _look(root, [*found, *others])
        for id in gone:  # deleted by somebody else since it was read, perhaps not to the end
            del known[id]
        found, others = [[m for m in ms if m.id not in gone] for ms in (found, others)]
        verdict = judge(found, retention, pinned, used, damaged, others)
        if own is None:
            needed = _with_parents(known, {*verdict.keep, *(m.id for m in found)})
            ignored = {m.id: "of a replaced writer" for m in others if m.id not in needed}
            verdict = Verdict(verdict.keep, {**ignored, **verdict.delete})
    sizes = {manifest.id: manifest.stored_bytes for manifest in [*found, *others]}
    unknown = sorted(set(names) - sizes.keys())
    leftovers = () if alive else tuple(_leftovers(root, unknown, below))
    if verdict.delete:
        _check_readable(root, set(names) - known.keys())
    if not dry_run:
        for id in verdict.delete:
            _delete(root / id)
        for id in _leftovers(root, leftovers, below):  # a compaction may have begun meanwhile
            _delete(root / id)
    return Pruned(verdict, leftovers, sum(sizes[id] for id in verdict.delete))


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
        except CheckNRunError:
            continue  # whatever it was, nothing can be restored from it


def _with_parents(known: Mapping[str, Manifest], ids: Collection[str]) -> set[str]:
    """Also what these checkpoints need."""
    todo, found = list(ids), set[str]()
    while todo:
        id = todo.pop()
        link = known[id].parent if id in known and id not in found else None
        found.add(id)
        todo += [link.id] if link else []
    return found


def _look(root: Folder, found: Iterable[Manifest]) -> tuple[set[str], set[str], set[str]]:
    """Ids of those that are pinned, of those that lack files or parts of them, and of those that
    are no checkpoints any more.
    """
    pinned, damaged, gone = set[str](), set[str](), set[str]()
    for manifest in found:
        files = (root / manifest.id).sizes()
        if MANIFEST_NAME not in files:
            gone.add(manifest.id)
            continue
        if PINNED in files:
            pinned.add(manifest.id)
        if any(files.get(file.name) != file.size for file in manifest.files):
            damaged.add(manifest.id)
    return pinned, damaged, gone


class Pruner:
    """Prunes in the background after a commit, one time after the other. Used on rank 0 only.

    Failures are logged: a checkpoint too many does no harm.
    """

    def __init__(self, prune: Callable[[int], Pruned]) -> None:
        self._prune = prune
        self._thread: threading.Thread | None = None

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
        if done.verdict.delete or done.leftovers:
            logger.info(
                "deleted %d checkpoints (%.2f MB) and %d leftovers of failed saves",
                len(done.verdict.delete),
                done.bytes / 1e6,
                len(done.leftovers),
            )


def _leftovers(root: Folder, names: Iterable[str], below: int | None) -> Iterable[str]:
    for name in names:
        sequence = sequence_of(name)
        if sequence is None or (below is not None and sequence >= below):
            continue
        if root.is_link(name) or root.size(name) is not None:
            continue  # a file of that name is none of ours
        folder = root / name
        if folder.is_link(MANIFEST_NAME) or folder.size(MANIFEST_NAME) is not None:
            continue
        claim = latest_claim(folder)  # of a compaction, which has no epoch of the root's
        if claim is None or not claim.alive:
            yield name


def _delete(folder: Folder) -> None:
    folder.delete(MANIFEST_NAME)
    for name in folder.names():
        if name == FOLDER:
            claims = folder / FOLDER
            for claim in claims.names():
                claims.delete(claim)
            claims.remove()
        else:
            folder.delete(name)
    folder.remove()
