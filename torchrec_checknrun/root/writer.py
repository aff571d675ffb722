"""What rank 0 does for all in the root: claims it, numbers checkpoints, takes the last look before
each commit, and deletes what is old.
"""

from __future__ import annotations

import logging

from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.manifest import (
    MANIFEST_NAME,
    Header,
    Link,
    Manifest,
    require_sequence,
    sequence_of,
)
from torchrec_checknrun.root.chain import Chain, committed, highest_sequence, read_manifest
from torchrec_checknrun.root.claims import Claim, Holder, latest_claim
from torchrec_checknrun.root.counting import counting_ids, highest_epoch
from torchrec_checknrun.root.lease import Lease
from torchrec_checknrun.root.lineage import Lineage, last_number
from torchrec_checknrun.root.prune import Pruned, Pruner, prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_PRUNE_SECONDS = 60.0
"""How long the end of a run, or a restore, waits for old checkpoints to be deleted."""


class RootWriter:
    """A run's right to write to a root, and what goes with it.

    Args:
        lineage: what the next checkpoint builds on.
        retention: which checkpoints are deleted after a commit; None: none.

    Attributes:
        lost_parent: set by ``before_commit`` in the background when a checkpoint of the lineage was
            deleted; the training thread takes note, and resets this.
    """

    def __init__(self, root: Folder, lineage: Lineage, retention: Retention | None) -> None:
        self._root = root
        self._lineage = lineage
        self._retention = retention
        self._lease: Lease | None = None
        self._resumed_from: tuple[str, ...] = ()
        self._left_behind: tuple[str, ...] = ()
        self._manifests: dict[str, Manifest] = {}
        self._pruner = None if retention is None else Pruner(self._prune)
        self.lost_parent = False
        self._sequence: int | None = None
        """The highest sequence number in use in the root, once that was looked for."""

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "the root is claimed before anything is written"
        return self._lease

    @property
    def epoch(self) -> int:
        """That was claimed."""
        return self.lease.claim.epoch

    def claim(self) -> None:
        """Makes this run the only one that writes to the root.

        Raises:
            RootInUse: another one does.
            ClaimDamaged: checkpoints are there, and which of them count can't be told.
        """

        def earlier(before: Claim | None) -> list[str]:
            return list(counting_ids(self._root, before, self._manifests))

        lease = Lease(self._root)
        above = highest_epoch(self._root, self._manifests)
        lease.acquire(earlier, self._uses, above=above)
        self._lease = lease
        # Nothing has kept it from being deleted until now.
        previous = self._lineage.previous
        if previous is not None and not self._is_whole(previous):
            logger.warning("%s was deleted meanwhile: the next checkpoint is full", previous.id)
            self._lineage.force_full()

    def progressed(self) -> None:
        """Note that training goes on, for those who would have the root."""
        if self._lease is not None:
            self._lease.progressed()

    def restored(self, chain: Chain) -> None:
        """The next checkpoint may build on these: nobody may delete them."""
        self.lost_parent = False
        self._resumed_from = tuple(manifest.id for manifest in chain.manifests)
        if self._lease is not None:
            self._lease.use(self._uses)

    def leave_behind(self, chain: Chain | None) -> None:
        """Keep from being deleted what a run leaves that starts anew: a chain, and the chains that
        the attempts before it have left, if torchrun has restarted it.

        Raises:
            ClaimDamaged, StorageFailed: what was left before can't be told.
        """
        before = latest_claim(self._root)
        left = [m.id for m in chain.manifests] if chain is not None else []
        if before is not None and before.holder.precedes(Holder.this_process()):
            left += before.uses
        self._left_behind = tuple(dict.fromkeys(left))
        if self._lease is not None:
            self._lease.use(self._uses)

    @property
    def _uses(self) -> tuple[str, ...]:
        """The ids that nobody may delete while this run has the root."""
        return tuple(dict.fromkeys((*self._resumed_from, *self._left_behind)))

    def next_sequence(self) -> int:
        """The next checkpoint's sequence number.

        Raises:
            CorruptCheckpoint: something in the root has the last number there is.
        """
        if self._sequence is None:
            self._sequence = highest_sequence(self._root)
        # Above what was saved through dcp.save meanwhile, and above what was restored.
        numbers = (manifest.sequence for manifest in self._lineage.history)
        sequence = max(self._sequence, last_number(self._root), *numbers) + 1
        self._sequence = None  # looked for again, should this one be refused
        require_sequence(sequence)
        self._sequence = sequence
        return sequence

    def before_commit(self, header: Header) -> None:
        """The last look, in the background.

        Raises:
            RootInUse: the root was taken over.
            SaveFailed: nothing could be restored from the checkpoint, or a restore would choose
                another one.
        """
        self.lease.check()
        if (gone := self._gone(header.parent)) is not None:
            self.lost_parent = True
            raise SaveFailed(
                f"{gone}, which this checkpoint builds on, was deleted from {self._root}, or files "
                "of it: the next one is full. Leave deleting to `retention` or `checknrun prune`"
            )
        assert header.sequence is not None, "it was decided"
        if (newer := self._taken(header.sequence)) is not None:
            self._sequence = None
            raise SaveFailed(
                f"{newer} was committed to {self._root} meanwhile, with a sequence number that "
                "would hide this checkpoint: the next one gets a higher number"
            )

    def after_commit(self) -> None:
        """Take one more look when the manifest is there.

        Raises:
            RootInUse: the root was taken over between the last look and the commit.
        """
        self.lease.check()

    def prune(self, sequence: int) -> None:
        """Deletes in the background what is old, after the checkpoint of this sequence number was
        committed.
        """
        if self._pruner is not None:
            self._pruner.start(sequence)

    def wait_for_pruning(self) -> None:
        """Returns when nothing is being deleted any more, or after a minute."""
        if self._pruner is not None:
            self._pruner.wait(min(_PRUNE_SECONDS, self._root.patience.timeout_seconds))

    def close(self, failed: bool = False) -> None:
        """Gives the root up.

        Args:
            failed: the process is to end at once: what is being deleted is not waited for.
        """
        if not failed:
            self.wait_for_pruning()
        if self._lease is not None:
            self._lease.release()

    def _is_whole(self, manifest: Manifest) -> bool:
        sizes = (self._root / manifest.id).sizes()
        files = {file.name: file.size for file in manifest.files}
        return MANIFEST_NAME in sizes and files.items() <= sizes.items()

    def _gone(self, parent: Link | None) -> str | None:
        """What is missing of the chain that ends in ``parent``, if anything: of its ends' files, or
        of the others' directories, which are many.
        """
        names = set(self._root.names()) if parent is not None else set[str]()
        chain = {manifest.link: manifest for manifest in self._lineage.history}
        ends = (parent, self._lineage.history[0].link) if self._lineage.history else ()
        while parent in chain:
            manifest = chain.pop(parent)
            there = self._is_whole(manifest) if parent in ends else manifest.id in names
            if not there:
                return manifest.id
            parent = manifest.parent
        return None

    def _taken(self, sequence: int) -> str | None:
        """A committed checkpoint with this number or a higher one, which another process made."""
        # Listed now, last of all: whoever has committed until then is seen.
        names = [n for n in self._root.names() if (sequence_of(n) or sequence) >= sequence]
        for name in committed(self._root, names):
            try:
                if read_manifest(self._root, name).sequence >= sequence:
                    return name
            except CheckNRunError:
                continue
        return None

    def _prune(self, sequence: int) -> Pruned:
        assert self._retention is not None
        # What the next checkpoint can build on; what these need stays with them.
        history = self._lineage.history
        in_use = {*self._uses, *(m.id for m in (*history[:1], *history[-1:]))}
        return prune(
            self._root,
            self._retention,
            in_use=in_use,
            own=self.lease.claim,
            still_ours=self.lease.check,
            below=sequence,
            known=self._manifests,
        )
