"""Rank 0's work in the root: claim it, number checkpoints, commit them, prune."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping

from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    SaveFailed,
    StorageFailed,
)
from torchrec_checknrun.format.manifest import Link, Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.chain import IGNORED, Chain
from torchrec_checknrun.root.checkpoints import (
    Listing,
    committed,
    expect,
    files_problem,
    has_manifest,
    highest_sequence,
    read_manifest,
    sizes_of,
)
from torchrec_checknrun.root.counting import (
    counting_ids,
    highest_epoch,
    require_newest,
    require_publications,
)
from torchrec_checknrun.root.lineage import (
    Lineage,
    Proposal,
    ancestors,
    last_number,
    note_number,
)
from torchrec_checknrun.root.policy import Policy
from torchrec_checknrun.root.prune import Pruned, prune
from torchrec_checknrun.root.pruner import Pruner
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import Claim, Holder, latest_claim
from torchrec_checknrun.writers.lease import Lease

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_PRUNE_SECONDS = 60.0
"""Seconds that the end of a run, or a restore, waits for a running pruning."""


class RootWriter:
    """A run's right to write to a root, with the duties that go with it.

    Args:
        lineage: of the next checkpoint.
        retention: which checkpoints to keep when pruning after a commit; None to never prune.
        publishes: the root is for publications, and must hold nothing else.

    Attributes:
        lost_parent: set by ``before_commit`` in the background when a checkpoint of the lineage was
            deleted; the training thread takes note, and resets this.
        settled: whether a restore has decided what becomes of the checkpoints that are there.
        compacting: the checkpoint that is being compacted behind training: it stays, and so does
            its copy until that is part of the lineage.
    """

    def __init__(
        self,
        root: Folder,
        lineage: Lineage,
        retention: Retention | None,
        *,
        publishes: bool = False,
    ) -> None:
        self._root = root
        self._publishes = publishes
        self._lineage = lineage
        self._retention = retention
        self._lease: Lease | None = None
        self._resumed_from: tuple[str, ...] = ()
        self._abandoned: tuple[str, ...] = ()
        self._newest: int | None = None
        """The number of the newest checkpoint, if the run goes on from that; 0: from none."""
        self._passed_over: tuple[str, ...] = ()
        """Newer checkpoints that the run can't go on from; see ``restored``."""
        self._manifests: dict[str, Manifest] = {}
        self._pruner = None if retention is None else Pruner(self._prune)
        self.lost_parent = self.settled = False
        self.compacting: Manifest | None = None
        self._sequence: int | None = None
        """The highest sequence number in use in the root, once looked for."""

    @property
    def lease(self) -> Lease:
        """Return the right to write, once claimed."""
        assert self._lease is not None, "the root is claimed before anything is written"
        return self._lease

    @property
    def epoch(self) -> int:
        """Return the epoch that was claimed."""
        return self.lease.claim.epoch

    def claim(self) -> None:
        """Make this run the only one that writes to the root.

        Raises:
            RootInUse: another run writes there, or has committed since this one was restored.
            ClaimDamaged: which of the root's checkpoints count can't be told.
            IncompatibleCheckpoint: the root is for publications, and holds something else.
        """

        def earlier(before: Claim | None) -> list[str]:
            return list(counting_ids(self._root, before, self._manifests))

        lease = Lease(self._root)
        above = highest_epoch(self._root, self._manifests)
        if self._publishes:
            require_publications(self._root, self._manifests)
        try:
            lease.acquire(earlier, self._uses, above=above)
            if self._newest is not None:
                counts = lease.claim.earlier or ()
                passed = self._passed_over
                require_newest(self._root, self._newest, counts, self._manifests, passed)
            # Until now nothing has protected the checkpoint from deletion.
            previous = self._lineage.previous
            if previous is not None and not self._is_whole(previous):
                logger.warning(
                    "%s was deleted or damaged meanwhile: the next checkpoint is full", previous.id
                )
                self._lineage.force_full()
        except BaseException:
            lease.release()  # else it would be renewed as long as the process lives
            raise
        self._lease = lease

    def progressed(self) -> None:
        """Note progress of the training, for other processes that ask for the root."""
        if self._lease is not None:
            self._lease.progressed()

    def restored(self, chain: Chain | None, passed_over: Iterable[str] | None = ()) -> None:
        """Protect a restored chain from deletion: the next checkpoint may build on it.

        Args:
            chain: None if the root holds no checkpoint.
            passed_over: newer checkpoints that can't be used, each line with an id and a reason;
                any other is not to be abandoned. None: all newer ones are.
        """
        self.settled = True
        number = 0 if chain is None else chain.head.sequence
        self._newest = None if passed_over is None else number
        # What doesn't count yet is abandoned by nobody: once adopted, it is as if committed.
        self._passed_over = tuple(line for line in passed_over or () if IGNORED not in line)
        if chain is None:
            return
        self.lost_parent = False
        self._resumed_from = tuple(manifest.id for manifest in chain.manifests)
        if self._lease is not None:
            self._lease.use(self._uses)

    def keep(self, ids: Iterable[str]) -> None:
        """Protect more checkpoints from deletion while this run has the root."""
        self._abandoned = tuple(dict.fromkeys((*self._abandoned, *ids)))
        if self._lease is not None:
            self._lease.use(self._uses)

    def leave_behind(self, chain: Chain | None) -> None:
        """Protect from deletion the chain that a fresh start abandons, and the chains that earlier
        attempts abandoned, if torchrun has restarted the run.

        Raises:
            ClaimDamaged, StorageFailed: the earlier attempts' claim can't be read.
        """
        self.settled = True
        before = latest_claim(self._root)
        left = [m.id for m in chain.manifests] if chain is not None else []
        if before is not None and before.holder.precedes(Holder.this_process()):
            left += before.uses
        self._abandoned = tuple(dict.fromkeys(left))
        if self._lease is not None:
            self._lease.use(self._uses)

    @property
    def _uses(self) -> tuple[str, ...]:
        """Return the ids that nobody may delete while this run has the root."""
        return tuple(dict.fromkeys((*self._resumed_from, *self._abandoned)))

    def propose(
        self, policy: Policy, bits: int | None, widths: Mapping[str, int], step: int
    ) -> Proposal:
        """Decide on the next checkpoint; see ``Lineage.propose``.

        Raises:
            CorruptCheckpoint: a directory in the root has the last number there is.
        """
        if self._sequence is None:
            self._sequence = highest_sequence(self._root)
        # Above saves through dcp.save meanwhile, and above restored checkpoints.
        numbers = (manifest.sequence for manifest in self._lineage.history)
        sequence = max(self._sequence, last_number(self._root), *numbers) + 1
        self._sequence = sequence
        try:
            return self._lineage.propose(policy, bits, widths, step, sequence, self.epoch)
        except CorruptCheckpoint:
            self._sequence = None  # looked for again
            raise

    def before_commit(self, proposal: Proposal, hidden: bool = False) -> None:
        """Check in the background, right before a commit, that the checkpoint will be usable.

        Args:
            hidden: newer ones may hide it, since it is only to be built on.

        Raises:
            RootInUse: the root was taken over.
            SaveFailed: the checkpoint could not be restored, or a restore would choose another.
        """
        self.lease.check()
        sequence, parent = proposal.header.sequence, proposal.header.parent
        assert sequence is not None, "it was decided"
        chain = self._chain(parent)
        gone = self._broken_end(chain)
        # Listed last of all, to see every commit until now.
        listing = Listing.of(self._root.names() if gone is None else [])
        if gone is None and parent is not None:
            names = set(listing.names)
            absent = (manifest.id for manifest in chain[1:-1] if manifest.id not in names)
            # Each by itself: a listing may lag behind.
            gone = next((id for id in absent if not has_manifest(self._root, id)), None)
        if gone is not None:
            self.lost_parent = True
            raise SaveFailed(
                f"{gone}, which this checkpoint builds on, was deleted from {self._root} or "
                "damaged, or files of it: the next checkpoint is full. Leave deletions to "
                "`retention` or `checknrun prune`"
            )
        # In its own directory, which was empty, nobody else has committed: ``put`` would refuse.
        others = (name for name in listing.names if name != proposal.id)
        if not hidden and (newer := self._taken(listing.only(others), sequence)) is not None:
            self._sequence = None
            raise SaveFailed(
                f"{newer} was committed to {self._root} meanwhile, with a sequence number that "
                "would hide this checkpoint: the next one gets a higher number"
            )

    def after_commit(self, proposal: Proposal) -> None:
        """Check once more when the manifest is written.

        Raises:
            RootInUse: the root was taken over between the last check and the commit.
        """
        self.lease.signs.committed.add(proposal.id)
        self.lease.check()

    def prune(self, last: Manifest) -> None:
        """Prune in the background, after the commit of a checkpoint."""
        if self._pruner is not None:
            self._pruner.start(last)

    def wait_for_pruning(self) -> None:
        """Wait for a running pruning, at most a minute."""
        if self._pruner is not None:
            self._pruner.wait(min(_PRUNE_SECONDS, self._root.patience.timeout_seconds))

    def close(self, failed: bool = False) -> None:
        """Give the root up.

        Args:
            failed: don't wait for a running pruning: the process must end at once.
        """
        if not failed:
            self.wait_for_pruning()
        if self._lease is not None:
            self._lease.release()

    def _is_whole(self, manifest: Manifest) -> bool:
        """Tell whether a checkpoint of the lineage is there as it was committed: what builds on a
        manifest that nobody can read can't be restored.
        """
        try:
            there = read_manifest(self._root, manifest.id)
        except CheckNRunError:
            return False
        sound = there.link == manifest.link
        return sound and files_problem(manifest, sizes_of(self._root, manifest)) is None

    def _chain(self, parent: Link | None) -> list[Manifest]:
        """Return what a checkpoint with this parent builds on in the lineage, newest first."""
        history = {m.id: m for m in self._lineage.history}
        found = None if parent is None else history.get(parent.id)
        return [] if found is None or found.link != parent else ancestors(found, history)

    def _broken_end(self, chain: list[Manifest]) -> str | None:
        """Return the end of a chain that is missing, or that lacks files, if any. Of the others,
        which are many, the directories alone are looked for.
        """
        ends = (*chain[:1], *chain[1:][-1:])
        return next((manifest.id for manifest in ends if not self._is_whole(manifest)), None)

    def _taken(self, listing: Listing, sequence: int) -> str | None:
        """Return a checkpoint that another process has committed with this number or higher."""
        ids = listing.ids
        names = (n for n in listing.names if n not in ids or ids[n].sequence >= sequence)
        for name in committed(self._root, listing.only(names)):
            try:
                if read_manifest(self._root, name).sequence >= sequence:
                    return name
            except CheckNRunError:
                continue
            except StorageFailed as error:  # it may be older: restores tell of it
                if error.errno not in (errno.EACCES, errno.EPERM):
                    raise
        return None

    def _prune(self, last: Manifest) -> Pruned:
        assert self._retention is not None
        self._manifests[last.id] = last  # read back when it was committed
        # The next checkpoint may build on these; their parents stay with them.
        compacting = self.compacting  # first: when it is given up, the history has the copy
        copied = [] if compacting is None else [compacting]
        history = self._lineage.history
        in_use = {*self._uses, *(m.id for m in (*history[:1], *history[-1:], *copied))}
        return prune(
            self._root,
            self._retention,
            in_use=in_use,
            copies_of=[manifest.sequence for manifest in copied],
            own=self.lease.claim,
            still_ours=self.lease.check,
            below=last.sequence,
            known=self._manifests,
        )


def commit(
    root: Folder,
    folder: Folder,
    manifest: Manifest,
    *,
    before: Iterable[Callable[[], object]] = (),
    after: Callable[[], object] | None = None,
) -> None:
    """Put a checkpoint's manifest, which makes the checkpoint exist.

    Args:
        folder: the checkpoint's directory in ``root``; all rank files are durable there.
        before: called first; each raises an error if the commit must not happen.
        after: called last; raises an error if the commit doesn't count. None: the checkpoint must
            count under the latest claim.

    Raises:
        ValueError: readers would refuse the manifest.
        SaveFailed: the checkpoint was not committed, or its files are gone.
    """
    for check in before:
        check()
    _require_files(root, manifest, "while it was written")
    data = manifest.to_bytes()
    folder.put(MANIFEST_NAME, data, new=True)
    note_number(root, manifest.sequence)
    expect(root, [manifest.id], newer=True)
    # Between the last look and the put this process may have been stopped for hours.
    _require_files(root, manifest, "while it was committed")
    if folder.read(MANIFEST_NAME) != data:
        raise SaveFailed(f"{folder}/{MANIFEST_NAME} is not the one written here")
    if after is not None:
        after()
        return
    claim = latest_claim(root)
    if claim is not None and not claim.admits(manifest.id, manifest.epoch):
        raise SaveFailed(
            f"a writer claimed {root} while {manifest.id} was committed, which therefore doesn't "
            "count: save again, into another directory"
        )


def _require_files(root: Folder, manifest: Manifest, when: str) -> None:
    """Check that the files still have their sizes.

    Raises:
        SaveFailed: files are gone, which somebody may have taken for leftovers.
    """
    try:
        problem = files_problem(manifest, sizes_of(root, manifest))
    except CorruptCheckpoint as error:
        problem = str(error)
    if problem is not None:
        raise SaveFailed(
            f"files of {root}/{manifest.id} went away {when}: {problem}. Leave deleting to "
            "`retention` or `checknrun prune`"
        )
