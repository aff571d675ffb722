"""Restore a chain into this rank's live tensors: plan which chunks to read, and load them.

``plan`` checks everything that manifests and indexes tell, and changes nothing. Call ``load`` only
once all ranks have planned without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchrec_checknrun.delta.references import References
from torchrec_checknrun.format.chunk import BlockHeader
from torchrec_checknrun.format.entries import CollisionsEntry, RowsEntry, StateEntry
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.blocks import is_step
from torchrec_checknrun.model.hand_written import mark_memory
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import (
    StoredTables,
    find_blocks,
    find_shards,
    plain_targets,
)
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.restore.blocks import BlockRestore, saved_blocks
from torchrec_checknrun.restore.chunks import ChainContent, ReadableChunk, read_chunks
from torchrec_checknrun.restore.collisions import CollisionRestore, check_names
from torchrec_checknrun.restore.fit import Fit, match_tables
from torchrec_checknrun.restore.links import Counted
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.restore.states import Owners, SavedStates, StateRestore
from torchrec_checknrun.shards import LocalShard, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import SHARDED, is_sharded


class ChainRestore:
    """A restore of a chain on this rank: call ``plan``, then ``build`` where the chain has tables
    stored as differences, then ``load``.

    Args:
        tracked: from ``track(model)``: rows are restored into its shards, and its marks start
            over. None: rows are restored into the tables of the state dict.
        owners: of the state beside the tables.
        fit: allowed differences between checkpoint and model.
        dry_run: read, verify and decode everything, but change nothing.

    Attributes:
        began: whether anything may have been changed.
        converted: whether tables differ from the saved ones in more than the ranks that hold their
            rows, so that a differential checkpoint can't follow.
        skipped: descriptions of tables and values on one side only, where ``fit`` allows that.
        keys: keys of the chunks to read, in reading order.
    """

    def __init__(
        self,
        tracked: TrackedModel | None,
        owners: Owners,
        fit: Fit,
        *,
        dry_run: bool,
    ) -> None:
        self._tracked, self._owners = tracked, owners
        self._fit = fit
        self._dry_run = dry_run
        self.began = False
        self.converted = False
        self.skipped: list[str] = []
        self.keys: list[str] = []

    def plan(self, content: ChainContent, state_dict: dict[str, Any]) -> None:
        """Check a chain against the live objects, and choose the chunks to read.

        Args:
            content: the chain.
            state_dict: the live state dict; ``load`` replaces its values by restored ones.

        Raises:
            IncompatibleCheckpoint: the checkpoint doesn't fit; names the table or key, the saved
                and the live one, and the remedy.
            CorruptCheckpoint: a part of the checkpoint is missing or malformed.
        """
        self._content, self._state_dict = content, state_dict
        self._match()
        stored = StoredTables(self._tables.keys() | self._saved_tables.keys(), self._shards)
        marks = None if self._tracked is None else [shard.marks for shard in self._tracked.shards]
        self.keys = self._rows.plan(self._shards, marks)
        self.converted |= self._rows.converted
        self.keys += self._plan_blocks(stored)
        self.keys += self._states.plan(stored, self._by_blocks, self._from_trees)
        self.skipped += [*self._rows.skipped, *self._blocks.skipped, *self._states.skipped]
        self._states.skipped = self.skipped  # values skipped while states are loaded follow

    def build(self, root: Folder) -> Counted:
        """Read the tables stored as differences, and build what they restore to; changes nothing.

        Returns:
            The digests of this rank's rows.

        Raises:
            CorruptCheckpoint: a chunk is damaged, or doesn't follow the ones before.
            OSError: the storage failed.
        """
        chunks = self._chunks()
        linked = [chunks[key] for key in self._rows.link_keys]
        read_chunks(root, linked, self._rows.build, decodes_whole=True)
        return self._rows.digests()

    def check_digests(self, counted: Iterable[Counted]) -> None:
        """Compare the digests of what all ranks have built with the chain's.

        Raises:
            CorruptCheckpoint: they differ.
        """
        self._rows.check_digests(counted)

    @property
    def references(self) -> list[References]:
        """Return the values that the rows of tables stored as differences restore to; see
        ``RowRestore``.
        """
        return self._rows.references

    def _chunks(self) -> dict[str, StoredChunk]:
        return {chunk.key: chunk for part in self._content.chunks for chunk in part}

    def load(self, root: Folder) -> None:
        """Read the planned chunks and load them; in a dry run change nothing.

        Args:
            root: the folder that holds the chain.

        Raises:
            CorruptCheckpoint: a chunk is damaged, or rows are missing.
            OSError: the storage failed.
        """
        if not self._dry_run:
            self.began = True
            self._mark()
        chunks = self._chunks()
        read_chunks(root, [chunks[key] for key in self.keys], self.load_chunk)
        self._finish()

    def load_chunk(self, chunk: ReadableChunk) -> None:
        """Load one chunk. Thread-safe for chunks of rows."""
        entry, header = chunk.stored.entry, chunk.stored.header
        if isinstance(entry, RowsEntry):
            self._rows.load(chunk, self._dry_run)
        elif isinstance(entry, StateEntry):
            self._states.load(entry, chunk.payload(), self._dry_run)
        elif isinstance(entry, CollisionsEntry):
            self._collisions.load(entry, chunk.payload())
        elif isinstance(header, BlockHeader):
            payload = chunk.payload()
            if not self._dry_run:
                self._blocks.load(header, payload)

    @property
    def progress(self) -> dict[str, OptimizerClock]:
        """Return the tables' optimizer counters and learning rates at the head, by the model's
        tables.
        """
        if not self._fit.optimizer:
            return {}
        tables = self._head.tables
        return {
            into: OptimizerClock(
                table.optimizer_step, table.learning_rate, dict(table.optimizer_options)
            )
            for name, into in self._targets.items()
            if (table := tables[name]).learning_rate is not None
            and into not in self._rows.without_state
        }

    def _match(self) -> None:
        """Match the checkpoint's tables with the live ones, and make the live state ready."""
        content = self._content
        self._head = content.head
        saved_tables = self._head.tables
        self._saved_tables = {n: TableShape(t.rows, t.dim) for n, t in saved_tables.items()}
        self._shards: list[LocalShard] = []
        self._tables: dict[str, TableShape]
        if self._tracked is None:
            self._shards, self._tables = find_shards(self._state_dict)
        else:
            self._tables = self._tracked.tables
        match = match_tables(self._tables, self._saved_tables, self._fit)
        self._targets = match.target
        self.converted, self.skipped = match.resized, match.skipped
        self._rows = RowRestore(content, match.target, self._fit)
        self._saved_blocks = saved_blocks(
            {c.key: c.header for c in content.chunks[-1] if isinstance(c.header, BlockHeader)}
        )
        self._states = StateRestore(
            SavedStates.of(content), self._state_dict, self._saved_blocks, self._fit, self._owners
        )
        restored = self._rows.states if self._fit.optimizer else {}
        self._states.fit_optimizers(
            {table: restored.get(table) for table in self._tables}, self._renamed
        )
        self._states.split_buffers()
        if self._tracked is not None:
            self._tracked.flush()
            self._shards = [shard.local for shard in self._tracked.shards]

    @property
    def _renamed(self) -> dict[str, str]:
        return {old: new for old, new in self._targets.items() if old != new}

    def _plan_blocks(self, stored: StoredTables) -> list[str]:
        """Check the head's sharded tensors against the local ones; return the keys of the chunks
        that overlap these.
        """
        where, saved = self._head.id, self._saved_blocks
        found = find_blocks(self._state_dict, stored, self._owners.optimizers or ())
        if self._tracked is not None:  # with the tables' progress, unless saved without
            found = [b for b in found if b.path in saved or not is_step(b.path)]
        # A tensor that was whole on every rank lies in a state's tree.
        whole = {block.path for block in found} & self._states.plain_paths()
        wanted = [block for block in found if block.path not in whole]
        wanted += plain_targets(self._state_dict, saved)
        targets = list(leaves(self._state_dict, (torch.Tensor,)))
        self._by_blocks = frozenset(id(leaf) for path, leaf in targets if path in saved)
        sharded = dict(leaves(self._state_dict, SHARDED))
        self._from_trees = frozenset(id(sharded[path]) for path in whole)
        self._blocks = BlockRestore(wanted, saved, self._fit.strict)
        self._collisions = CollisionRestore(
            self._tracked.collisions if self._tracked is not None else None
        )
        check_names(wanted, self._renamed)
        keys = self._blocks.plan(where, self._state_dict, sharded, self._owners.objects)
        head = self._content.chunks[-1]
        modules = {c.key: c.entry for c in head if isinstance(c.entry, CollisionsEntry)}
        names = {str(path[-1]) for path in (*sharded, *(path for path, _ in targets))}
        return keys + self._collisions.plan(modules, self._blocks.blocks(), names, where)

    def _mark(self) -> None:
        """Mark all that may be written, for every tracker; start this tracker's marks over."""
        mark_memory(self._written())
        if self._tracked is None:
            return
        self._tracked.begin_restore(set(self._targets.values()))

    def _written(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that may be written, except a tracked model's tables."""
        if self._tracked is None:
            for shard in self._shards:
                yield from shard.tensors
        for block, _ in self._blocks.blocks():
            yield block.tensor
        yield from _dense_tensors(self._state_dict)

    def _finish(self) -> None:
        """Finish the restore, once all chunks are loaded."""
        self._rows.finish(self._dry_run)
        self._states.join_buffers()
        if self._dry_run:
            return
        self._collisions.finish()
        if self._tracked is not None:
            self._tracked.acknowledge_writes()
            self._tracked.purge()
            if self._owners.optimizers is None:
                self._tracked.set_progress(self.progress)


def _dense_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield a state dict's tensors that are whole on this rank, data-parallel tables included."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _dense_tensors(item)
    elif isinstance(value, torch.Tensor) and not is_sharded(value):
        yield value
