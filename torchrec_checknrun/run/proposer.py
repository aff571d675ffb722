"""Find a rank's facts about the next checkpoint, and on rank 0 propose it.

All ranks look before each checkpoint; only rank 0 decides, by its policy and by the root.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.dense.state_objects import holds_loader
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Full
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.facts import Facts
from torchrec_checknrun.run.going_on import GoingOn
from torchrec_checknrun.save.links import (
    NO_LINKS,
    HeldReferences,
    agreed,
    delta_tables,
    links_exceed_base,
)
from torchrec_checknrun.snapshot.items import Fingerprint, Items, fingerprint
from torchrec_checknrun.snapshot.snapshot import Declared, take_states

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


class Proposer:
    """One rank's look at the model, and at what of it the last checkpoint holds.

    Args:
        declared: the states beside the model.
        links: what the next link builds on.
        chunk_bytes: size of the chunks that the next checkpoint is laid out in.

    Attributes:
        quantization: the quantization in force, after the restores so far.
        fingerprint: of the last checkpoint's content beside table rows; None if unknown.
    """

    def __init__(
        self,
        options: Options,
        target: Target,
        declared: Declared,
        ranks: Ranks,
        lineage: Lineage,
        writer: RootWriter,
        links: HeldReferences,
        going_on: GoingOn,
        chunk_bytes: int,
    ) -> None:
        self._root = options.root
        self._model = options.model
        self._policy = options.policy
        self._chosen = options.quantization
        self._tracked = target.tracked
        self._declared = declared
        self._ranks = ranks
        self._lineage = lineage
        self._writer = writer
        self._links = links
        self._going_on = going_on
        self._chunk_bytes = chunk_bytes
        self.fingerprint: Fingerprint | None = None
        self.resolve()

    def resolve(self) -> None:
        """Note the quantization in force after the restores so far."""
        self.quantization: Quantization = self._chosen.resolved(self._lineage.lossy_restores)
        self._bits = self.quantization.width
        self._deltas = delta_tables(self._tracked, self.quantization)

    @property
    def references(self) -> str | None:
        """Return the checkpoint, by checksum, that this rank's next one can be a link to; None:
        none.
        """
        if not self._deltas:
            return NO_LINKS
        return self._links.belong_to(self._tracked, self.quantization)

    def look(self, step: int, *, waiting: bool, busy: bool, hangs: bool, failed: bool) -> Facts:
        """Return this rank's facts about the next checkpoint, for rank 0's decision.

        Args:
            waiting, busy, hangs, failed: as in ``Facts``.
        """
        tracked = self._tracked
        tracked.refresh()
        copied = None if busy else self._going_on.outcome()
        # The other ranks hear of it. Not while a checkpoint is on its way, whose commit would end
        # the need for a full one.
        if (tracked.converted or self._writer.lost_parent) and not busy:
            self._lineage.force_full()
            tracked.converted = self._writer.lost_parent = False
        previous = self._lineage.previous
        # Marks are searched only where the answer matters, since that reads all of them. A loop
        # that never calls ``step`` is always at step 0, whatever was trained.
        again = step > 0 and previous is not None and previous.step == step
        modified = not again or tracked.is_modified(Consumer.LAST)
        references, committed, proposal = self.references, False, None
        if self._ranks.rank == 0 and not (waiting or busy or failed or hangs):
            committed = again and self._is_committed(step)
            proposal = self._propose(step)
        return Facts(
            step,
            waiting,
            busy,
            hangs,
            failed,
            modified,
            proposal,
            committed,
            references,
            full=self._lineage.converted,
            copied=copied,
        )

    def agreed(self, facts: Sequence[Facts]) -> Proposal:
        """Return rank 0's proposal; as a full one where some rank's rows can't build on the chain,
        or some rank has nothing that links build on.

        A collective where rank 0 tells of a copy: all ranks go on from it, and have references to
        it or not.
        """
        proposal = facts[0].proposal
        assert proposal is not None, "rank 0 proposes wherever no rank refuses"
        if any(fact.full for fact in facts):  # rank 0 may not have known that
            self._lineage.force_full()
            proposal = proposal.as_full()
        references = [fact.references for fact in facts]
        if facts[0].copied is not None:  # the other ranks have looked before they heard of it
            references = self._ranks.gather(self.references)
        return agreed(proposal, references) if self._deltas else proposal

    def has_unsaved_steps(self, step: int) -> bool:
        """Tell whether there is anything that the last checkpoint doesn't hold; a collective."""
        previous = self._lineage.previous
        if not self._ranks.from_rank_0(lambda: step > 0):
            return False
        self._ranks.on_all_ranks(self._tracked.refresh)
        own = previous is None or previous.step != step
        modified = self._tracked.is_modified
        if any(self._ranks.on_all_ranks(lambda: own or modified(Consumer.LAST))):
            return True
        return self.is_changed()

    def is_changed(self) -> bool:
        """Tell whether anything but table rows differs from the last checkpoint, on any rank."""
        try:
            own = self.look_at_states() != self.fingerprint
        except Exception:  # a save reports it
            own = True
        return any(self._ranks.gather(own))

    def look_after_restore(self) -> Fingerprint | None:
        """Return the fingerprint of what was restored; None where a state object may not be asked
        before training goes on: the next save is one of its own then.
        """
        if any(map(holds_loader, self._declared.states.values())):
            return None
        return self.look_at_states()

    def look_at_states(self) -> Fingerprint:
        """Return the fingerprint of a checkpoint's content beside table rows, taken now."""
        snapshot = take_states(self._model, self._tracked, self._declared)
        items = Items.of(snapshot, self.quantization, self._chunk_bytes)
        return fingerprint(items.digests(), snapshot.progress)

    def _is_committed(self, step: int) -> bool:
        """Tell whether this step is committed, in the widths in force, and can be restored."""
        last = self._lineage.previous
        if last is None or not self._lineage.holds(step, self._widths()):
            return False
        try:
            resolve(self._root, last.id)
        except CheckNRunError as error:
            logger.warning("the last checkpoint is damaged, the next one is full: %s", error)
            self._lineage.force_full()
            return False
        return True

    def _propose(self, step: int) -> Proposal:
        previous = self._lineage.previous
        others = previous is not None and previous.deltas.keys() != self._deltas
        full = others or (bool(self._deltas) and links_exceed_base(self._lineage.history))
        policy = Full() if full else self._policy
        return self._writer.propose(policy, self._bits, self._widths(), step)

    def _widths(self) -> dict[str, int]:
        rows = {name: shape.rows for name, shape in self._tracked.tables.items()}
        return self.quantization.widths(rows)
