"""Go on from compacted copies of the lineage's chain: the next checkpoint builds on the copy.

All ranks note at the same commit which checkpoint is being compacted, and where their marks stood;
rank 0 runs the compaction, and tells the others of its outcome when the next checkpoint is begun.
From then on the copy is the lineage's full checkpoint, and rows modified since the compacted
checkpoint's cut count as modified since it. Whatever fails changes nothing: the run goes on with
its own chain; and so it does where tables are stored as differences to a later checkpoint.
"""

from __future__ import annotations

import logging

from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.layers import Consumer, Share
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.options.compact_after import CompactAfter
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.compaction import CompactionProcess, Copied
from torchrec_checknrun.save.links import HeldReferences
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MOST_PAUSE = 64
"""Commits, at most, before a compaction is tried again that has failed."""


class GoingOn:
    """One rank's part in compactions behind training.

    Args:
        after: when a chain is due; None: never.
        writer: keeps what is being compacted from being pruned.
        links: what the next link builds on.
        leads: whether this rank runs them.
    """

    def __init__(
        self,
        after: CompactAfter | None,
        root: Folder,
        tracked: TrackedModel,
        lineage: Lineage,
        writer: RootWriter,
        links: HeldReferences,
        leads: bool,
    ) -> None:
        self._after = after
        self._root = root
        self._tracked = tracked
        self._lineage = lineage
        self._writer = writer
        self._links = links
        self._leads = leads
        self._original: str | None = None
        """The checkpoint that is being compacted, the same on all ranks."""
        self._before: dict[Marks, Share] = {}
        """By shard, the marks that were made before that checkpoint's cut."""
        self._process: CompactionProcess | None = None
        self._failed: Copied | None = None
        self._untold: Copied | None = None
        """The outcome that the other ranks may not know yet."""
        self._failures = 0
        self._pause = 0

    def committed(self) -> None:
        """Begin a compaction of the lineage's last checkpoint, which was just committed, if its
        chain is due for one and none is running.
        """
        if self._after is None or self._original is not None:
            return
        self._pause = max(0, self._pause - 1)
        chain = self._lineage.chain
        if self._pause or not self._after.is_due(chain):
            return
        self._original, self._writer.compacting = chain[-1].id, chain[-1]
        # Nothing was cut since that checkpoint: frozen marks are older than its cut, live ones not.
        for shard in self._tracked.shards:
            share = Share(int(Consumer.BASELINE))
            shard.marks.hold(share)
            self._before[shard.marks] = share
        if self._leads:
            self._start(chain[-1])

    def _start(self, original: Manifest) -> None:
        self._failed = Copied(original.id, None)  # should this be interrupted
        try:
            self._process = CompactionProcess(self._root, original)
        except (CheckNRunError, OSError, RuntimeError) as error:  # no process or thread
            logger.warning("compacting %s behind training failed: %s", original.id, error)
        else:
            self._failed = None

    def wait(self, seconds: float) -> bool:
        """Wait for a running compaction; return whether none runs any more. For rank 0."""
        return self._process is None or self._process.wait(seconds) is not None

    def outcome(self) -> Copied | None:
        """Return, on rank 0, the outcome that ranks may not have heard of; apply it here."""
        found = self._process.outcome if self._process is not None else self._failed
        if found is not None:
            self._process = self._failed = None
            self._untold = found
            self._apply(found)
        return self._untold

    def heard(self, outcome: Copied | None) -> None:
        """Apply what rank 0 has told all ranks, while no checkpoint is on its way."""
        self._untold = None
        if outcome is not None:
            self._apply(outcome)

    def give_up(self) -> None:
        """End a running compaction, of which nothing is used: the model is in another state, or
        the run is over.
        """
        if self._process is not None:
            self._process.end()
        self._process = self._failed = self._untold = None
        self._forget()

    def _apply(self, outcome: Copied) -> None:
        if outcome.original != self._original:
            return  # applied already
        if outcome.copy is None:
            self._put_off()
        elif self._lineage.copied(outcome.original, outcome.copy):
            self._failures = 0
            for marks, share in self._before.items():
                marks.drop(share)
            self._links.copied(outcome.copy)
            if self._leads:
                logger.info(
                    "%s is compacted: the next checkpoint builds on %s",
                    outcome.original,
                    outcome.copy.id,
                )
        elif outcome.copy.deltas:
            self._put_off()  # the next copy may come too late as well
            if self._leads:
                logger.warning(
                    "%s is compacted, as %s, but is not the last checkpoint any more, which "
                    "differences build on: the run goes on with its own chain",
                    outcome.original,
                    outcome.copy.id,
                )
        self._forget()

    def _put_off(self) -> None:
        self._pause = min(2**self._failures, _MOST_PAUSE) + 1
        self._failures += 1

    def _forget(self) -> None:
        for marks, share in self._before.items():
            marks.settle(share)
        self._before, self._original = {}, None
        self._writer.compacting = None
