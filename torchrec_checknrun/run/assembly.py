"""Assemble the parts of a Checkpointer on all ranks, or on none.

An error on one rank (a wrong argument, a table that can't be tracked, no memory) is raised on every
rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from torchrec_checknrun.callers import as_in_training
from torchrec_checknrun.dense.optimizers import (
    handed_on,
    is_known,
    left_to_others,
    partitioned,
    tables_of_others,
    unsaved_hooks,
)
from torchrec_checknrun.dense.references import local_tensors
from torchrec_checknrun.dense.state_objects import keeps_all_to_itself, shows_sums
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.model.tracked import TrackedModel, refuse_part_of_job, track
from torchrec_checknrun.options.agreement import agreed
from torchrec_checknrun.options.arguments import PerRank, Replicated, is_timeout, refuse_unsharded
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks, listed
from torchrec_checknrun.recovery.survival import Survival, close_image, make_image
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.run.publisher import Publisher, make_publisher
from torchrec_checknrun.run.saver import Saver
from torchrec_checknrun.save.background import Background
from torchrec_checknrun.save.links import REFERENCE_SHARES, too_large
from torchrec_checknrun.schedule.schedule import Schedule
from torchrec_checknrun.snapshot.memory import default_budget
from torchrec_checknrun.tiers.host_copies import make_host_files
from torchrec_checknrun.tiers.peers import make_peers
from torchrec_checknrun.values.dense import is_dense

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

T = TypeVar("T")


@dataclass
class Assembly:
    """The parts of a Checkpointer.

    Attributes:
        options: the checked arguments.
        ranks: the ranks as the training thread reaches them.
        background_ranks: the ranks as the background reaches them, at the same time.
        target: the tracked model and its states.
        saver, survival, schedule, publisher: what saves, goes on from images, says when, and
            publishes; there is a publisher only if something is to be published.
    """

    options: Options
    ranks: Ranks
    background_ranks: Ranks
    target: Target
    background: Background
    saver: Saver = field(init=False)
    survival: Survival = field(init=False)
    schedule: Schedule = field(init=False)
    publisher: Publisher | None = field(init=False)
    _closers: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    @as_in_training
    def of(cls, given: Mapping[str, Any], unknown: Mapping[str, object]) -> Assembly:
        """Check the arguments, track the model and take staging memory; a collective.

        Args:
            given: Checkpointer's arguments by name, unchecked. All but memory budget and callbacks
                must be the same on all ranks.
            unknown: keyword arguments that Checkpointer doesn't have, which are refused.

        Raises:
            ValueError, TypeError, UnsupportedTable: as ``Checkpointer``.
        """
        refuse_part_of_job(given["model"])  # the only mistake that keeps other ranks from coming
        seconds = given["timeout_seconds"]
        # Before the arguments are checked: one rank's mistake must reach every rank.
        timeout = timedelta(seconds=seconds if is_timeout(seconds) else 60)
        # Twice as long: a rank that hangs in the storage needs the time to report it.
        ranks, background_ranks = Ranks(timeout), Ranks(2 * timeout)
        tracked: TrackedModel | None = None
        try:
            options = agreed(ranks, partial(Options.of, given, unknown), Options.described)
            states = options.states
            # A table may be unsupported on one rank only: the rank that holds it.
            tracked = agreed(ranks, lambda: _track(options.model, states), _tables, some_lack=True)
            tracked.agree(ranks)
            tracked.dense.agree(ranks)
            ranks.on_all_ranks(lambda: _require_declared(options))
            options = options.without_buffers(tracked.dense.of_some)
            options = _storable(options, tracked, ranks)
            target = _target(options, tracked)
            background = _background(options, target, ranks, background_ranks)
            _warn_of_optimizers(states)
            _warn_of_own_forms(tracked, states)
            _warn_of_hooks(options.model, states)
            _warn_of_empty_states(states)
            _warn_of_sums(options.model, states)
        except BaseException:
            if tracked is not None:
                tracked.close()
            ranks.close()
            background_ranks.close()
            raise
        parts = cls(options, ranks, background_ranks, target, background)
        parts._make_workers()
        return parts

    def _make_workers(self) -> None:
        options, target, ranks = self.options, self.target, self.ranks
        image = self._on_all_ranks(partial(make_image, options, target, ranks), close_image)
        saver = partial(Saver, options, target, ranks, self.background, image)
        self.saver = self._on_all_ranks(saver, Saver.close)
        wanted = None if options.partial is None else options.partial.peers
        bytes = _table_bytes(target.tracked) + _dense_bytes(options.model, target.tracked)
        peers = self._on_all_ranks(
            partial(make_peers, wanted, image, ranks, self.background_ranks, bytes), lambda _: None
        )
        host = self._on_all_ranks(
            partial(make_host_files, options.survive, options.root, ranks, bytes), lambda _: None
        )
        self.background.destination.copies = host if peers is None else peers
        self.survival = Survival(options, target, ranks, self.saver, image, peers, host)
        self.schedule = self._on_all_ranks(
            partial(Schedule, options.all_triggers, ranks), lambda made: made.close(failed=True)
        )
        self.publisher = self._on_all_ranks(
            partial(make_publisher, options, target, ranks, self.background, self.saver),
            lambda _: None,
        )

    def _on_all_ranks(self, make: Callable[[], T], close: Callable[[T], None]) -> T:
        """Make something of these parts on all ranks; a collective.

        On an error, close everything made so far and the parts, and raise one rank's error on all
        ranks.
        """

        def made() -> T:
            result = make()
            self._closers.append(lambda: close(result))
            return result

        results: list[T] = []
        try:
            self.ranks.on_all_ranks(lambda: results.append(made()))
        except BaseException:
            for closer in reversed(self._closers):
                closer()
            self.target.tracked.close()
            self.background.close()
            self.ranks.close()
            self.background_ranks.close()
            raise
        return results[0]


def _warn_of_patterns(options: Options, tracked: TrackedModel, ranks: Ranks) -> None:
    """Warn of choices for tables that the model doesn't have: other tables may have been meant."""
    if ranks.rank == 0 and (unused := options.quantization.without_tables(tracked.tables)):
        logger.warning(
            "quantization: tables has patterns of no table: %s. The model has %s, where '*users*' "
            "matches in the midst of a name",
            listed([*map(repr, unused)]),
            listed(sorted(tracked.tables)),
        )


def _storable(options: Options, tracked: TrackedModel, ranks: Ranks) -> Options:
    """Have tables stored alone that can't be stored as differences: whose references don't fit into
    some rank's memory, or which only one of several ranks with the same rows writes; a collective.
    """
    _warn_of_patterns(options, tracked, ranks)
    chosen = options.quantization.resolved(lossy_restores=0)
    if options.quantization.link_method is None:
        return options
    most = options.quantization.reference_bytes
    most = REFERENCE_SHARES * default_budget() if most is None else most
    lacking = ranks.on_all_ranks(lambda: too_large(tracked, chosen, most))
    tables = sorted({table for of_rank in lacking for table in of_rank})
    if tables and ranks.rank == 0:
        logger.warning(
            "%s: what the last checkpoint restores would take more than %d bytes on a rank: stored "
            "each row by itself, by method='fisher' instead of 'delta', 'adaptive' instead of "
            "'lc'. Give Quantization(reference_bytes=…) more, or more ranks",
            listed(tables),
            most,
        )
    averaged = {
        shard.table
        for shard in tracked.shards
        if shard.local.averaged
        and chosen.for_table(shard.table, shard.local.shape.rows).codec.chained
    }
    copied = sorted({table for of_rank in ranks.gather(averaged) for table in of_rank})
    if copied and ranks.rank == 0:
        logger.warning(
            "%s: several sharding groups hold these tables (DMPCollection), of which one writes a "
            "row: stored each row by itself, by method='fisher' instead of 'delta', 'adaptive' "
            "instead of 'lc'",
            listed(copied),
        )
    return options.storing(options.quantization.without_links([*tables, *copied]))


def _track(model: nn.Module, states: Mapping[str, Stateful]) -> TrackedModel:
    tracked = track(model, states.values())
    try:
        refuse_unsharded(model, tracked.tables)
        _refuse_other_models(states, tracked)
    except BaseException:
        tracked.close()
        raise
    return tracked


def _refuse_other_models(states: Mapping[str, Stateful], tracked: TrackedModel) -> None:
    """Refuse optimizers of tables that are not the model's.

    Rates and step counters are in the tables' kernels, and only the model's are stored.

    Raises:
        UnsupportedState: names the first such optimizer, a table, and the remedy.
    """
    is_table = tracked.dense.stored().is_table
    for name, tables in tables_of_others(states, tracked.tables, is_table).items():
        raise UnsupportedState(
            f"state {name!r} holds TorchRec's fused optimizer of {tables[0]}, which is no table of "
            "the model: its rate and step counter would be lost. Give all models that are trained "
            'as one, model=nn.ModuleDict({"first": …, "second": …}); after a reshard, give a new '
            "optimizer"
        )


def _require_declared(options: Options) -> None:
    """Refuse optimizers of which each rank has a part of the state, unless declared so; warn of
    those that a user's object holds.

    Raises:
        UnsupportedState: names the state, and the remedy.
    """
    for name, stored in partitioned(options.states):
        if not stored:
            logger.warning(
                "state %r holds a ZeroRedundancyOptimizer: its state_dict() raises an error, or "
                "shows what consolidate_state_dict() last gathered. Give the optimizer itself, "
                'state={"optimizer": PerRank(optimizer)}, and leave it out of the object\'s own '
                "state_dict()",
                name,
            )
        elif not isinstance(options.state[name], PerRank):
            raise UnsupportedState(
                f"state {name!r} is or holds a ZeroRedundancyOptimizer, and each rank has a part "
                "of its state: declare it, state={"
                f"{name!r}: PerRank(optimizer)}}. It comes back on as many ranks"
            )


def _warn_of_optimizers(states: Mapping[str, Stateful]) -> None:
    """Warn of optimizers whose rates a user's state object loses."""
    for found, hides in sorted(left_to_others(states).items()):
        logger.warning(
            "%s: TorchRec's state dict leaves out learning rates and the counters of warm-ups%s, "
            'and they would be lost: give the optimizer itself as well, state={"optimizer": …}, '
            "and leave it out of the object's own state_dict()",
            found,
            " and, of combined optimizers inside a wrapper, the parameters' state (Adam's moments)"
            if hides
            else "",
        )


def _warn_of_own_forms(tracked: TrackedModel, states: Mapping[str, Stateful]) -> None:
    """Warn of optimizers whose rows of data-parallel tables' state would not be restored."""
    replicas = [shard.local for shard in tracked.shards if shard.local.replicated]
    tables = {replica.weight.data_ptr(): replica.table for replica in replicas}
    for name, state in states.items():
        if not isinstance(state, Optimizer) or is_known(handed_on(state)):
            continue
        stepped = {p.data_ptr() for group in state.param_groups for p in group["params"]}
        if stepped := stepped & tables.keys():
            kind = type(state).__name__
            logger.warning(
                "state %r, a %s, steps the data-parallel tables %s and has a state_dict of its "
                "own: a new process could not restore its state of their rows. Give it within "
                "TorchRec's wrapper: KeyedOptimizerWrapper(dict(parameters), lambda p: %s(p, …))",
                name,
                kind,
                sorted(tables[place] for place in stepped),
                kind,
            )


def _warn_of_hooks(model: nn.Module, states: Mapping[str, Stateful]) -> None:
    """Warn of communication hooks with state that would be lost."""
    for kind in sorted(unsaved_hooks(model, states.values())):
        logger.warning(
            "a communication hook of DistributedDataParallel keeps a %s that no checkpoint holds: "
            "a restored run begins with a new one. Give its values as a state object, in an object "
            'with the hook\'s state in an attribute: state={"hook": PerRank(…)}',
            kind,
        )


def _warn_of_empty_states(states: Mapping[str, Stateful]) -> None:
    """Warn of modules that show nothing of what they hold."""
    for name, state in states.items():
        if keeps_all_to_itself(state):
            logger.warning(
                "state %r holds tensors, but its state_dict() is empty: nothing of it is saved. "
                "A metric of torchmetrics shows its state after metric.persistent(True), called "
                "before the Checkpointer is made",
                name,
            )


def _warn_of_sums(model: nn.Module, states: Mapping[str, Stateful]) -> None:
    """Warn of metrics that would come back with other counts."""
    if shows_sums([model, *states.values()]):
        logger.warning(
            "TorchRec's CPUOffloadedRecMetricModule shows the sums over all ranks as of its last "
            "sync(), and a restored run takes them as each rank's own. Give what each rank "
            'counts, state={"metrics": PerRank(metrics.rec_metrics)}; sync() it before step()'
        )


def _tables(tracked: TrackedModel) -> dict[str, str]:
    return {f"the model's table {n!r}": f"{t.rows} × {t.dim}" for n, t in tracked.tables.items()}


def _target(options: Options, tracked: TrackedModel) -> Target:
    declared = options.state
    return Target(
        model=options.model,
        tracked=tracked,
        states=options.states,
        per_rank={n: s.merge for n, s in declared.items() if isinstance(s, PerRank)},
        replicated=frozenset(n for n, s in declared.items() if isinstance(s, Replicated)),
        buffers=options.per_rank_buffers,
    )


def _background(
    options: Options, target: Target, ranks: Ranks, background_ranks: Ranks
) -> Background:
    made: list[Background] = []

    def make() -> None:
        target.tracked.keep_spares()
        made.append(
            Background(
                options.root,
                background_ranks,
                kind=options.background,
                mode=options.staging,
                memory_budget=options.memory_budget,
                chunk_bytes=options.chunk_bytes,
                quantization=options.quantization.resolved(lossy_restores=0),
                expected=target.tracked.shards,
                dense_bytes=_dense_bytes(options.model, target.tracked),
                dense=options.dense,
            )
        )

    try:
        ranks.on_all_ranks(make)
    except BaseException:  # possibly of another rank only
        for background in made:
            background.close()
        raise
    return made[0]


def _table_bytes(tracked: TrackedModel) -> int:
    """Return the bytes of this rank's rows with their optimizer state."""
    return sum(tensor.nbytes for shard in tracked.shards for tensor in shard.local.tensors)


def _dense_bytes(model: nn.Module, tracked: TrackedModel) -> int:
    """Estimate the bytes beside the tables: parameters, two optimizer states each, and buffers."""
    tables = {shard.local.weight.data_ptr() for shard in tracked.shards}
    parts = [t for p in model.parameters() for t in local_tensors(p) if t.data_ptr() not in tables]
    buffers = [t for b in model.buffers() for t in local_tensors(b) if is_dense(t)]
    return sum(3 * t.nbytes for t in parts) + sum(t.nbytes for t in buffers)
