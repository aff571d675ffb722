"""Bring a rank whose image is gone to the step that the others go back to.

Its rows come from the newest checkpoint, and it alone reads them; everything that all ranks have
alike comes from a survivor's image; its own states follow the rules that were declared for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_checknrun.errors import CheckNRunError, CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import decode_state_chunk
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.format.rank_file import rank_file_name
from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.memory.agreement import Decision
from torchrec_checknrun.memory.held_states import HeldStates, local_parts
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.options.arguments import COPY, LostRule, PerRank, Replicated
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.chunks import (
    ChainContent,
    ReadableChunk,
    read_chunks,
    read_content,
    read_content_of,
)
from torchrec_checknrun.restore.fit import Fit, Match, match_tables
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.shards import TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.priority_rows import apply_saves
from torchrec_checknrun.values.state import Tree, encode_state

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

Clocks = Mapping[str, OptimizerClock]
"""By table."""
_COUNTER = "kernel.step"


def unruled(options: Options, lost_rank_0: bool) -> list[str]:
    """Tell which states of a lost rank can't be had, and what to do about it.

    Args:
        lost_rank_0: whether rank 0 is among the lost.
    """
    reasons = []
    for name, item in options.state.items():
        if isinstance(item, PerRank) and item.lost is None:
            reasons.append(
                f"state {name!r} is each rank's own, and no rule makes it of anything that is "
                "left: declare one, PerRank(…, lost='copy') for a survivor's, or lost=function "
                "of the state in the newest checkpoint and the number of steps since"
            )
        elif isinstance(item, Replicated) and lost_rank_0:
            reasons.append(f"state {name!r} is rank 0's (Replicated), whose image is gone")
    if options.per_rank_buffers.names:
        reasons.append(f"buffers are each rank's own: {options.per_rank_buffers}")
    return reasons


def broadcast(ranks: Ranks, content: memoryview | None, source: int) -> memoryview:
    """Send bytes of one rank to all; a collective.

    Args:
        content: on the source.
        source: the rank that has them.
    """
    size = ranks.gather(0 if content is None else len(content))[source]
    memory = bytearray(size) if content is None or ranks.rank != source else bytearray(content)
    dist.broadcast(torch.frombuffer(memory, dtype=torch.uint8), group=ranks.group, group_src=source)
    return memoryview(memory).toreadonly()


class Side(Protocol):
    """One rank's side of going back: by its image, or without one."""

    def held(self, step: int) -> HeldStates:
        """Return everything beside rows as of a step."""

    def go_back(self, step: int, head: str | None, losses: tuple[Loss, ...], lossy: int) -> None:
        """Give the shards their rows."""

    @property
    def known_lineage(self) -> tuple[str, int, bool]:
        """Return the lineage, see ``RankImage.known_lineage``."""

    def resume(self, step: int) -> None:
        """Go on, once all ranks are at the step."""


def meet(ranks: Ranks, image: RankImage, lost: LostRank | None, decision: Decision) -> Side:
    """Hand lost ranks what survivors have, and check that they can go on with it; a collective.

    Nothing is changed.

    Args:
        lost: this rank, if it is among the lost.
    """
    step = decision.step
    assert step is not None
    content: list[memoryview] = []
    clocks: list[Clocks] = []

    def look() -> str:
        if lost is not None:
            lost.plan_rows()
            return ""
        content.append(image.state_bytes(step))
        clocks.append(image.held(step).progress)
        return image.incarnation

    incarnations = ranks.on_all_ranks(look)
    source = min(rank for rank in range(ranks.world_size) if rank not in decision.lost)
    received = broadcast(ranks, content[0] if content else None, source)
    of_all = ranks.gather(clocks)
    if lost is None:
        return image
    lost.receive(received, [each for found in of_all for each in found], incarnations[source])
    return lost


class LostRank:
    """The side of a rank whose image is gone; call ``plan_rows`` and ``receive`` first.

    Args:
        image: to be begun anew.
        lineage: of the run, up to date once the ranks resume.
        chain: of the newest checkpoint.
        step: the step that all ranks go on at.
        copies: of this rank's files, from a peer's memory; None: there are none.

    Attributes:
        has_copy: whether its rows are read from the copies, as ``plan_rows`` finds.
    """

    def __init__(
        self,
        options: Options,
        target: Target,
        ranks: Ranks,
        image: RankImage,
        lineage: Lineage,
        chain: Chain,
        step: int,
        copies: Folder | None = None,
    ) -> None:
        self._root = self._storage = options.root
        self._copies = copies
        self.has_copy = False
        self._rules: dict[str, LostRule | None] = {
            name: item.lost for name, item in options.state.items() if isinstance(item, PerRank)
        }
        self._target, self._ranks = target, ranks
        self._image, self._lineage = image, lineage
        self._chain, self._step = chain, step
        self._converted = False
        self._shards = [shard for shard in target.tracked.shards if not shard.local.replicated]

    def plan_rows(self) -> None:
        """Check that the chain has this rank's rows, and nothing else is lost; change nothing.

        Raises:
            IncompatibleCheckpoint: the chain doesn't fit, or the rank has parts of other tensors.
            CorruptCheckpoint: the chain is damaged.
        """
        tracked = self._target.tracked
        tracked.flush()
        self._shards = [shard for shard in tracked.shards if not shard.local.replicated]
        saved = {n: TableShape(t.rows, t.dim) for n, t in self._chain.head.tables.items()}
        match = match_tables(tracked.tables, saved, Fit())
        if self._copies is not None:
            try:
                self._plan_copies(self._copies, match)
                return
            except (CheckNRunError, OSError) as error:
                logger.warning("a peer's copy of this rank's rows can't be used: %s", error)
        self._plan(read_content(self._root, self._chain), match)

    def _plan_copies(self, copies: Folder, match: Match) -> None:
        """Plan to read the copies, once all that is needed of them is verified."""
        own = rank_file_name(self._ranks.rank)
        self._plan(read_content_of(copies, self._chain, own), match)
        if self._converted:
            raise IncompatibleCheckpoint("the copies are of other columns")
        for chunk in self._chunks(dict.fromkeys((*self._rows.link_keys, *self._keys))):
            read_chunk(copies, chunk)
        self._root, self.has_copy = copies, True

    def _plan(self, content: ChainContent, match: Match) -> None:
        self._content = content
        self._require_no_parts()
        self._rows = RowRestore(content, match.target, Fit())
        shards, marks = [s.local for s in self._shards], [s.marks for s in self._shards]
        self._keys = self._rows.plan(shards, marks)
        self._converted = match.resized or self._rows.converted

    def _chunks(self, keys: Iterable[str]) -> list[StoredChunk]:
        """Return the chunks of some keys, in their order."""
        chunks = {chunk.key: chunk for part in self._content.chunks for chunk in part}
        return [chunks[key] for key in keys]

    def receive(self, content: memoryview, survivors: Sequence[Clocks], incarnation: str) -> None:
        """Take what survivors have.

        Args:
            content: a survivor's state of the step, encoded.
            survivors: the clocks of all survivors' tables at that step.
            incarnation: of their images.
        """
        self._received, self._survivors, self._incarnation = content, survivors, incarnation

    def held(self, step: int) -> HeldStates:
        """Make this rank's state of a survivor's.

        Raises:
            NoImage, IncompatibleCheckpoint, CorruptCheckpoint: it can't be made.
        """
        found = HeldStates.read(self._received)
        trees = {**found.trees}
        for name, rule in self._rules.items():
            if name in trees and rule != COPY:
                assert callable(rule), "checked by the decision"
                trees[name] = self._advanced(name, rule)
        if names := {repr(header.path) for header in found.sharded} | found.parts.keys():
            raise IncompatibleCheckpoint(f"sharded tensors beside tables: {sorted(names)}")
        own = self._target.tracked.progress()
        progress = clocks_at(own, self._survivors, self._saved_clocks(), step - self._since)
        self._held = replace(found, trees=trees, progress=progress, generators={})
        return self._held

    def go_back(self, step: int, head: str | None, losses: tuple[Loss, ...], lossy: int) -> None:
        """Read this rank's rows from the chain, and mark those that its baseline lacks.

        Raises:
            CorruptCheckpoint, OSError: the storage failed; rows have unknown content.
        """
        tracked = self._target.tracked
        tracked.begin_restore({shard.table for shard in self._shards})

        def load(chunk: ReadableChunk) -> None:
            self._rows.load(chunk, dry_run=False)

        linked = self._chunks(self._rows.link_keys)
        read_chunks(self._root, linked, self._rows.build, decodes_whole=True)
        self._rows.check_digests([self._rows.digests()])  # of tables that are whole here
        read_chunks(self._root, self._chunks(self._keys), load)
        self._rows.finish(dry_run=False)
        apply_saves(
            self._storage,
            self._chain.head.id,
            self._incarnation,
            step,
            self._ranks.rank,
            self._shards,
        )
        tracked.acknowledge_writes()
        tracked.purge()

    @property
    def known_lineage(self) -> tuple[str, int, bool]:
        """Return the lineage, of which a lost rank knows only whether the next checkpoint must be
        full.
        """
        return "", 0, self._converted

    def resume(self, step: int) -> None:
        """Begin an image at the step, together with those of the survivors."""
        lineage = self._lineage
        self._image.begin(
            step,
            self._incarnation,
            lineage.id,
            self._chain.head.id,
            lineage.lossy_restores,
            lineage.converted,
            lineage.losses,
            self._held.pieces(),
        )

    @property
    def _since(self) -> int:
        return self._chain.head.step

    def _require_no_parts(self) -> None:
        target = self._target
        assert target.model is not None
        # Of other objects the survivors tell: to ask these here may wait for the other ranks.
        _, blocks = local_parts({MODEL: target.model.state_dict()}, target.tracked)
        if blocks:
            names = sorted({repr(block.path) for block in blocks})
            raise IncompatibleCheckpoint(
                f"parts of sharded tensors beside tables are lost: {names}"
            )
        if of_some := target.tracked.dense.of_some:
            raise IncompatibleCheckpoint(
                f"no survivor has all of the model's values that only some ranks have: "
                f"{sorted(of_some)}"
            )

    def _advanced(self, name: str, rule: LostRule) -> tuple[Tree, memoryview]:
        """Apply a rule to this rank's state in the newest checkpoint."""
        head, rank = self._chain.head, self._ranks.rank
        if head.world_size != self._ranks.world_size:
            raise IncompatibleCheckpoint(
                f"{head.id} has state {name!r} of {head.world_size} ranks, and there are "
                f"{self._ranks.world_size} now: its rule can't be followed"
            )
        for chunk in self._content.chunks[-1]:
            entry = chunk.entry
            if isinstance(entry, StateEntry) and (entry.name, entry.rank) == (name, rank):
                assert callable(rule)
                saved = decode_state_chunk(entry, read_chunk(self._root, chunk))
                tree, pieces = encode_state(rule(saved, self._step - self._since), name)
                return tree, memoryview(b"".join(bytes(piece) for piece in pieces))
        raise CorruptCheckpoint(f"{head.id} lacks state {name!r} of rank {rank}")

    def _saved_clocks(self) -> dict[str, OptimizerClock]:
        return {
            name: OptimizerClock(
                table.optimizer_step, table.learning_rate, dict(table.optimizer_options)
            )
            for name, table in self._chain.head.tables.items()
            if table.learning_rate is not None
        }


def clocks_at(
    own: Clocks, survivors: Sequence[Clocks], saved: Clocks, steps: int
) -> dict[str, OptimizerClock]:
    """Return the clocks of a lost rank's tables at the step that the survivors are at.

    A table that a survivor has a part of has that clock. Any other's has gone on since the
    checkpoint as the clocks of tables that were at the same learning rate and options: a kernel's
    bias correction and its rate are those of its peers, though its rows are older.

    Args:
        own: of this rank's tables, at any step: only their names count.
        survivors: the survivors' clocks now.
        saved: all clocks as of the checkpoint.
        steps: since the checkpoint.
    """
    now = {table: clock for clocks in survivors for table, clock in clocks.items()}
    found: dict[str, OptimizerClock] = {}
    for table in own:
        if table in now:
            found[table] = now[table]
        elif table in saved:
            found[table] = _advanced_clock(saved[table], now, saved, steps)
    return found


def _advanced_clock(then: OptimizerClock, now: Clocks, saved: Clocks, steps: int) -> OptimizerClock:
    both = [(saved[table], now[table]) for table in now if table in saved]
    moved = {b.step - a.step for a, b in both if a.step is not None and b.step is not None}
    steps = moved.pop() if len(moved) == 1 else steps
    counter = None if then.step is None else then.step + steps
    rates = {b.learning_rate for a, b in both if a.learning_rate == then.learning_rate}
    rate = rates.pop() if len(rates) == 1 else then.learning_rate
    options = dict(then.options)
    for name, value in then.options.items():
        since = {b.options.get(name) for a, b in both if a.options.get(name) == value}
        if len(since) == 1 and (changed := since.pop()) is not None:
            options[name] = changed
        elif name == _COUNTER and isinstance(value, int):
            options[name] = value + steps
    return OptimizerClock(counter, rate, options)
