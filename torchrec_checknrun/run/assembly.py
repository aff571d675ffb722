"""Assemble what a Checkpointer works with: on all ranks, or on none.

An error on one rank (a wrong argument, a table that can't be tracked, no memory) becomes every
rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.model.tracked import TrackedModel, track
from torchrec_checknrun.placements import local_bytes
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.run.agreement import agreed
from torchrec_checknrun.run.arguments import Arguments, PerRank, Replicated, is_timeout
from torchrec_checknrun.run.unsharded import refuse_unsharded
from torchrec_checknrun.save.background import Background

T = TypeVar("T")


@dataclass
class Assembly:
    """A Checkpointer's parts.

    Attributes:
        ranks: for the training thread.
        background_ranks: for what runs at the same time behind it.
        target: the model and its states, tracked.
    """

    arguments: Arguments
    ranks: Ranks
    background_ranks: Ranks
    target: Target
    background: Background
    _closers: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        check: Callable[[], Arguments],
        *,
        timeout_seconds: Any,
        memory_budget: int | None,
    ) -> Assembly:
        """Check the arguments, track the model and take staging memory; a collective.

        Args:
            check: makes the arguments, which must be the same on all ranks.
            timeout_seconds: of the collectives; not checked yet.
            memory_budget: as of ``Checkpointer``; may differ between ranks.

        Raises:
            ValueError, TypeError, UnsupportedTable: as of ``Checkpointer``.
        """
        # Before the arguments are checked: a mistake that one rank makes is every rank's error.
        timeout = timedelta(seconds=timeout_seconds if is_timeout(timeout_seconds) else 60)
        # Twice as long: whoever hangs in the storage is to have the time to say so.
        ranks, background_ranks = Ranks(timeout), Ranks(2 * timeout)
        tracked: TrackedModel | None = None
        try:
            arguments = agreed(ranks, check, Arguments.described)
            states = arguments.states
            # A table may be unsupported where it is: on one rank.
            tracked = agreed(ranks, lambda: _track(model, states), _tables)
            target = _target(arguments, model, tracked)
            background = _background(arguments, target, ranks, background_ranks, memory_budget)
        except BaseException:
            if tracked is not None:
                tracked.close()
            ranks.close()
            background_ranks.close()
            raise
        return cls(arguments, ranks, background_ranks, target, background)

    def on_all_ranks(self, make: Callable[[], T], close: Callable[[T], None]) -> T:
        """Make something of these parts on all ranks, or raise one rank's error on all of them and
        close whatever was made until then, and the parts; a collective.
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


def _track(model: nn.Module, states: Mapping[str, Stateful]) -> TrackedModel:
    tracked = track(model, states.values())
    try:
        refuse_unsharded(model, tracked.tables)
    except BaseException:
        tracked.close()
        raise
    return tracked


def _tables(tracked: TrackedModel) -> dict[str, str]:
    sizes = {name: f"{table.rows} × {table.dim}" for name, table in tracked.tables.items()}
    return {f"the model's table {name!r}": size for name, size in sizes.items()}


def _target(arguments: Arguments, model: nn.Module, tracked: TrackedModel) -> Target:
    declared = arguments.state
    return Target(
        model=model,
        tracked=tracked,
        states=arguments.states,
        per_rank={n: s.merge for n, s in declared.items() if isinstance(s, PerRank)},
        replicated=frozenset(n for n, s in declared.items() if isinstance(s, Replicated)),
        buffers=arguments.per_rank_buffers,
    )


def _background(
    arguments: Arguments,
    target: Target,
    ranks: Ranks,
    background_ranks: Ranks,
    memory_budget: int | None,
) -> Background:
    made: list[Background] = []

    def make() -> None:
        assert target.model is not None
        made.append(
            Background(
                arguments.root,
                background_ranks,
                kind=arguments.background,
                mode=arguments.staging,
                memory_budget=memory_budget,
                chunk_bytes=arguments.chunk_bytes,
                quantization=arguments.quantization.resolved(lossy_restores=0),
                expected=[shard.local for shard in target.tracked.shards],
                dense_bytes=_dense_bytes(target.model, target.tracked),
            )
        )

    try:
        ranks.on_all_ranks(make)
    except BaseException:  # perhaps on another rank only
        for background in made:
            background.close()
        raise
    return made[0]


def _dense_bytes(model: nn.Module, tracked: TrackedModel) -> int:
    """Estimate the bytes of everything outside the tables: parameters, two optimizer states each,
    and buffers.
    """
    tables = {shard.local.weight.data_ptr() for shard in tracked.shards}
    parameters = sum(3 * local_bytes(p) for p in model.parameters() if p.data_ptr() not in tables)
    return parameters + sum(local_bytes(buffer) for buffer in model.buffers())
