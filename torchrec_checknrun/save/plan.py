"""DCP's save protocol: every rank plans what it writes, rank 0 checks the whole.

The global plan refuses a checkpoint in which two ranks would write the same rectangle or a part of
a table is missing, and says which rank writes what all ranks have alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torchrec_checknrun.codecs import Settled, Surveys, add_survey, settle
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.format.block_chunk import Path
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.manifest import Header
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.model.blocks import BlockSummary, check_blocks
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.ranks import picklable_errors
from torchrec_checknrun.save.digest import Digest
from torchrec_checknrun.save.items import Item, Items, block_key, state_key
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.save.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.shards import Rectangle, TableShape, check_coverage
from torchrec_checknrun.threads import gc_paused


@dataclass
class OwnStorage(StorageMeta):
    """Says that this package's StorageWriter writes what is planned; others lose the index."""


@dataclass(frozen=True)
class PlanSummary:
    """What rank 0 needs of a rank's plan to check the whole (sent once, not scattered back)."""

    header: Header
    tables: dict[str, TableShape]
    shards: list[tuple[str, Rectangle]]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerClock]
    replicated: dict[str, int]
    """Bytes of each state that all ranks have alike: only one of them will write it."""
    per_rank: tuple[str, ...]
    blocks: list[BlockSummary] = field(default_factory=list)
    surveys: Surveys = field(default_factory=dict)
    """Of codecs that all ranks must settle before rows are encoded."""
    lowest: tuple[str, ...] = ()
    """States of which the lowest rank's is stored, whatever the others have."""
    digests: dict[str, Digest] = field(default_factory=dict)
    """Of the other states that all ranks have alike."""

    def with_digests(
        self, of_items: Mapping[str, Digest], of_blocks: Mapping[int, str]
    ) -> PlanSummary:
        """Add what tells whether ranks have these states and blocks alike.

        Args:
            of_items: digests by the items' names.
            of_blocks: those of the blocks that ranks of another mesh may hold as well, by number.
        """
        compared = self.replicated.keys() - set(self.lowest)
        return dataclasses.replace(
            self,
            digests={name: of_items[state_key(name)] for name in compared},
            blocks=[
                dataclasses.replace(block, digest=of_blocks.get(number))
                for number, block in enumerate(self.blocks)
            ],
        )


@dataclass(frozen=True)
class GlobalPlan:
    """What the storage writer turns into a manifest once everything is written."""

    header: Header
    tables: dict[str, TableShape]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerClock]
    states: dict[str, bool]
    """By name, whether each rank has its own."""
    chunks: tuple[int, ...]
    """How many chunks each rank is to write."""


@dataclass(frozen=True)
class Prepared:
    """A rank's part of a checkpoint, ready to be planned.

    Attributes:
        items: what it would write, by name, in this order.
        chosen: told the names of those that it shall write, once that is known.
        differences: judges states whose content differs between ranks.
    """

    summary: PlanSummary
    items: Mapping[str, Item]
    chosen: Callable[[frozenset[str]], None] = lambda names: None
    differences: RankDifferences = field(default_factory=RankDifferences)


def summarize(
    header: Header, snapshot: Snapshot, items: Items, quantization: Quantization
) -> PlanSummary:
    """What rank 0 needs of a snapshot."""
    return PlanSummary(
        header=header,
        tables=snapshot.tables,
        shards=[(s.shard.table, s.shard.rectangle) for s in snapshot.shards],
        fp32_bytes=_fp32_bytes(snapshot.shards),
        progress=dict(snapshot.progress),
        replicated=items.replicated,
        per_rank=tuple(sorted(snapshot.per_rank)),
        blocks=[block.summary for block in snapshot.blocks],
        surveys=survey(snapshot.shards, quantization),
        lowest=tuple(sorted(snapshot.replicated)),
    )


class CheckpointPlanner(SavePlanner):
    """Plans a checkpoint whose parts are known.

    Args:
        prepare: says what this rank has; called within DCP's planning, so that an error on one rank
            is an error on all. Its argument is the checkpoint's path.
    """

    def __init__(self, prepare: Callable[[str], Prepared]) -> None:
        self._prepare = prepare
        self._settled: Settled = {}
        self._differences = RankDifferences()

    @picklable_errors()  # DCP sends them to rank 0
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if not isinstance(storage_meta, OwnStorage) or storage_meta.checkpoint_id is None:
            raise InvalidPlan(
                "SavePlanner makes chunks that this package's StorageWriter writes: pass "
                "storage_writer=StorageWriter(path) to dcp.save as well"
            )
        self._prepared = self._prepare(str(storage_meta.checkpoint_id))
        self._differences = self._prepared.differences

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._prepared.items
        ]
        return SavePlan(items, planner_data=self._prepared.summary)

    @gc_paused()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        summaries: list[PlanSummary] = [plan.planner_data for plan in all_plans]
        _check_agreement(summaries)
        again = _check_coverage(summaries)
        differing = self._differences.differing(_held(summaries))
        writers = _assign_writers(summaries, differing | set(summaries[0].lowest))
        settled = settle(summary.surveys for summary in summaries)
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [
                item
                for item in plan.items
                if writers.get(item.index.fqn, rank) == rank
                and not item.index.fqn.startswith(again[rank])
            ]
            plans.append(dataclasses.replace(plan, items=items, planner_data=settled or None))
        progress = self._differences.progress([summary.progress for summary in summaries])
        fp32_bytes = dict.fromkeys(summaries[0].tables, 0)
        for summary in summaries:
            for table, size in summary.fp32_bytes.items():
                fp32_bytes[table] += size
        states = dict.fromkeys((name for s in summaries for name in s.replicated), False)
        states |= dict.fromkeys(summaries[0].per_rank, True)
        metadata = Metadata(
            {},  # the files' indexes say what is where; DCP would send it to all ranks
            planner_data=GlobalPlan(
                header=summaries[0].header,
                tables=summaries[0].tables,
                fp32_bytes=fp32_bytes,
                progress=progress,
                states=states,
                chunks=tuple(len(plan.items) for plan in plans),
            ),
        )
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._settled = new_plan.planner_data or {}
        self._prepared.chosen(frozenset(item.index.fqn for item in new_plan.items))
        return new_plan

    def job(self, write_item: WriteItem) -> Job:
        """An item that is to be written, not yet encoded."""
        return self._prepared.items[write_item.index.fqn].job(self._settled)

    def resolve_data(self, write_item: WriteItem) -> EncodedChunk:
        return self.job(write_item).encode()


def _fp32_bytes(shards: list[ShardSnapshot]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for shard in shards:
        values = sum(tensor.numel() for tensor in shard.shard.tensors)
        sizes[shard.shard.table] = sizes.get(shard.shard.table, 0) + 4 * values
    return sizes


def _check_agreement(summaries: list[PlanSummary]) -> None:
    for rank, summary in enumerate(summaries):
        for what in ("header", "tables", "per_rank", "lowest"):
            first, other = getattr(summaries[0], what), getattr(summary, what)
            if first != other:
                raise InvalidPlan(
                    f"ranks 0 and {rank} don't save the same checkpoint: {what} is {first} there "
                    f"and {other} here; call save on all ranks at the same step with the same "
                    "arguments"
                )


def _check_coverage(summaries: list[PlanSummary]) -> list[tuple[str, ...]]:
    """No two ranks write the same, and no part of a table or a sharded tensor is left out.

    Returns:
        For each rank how the names of the items begin that another rank writes as well.
    """
    tables = summaries[0].tables
    blocks: dict[Path, list[tuple[BlockSummary, int]]] = {}
    keys: dict[Path, list[str]] = {}
    # Most tables lie in rows, in the order of ranks. Those are seen to be whole in passing: a list
    # of each table's parts would be of a million objects that lie far from each other in memory.
    rows_done = dict.fromkeys(tables, 0)
    others: dict[str, list[tuple[Rectangle, int]]] = {}
    for rank, summary in enumerate(summaries):
        for table, place in summary.shards:
            if table not in tables:
                raise InvalidPlan(f"rank {rank} writes rows of {table!r}, which is no known table")
            if place.row_start == rows_done[table] and place.spans_columns(tables[table]):
                rows_done[table] = place.row_stop
            else:
                others[table] = []
        for number, block in enumerate(summary.blocks):
            blocks.setdefault(block.path, []).append((block, rank))
            keys.setdefault(block.path, []).append(block_key(number, rank))
    others |= {name: [] for name, rows in rows_done.items() if rows != tables[name].rows}
    for rank, summary in enumerate(summaries) if others else ():
        for table, place in summary.shards:
            if table in others:
                others[table].append((place, rank))
    for table, parts in others.items():
        check_coverage(table, tables[table], parts)
    again: list[tuple[str, ...]] = [()] * len(summaries)
    for path, pieces in blocks.items():
        for i in check_blocks(path, pieces):
            again[pieces[i][1]] += (keys[path][i],)
    return again


def _held(summaries: list[PlanSummary]) -> dict[str, list[tuple[int, Digest]]]:
    """Each compared state's digest on the ranks that have it."""
    held: dict[str, list[tuple[int, Digest]]] = {}
    for rank, summary in enumerate(summaries):
        for name, digest in summary.digests.items():
            held.setdefault(name, []).append((rank, digest))
    return held


def _assign_writers(summaries: list[PlanSummary], lowest: Container[str] = ()) -> dict[str, int]:
    """Which rank writes each state that all have alike: the biggest first, to the least loaded.

    Args:
        lowest: states that the lowest rank writes.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, summary in enumerate(summaries):
        for name, size in summary.replicated.items():
            holders.setdefault(name, []).append(rank)
            sizes[name] = max(size, sizes.get(name, 0))
    load = [0] * len(summaries)
    writers = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = holders[name][0]
        if name not in lowest:
            rank = min(holders[name], key=lambda r: (load[r], r))
        load[rank] += sizes[name]
        writers[state_key(name)] = rank
    return writers


def survey(shards: Iterable[ShardSnapshot], quantization: Quantization) -> Surveys:
    """Survey this rank's rows that are to be written, where their codec asks for it."""
    found: Surveys = {}
    for snapshot in shards:
        shard = snapshot.shard
        codec = quantization.for_table(shard.table, shard.shape.rows).codec
        if codec.surveys:
            part = codec.survey(shard.weight, shard.optimizer, snapshot.sample)
            if part is not None:
                add_survey(found, codec, part)
    return found
