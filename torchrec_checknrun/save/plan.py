"""Plan a save: every rank plans its items, rank 0 checks the whole and assigns shared items.

A global plan in which two ranks would write the same rectangle, or a part of a table is missing, is
refused (``coverage``). Items that several ranks hold alike are assigned to one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from torchrec_checknrun.codecs import Settled, Surveys, add_survey, settle
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.delta.transaction import TableDigests
from torchrec_checknrun.errors import InvalidPlan, UnsupportedState
from torchrec_checknrun.format.chunk import name_of
from torchrec_checknrun.format.manifest import Header
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.model.blocks import BlockSummary
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.save.coverage import left_to_others, tables_among
from torchrec_checknrun.save.rank_differences import RankDifferences
from torchrec_checknrun.shards import Rectangle, TableShape
from torchrec_checknrun.snapshot.digest import Digest
from torchrec_checknrun.snapshot.items import Item, Items, key_of, state_key
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.threads import gc_paused


@dataclass(frozen=True)
class PlanSummary:
    """The part of a rank's plan that rank 0 needs to check the whole.

    Attributes:
        header: rank 0's decision, as this rank knows it.
        tables: all tables by name.
        shards: table and rectangle of each shard that this rank writes.
        fp32_bytes: bytes of each table's shards here, counted as fp32.
        progress: progress of the tables' optimizers, by table with a shard here.
        replicated: bytes of each replicated state, which only one rank will write.
        per_rank: names of states of which each rank has its own.
        blocks: this rank's parts of other sharded tensors.
        importance: samples for importance-weighted codecs.
        lowest: names of replicated states that are not compared: the lowest rank's is stored.
        digests: digests of the compared replicated states.
        row_states: names of the optimizer state of each table that all ranks hold.
        replicas: digests of a sample of each of these tables.
        averaged: likewise of each shard that ranks of other sharding groups hold as well, by name.
        names: a digest of the names of models' values, which all ranks must have.
    """

    header: Header
    tables: dict[str, TableShape]
    shards: list[tuple[str, Rectangle]]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerClock]
    replicated: dict[str, int]
    per_rank: tuple[str, ...]
    blocks: list[BlockSummary] = field(default_factory=list)
    surveys: Surveys = field(default_factory=dict)
    """Surveys of codecs that all ranks must settle before rows are encoded."""
    lowest: tuple[str, ...] = ()
    digests: dict[str, Digest] = field(default_factory=dict)
    row_states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replicas: dict[str, bytes] = field(default_factory=dict)
    averaged: dict[str, bytes] = field(default_factory=dict)
    names: bytes = b""

    def of_averaged(self) -> dict[str, bytes]:
        """Return ``averaged`` with the digests of averaged blocks, as far as these are known."""
        return self.averaged | {
            f"{name_of(block.path)}{block.box}": block.digest.encode()
            for block in self.blocks
            if block.averaged and block.digest is not None
        }

    def with_digests(
        self, of_items: Mapping[str, Digest], of_blocks: Mapping[int, str]
    ) -> PlanSummary:
        """Add the digests that tell whether the ranks' states and blocks are alike.

        Args:
            of_items: digests by the items' names.
            of_blocks: digests, by number, of blocks that ranks of another mesh may hold as well.
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
class LocalPlan:
    """A rank's plan, as sent to rank 0.

    Attributes:
        items: names of all items of the rank, in writing order.
        summary: the rest that rank 0 needs.
    """

    items: tuple[str, ...]
    summary: PlanSummary


@dataclass(frozen=True)
class Share:
    """A rank's share of the global plan.

    Attributes:
        items: names of the items to write, in writing order.
        settled: what codecs chose for all ranks from their surveys.
    """

    items: tuple[str, ...]
    settled: Settled


@dataclass(frozen=True)
class GlobalPlan:
    """The part of the global plan that stays on rank 0, for the manifest.

    Attributes:
        header: the decision on the checkpoint.
        tables: all tables by name.
        fp32_bytes: bytes of each table, counted as fp32.
        progress: progress of the tables' optimizers, by table.
        states: whether each rank has its own state, by the state's name.
        chunks: number of chunks that each rank is to write.
    """

    header: Header
    tables: dict[str, TableShape]
    fp32_bytes: dict[str, int]
    progress: dict[str, OptimizerClock]
    states: dict[str, bool]
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """A rank's part of a checkpoint, ready to be planned.

    Attributes:
        summary: the part that rank 0 needs.
        items: items by name, in writing order.
        differences: the judge of states whose content differs between ranks.
        staged: makes the jobs of named items that are staged; None: items are encoded as they are.
        digests: returns this rank's digests of tables stored as differences, once all is written.
    """

    summary: PlanSummary
    items: Mapping[str, Item]
    differences: RankDifferences = field(default_factory=RankDifferences)
    staged: Callable[[Sequence[str], Settled], Iterator[Job]] | None = None
    digests: Callable[[], TableDigests] = dict

    @property
    def local_plan(self) -> LocalPlan:
        """Return this rank's plan, for rank 0."""
        return LocalPlan(tuple(self.items), self.summary)

    def jobs(self, share: Share) -> Iterator[Job]:
        """Return the jobs of this rank's share."""
        if self.staged is not None:
            return self.staged(share.items, share.settled)
        return (self.items[name].job(share.settled) for name in share.items)


def summarize(
    header: Header, snapshot: Snapshot, items: Items, quantization: Quantization
) -> PlanSummary:
    """Summarize a snapshot for rank 0."""
    return summarized_later(header, snapshot, items, quantization)()


def summarized_later(
    header: Header, snapshot: Snapshot, items: Items, quantization: Quantization
) -> Callable[[], PlanSummary]:
    """Survey and sample the rows that are not copied later, now; return a function that summarizes
    the snapshot for rank 0 once training goes on.
    """
    surveys, samples = survey(items.at_cut, quantization), _samples(items.at_cut)
    return partial(_summary, header, snapshot, items, surveys, samples)


def _summary(
    header: Header,
    snapshot: Snapshot,
    items: Items,
    surveys: Surveys,
    samples: dict[str, bytes],
) -> PlanSummary:
    samples = samples | _samples(items.copied_later)
    shared = [s for s in snapshot.shards if s.replica is not None]
    return PlanSummary(
        header=header,
        tables=snapshot.tables,
        shards=[(s.shard.table, s.shard.rectangle) for s in snapshot.shards],
        fp32_bytes=_fp32_bytes(snapshot.shards),
        progress=dict(snapshot.progress),
        replicated=items.replicated,
        per_rank=tuple(sorted(snapshot.per_rank)),
        blocks=[block.summary for block in snapshot.blocks],
        surveys=surveys,
        lowest=tuple(sorted(snapshot.replicated)),
        row_states={
            s.shard.table: tuple(sorted(s.shard.optimizer))
            for s in snapshot.shards
            if s.place is not None
        },
        replicas={s.shard.table: samples[s.shard.name] for s in shared if s.place is not None},
        averaged={s.shard.name: samples[s.shard.name] for s in shared if s.place is None},
        names=_names(snapshot),
    )


def _names(snapshot: Snapshot) -> bytes:
    content = {name: snapshot.states.get(name) for name in snapshot.models}
    found = {n: sorted(map(str, c)) for n, c in content.items() if isinstance(c, Mapping)}
    return xxhash.xxh3_128_digest(repr(sorted(found.items())).encode("utf-8", "surrogatepass"))


def _samples(shards: Iterable[ShardSnapshot]) -> dict[str, bytes]:
    return {s.shard.name: s.replica.digest() for s in shards if s.replica is not None}


@gc_paused()
def make_global_plan(
    plans: Sequence[LocalPlan], differences: RankDifferences
) -> tuple[list[Share], GlobalPlan]:
    """Check all ranks' plans, and share the items out; on rank 0.

    Args:
        plans: by rank.
        differences: rank 0's judge of states whose content differs between ranks.

    Returns:
        The share of each rank, and the plan for the manifest.

    Raises:
        InvalidPlan: the plans don't form one checkpoint: the ranks disagree on it, two would write
            the same rectangle, or a part is missing.
        UnsupportedState: a state differs between ranks without being declared so.
    """
    summaries = [plan.summary for plan in plans]
    first = summaries[0]
    _check_agreement(summaries)
    again = left_to_others(
        first.tables,
        [summary.shards for summary in summaries],
        [summary.averaged for summary in summaries],
        [summary.blocks for summary in summaries],
    )
    differing = differences.differing(_held(summaries))
    differences.warn_of_replicas([summary.replicas for summary in summaries])
    differences.warn_of_averaged([summary.of_averaged() for summary in summaries])
    writers = _assign_writers(summaries, differing | set(first.lowest))
    surveys = [summary.surveys for summary in summaries if summary.surveys]
    settled = settle(surveys) if surveys else {}
    shares = []
    for rank, plan in enumerate(plans):
        own = (name for name in plan.items if writers.get(name, rank) == rank)
        if again[rank]:  # most ranks leave nothing to others
            own = (name for name in own if key_of(name) not in again[rank])
        shares.append(Share(tuple(own), settled))
    fp32_bytes = dict.fromkeys(first.tables, 0)
    for summary, left in zip(summaries, again, strict=True):
        elsewhere = tables_among(left)
        for table, size in summary.fp32_bytes.items():
            if table not in elsewhere:
                fp32_bytes[table] += size
    states = dict.fromkeys((name for s in summaries for name in s.replicated), False)
    states |= dict.fromkeys(first.per_rank, True)
    return shares, GlobalPlan(
        header=first.header,
        tables=first.tables,
        fp32_bytes=fp32_bytes,
        progress=differences.progress([summary.progress for summary in summaries]),
        states=states,
        chunks=tuple(len(share.items) for share in shares),
    )


def _fp32_bytes(shards: list[ShardSnapshot]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for shard in shards:
        values = sum(tensor.numel() for tensor in shard.tensors)
        sizes[shard.shard.table] = sizes.get(shard.shard.table, 0) + 4 * values
    return sizes


def _check_agreement(summaries: list[PlanSummary]) -> None:
    for rank, summary in enumerate(summaries[1:], 1):
        for what in ("header", "tables", "per_rank", "lowest"):
            first, other = getattr(summaries[0], what), getattr(summary, what)
            if first == other:
                continue
            remedy = "call save on all ranks at the same step with the same arguments"
            if what == "tables":
                first, other = (
                    dict(first.items() - other.items()),
                    dict(other.items() - first.items()),
                )
                remedy = "make a Checkpointer, which saves tables that only some ranks have"
            raise InvalidPlan(
                f"ranks 0 and {rank} don't save the same checkpoint: {what} is {first} there "
                f"and {other} here; {remedy}"
            )
        if summary.names != summaries[0].names:
            raise UnsupportedState(
                f"the model on rank {rank} has values under other names than on rank 0, and one "
                "rank's would be stored for all. Make a new Checkpointer, which asks all ranks for "
                "their names; with dcp.save, give what only some ranks have under a key of its own "
                "that is declared in SavePlanner(per_rank=…)"
            )
        for table, names in summary.row_states.items():
            first = summaries[0].row_states.get(table, names)
            if first != names:
                raise InvalidPlan(
                    f"data-parallel table {table!r} has optimizer state {list(first)} on rank 0 "
                    f"and {list(names)} on rank {rank}, and each rank writes a part of its rows: "
                    "let the same optimizer step the table on all ranks"
                )


def _held(summaries: list[PlanSummary]) -> dict[str, list[tuple[int, Digest]]]:
    """Collect each compared state's digests on the ranks that have the state."""
    held: dict[str, list[tuple[int, Digest]]] = {}
    for rank, summary in enumerate(summaries):
        for name, digest in summary.digests.items():
            held.setdefault(name, []).append((rank, digest))
    return held


def _assign_writers(summaries: list[PlanSummary], lowest: Container[str] = ()) -> dict[str, int]:
    """Assign each replicated state to a rank: the largest first, to the least loaded rank.

    Args:
        lowest: names of states that the lowest rank writes.

    Returns:
        Ranks by the names of the states' items.
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


def survey(
    shards: Iterable[ShardSnapshot], quantization: Quantization, found: Surveys | None = None
) -> Surveys:
    """Sample this rank's rows that are to be written, where their codec asks for a survey.

    Args:
        found: surveys to which these are added.
    """
    found = {} if found is None else found
    for snapshot in shards:
        codec = snapshot.encoding(quantization).codec
        if codec.surveys:
            part = codec.survey(snapshot.sampled)
            if part is not None:
                add_survey(found, codec, part)
    return found
