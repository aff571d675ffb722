"""Differences between ranks in replicated state, of which only one content can be stored.

Differing state objects are an error, unless declared; of a model's differing buffers and
parameters, and of values that optimizers' wrappers hold, the lowest rank's are stored. Of
data-parallel tables each rank stores its share, whose differences are told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.ranks import listed, ranks_text
from torchrec_checknrun.snapshot.digest import Digest
from torchrec_checknrun.values.state import Tree

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MOST_NAMES = 8
_RATES = "learning rates of tables"

Held = Sequence[tuple[int, Digest]]
"""A state's digest on each rank that has it, in rank order."""


@dataclass
class RankDifferences:
    """Rank 0's judge of differences.

    Attributes:
        trees: trees of rank 0's state objects, by name.
        models: names of a model's states.
        buffers: names of buffers in a model's state.
        broadcast: names of those that a restored run's first step makes alike.
        told: names already warned of; shared by all saves of one run.
    """

    trees: Mapping[str, Tree] = field(default_factory=dict)
    models: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    told: set[str] = field(default_factory=set)

    def differing(self, states: Mapping[str, Held]) -> set[str]:
        """Find the states whose content differs between ranks, for which to store the lowest
        rank's.

        Raises:
            UnsupportedState: a differing state is no model's; names the state, the ranks, and the
                values that differ.
        """
        found = {n for n, held in states.items() if len({d.alike for _, d in held}) > 1}
        for name in sorted(found - self.models):
            first, others, values = self._compare(name, states[name])
            at = f" (in {listed(values)})" if values else ""
            raise UnsupportedState(
                f"state {name!r} was not declared and differs between rank {first} and "
                f"{ranks_text(others)}{at}: one content is stored for all ranks. Declare it as "
                "PerRank(object, merge=…) if each rank needs its own, or as Replicated(object) if "
                "rank 0's is right for all (dcp.save: SavePlanner(per_rank=…, replicated=…)). "
                "Rows are kept for the next checkpoint"
            )
        for name in sorted(found & self.models):
            self._warn(name, states[name])
        wrapped = {n for n, held in states.items() if len({d.whole for _, d in held}) > 1} - found
        for name in sorted(wrapped):
            self._warn_of_wrappers(name, states[name])
        return found | wrapped

    def progress(
        self, of_ranks: Sequence[Mapping[str, OptimizerClock]]
    ) -> dict[str, OptimizerClock]:
        """Choose the lowest rank's optimizer progress of each table. Warn once of learning rates
        that differ between the ranks that hold a table.
        """
        chosen: dict[str, OptimizerClock] = {}
        differing: dict[str, None] = {}
        for of_rank in of_ranks:
            for table, own in of_rank.items():
                if chosen.setdefault(table, own).learning_rate != own.learning_rate:
                    differing[table] = None
        if differing and _RATES not in self.told:
            self.told.add(_RATES)
            logger.warning(
                "tables %s have different learning rates on different ranks; the lowest rank's are "
                "stored and restored on all ranks: set the rate, or step its scheduler, on all "
                "ranks",
                listed(list(differing)),
            )
        return chosen

    def warn_of_replicas(self, of_ranks: Sequence[Mapping[str, bytes]]) -> None:
        """Warn once of each data-parallel table whose rows differ between ranks.

        Args:
            of_ranks: by rank, the digest of a sample of each table.
        """
        if apart := self._apart(of_ranks):
            logger.warning(
                "data-parallel tables %s hold other rows on %s than on lower ones: each rank's "
                "share of the rows is stored, and restored on all ranks, a mixture that no rank "
                "has trained. Give all ranks the same rows before training, and let "
                "DistributedModelParallel wrap the tables (init_data_parallel=True), so that "
                "gradients are averaged",
                *apart,
            )

    def warn_of_averaged(self, of_ranks: Sequence[Mapping[str, bytes]]) -> None:
        """Warn once of each shard whose rows differ between sharding groups.

        Args:
            of_ranks: by rank, the digest of a sample of each shard.
        """
        if apart := self._apart(of_ranks):
            logger.warning(
                "the replicas of %s hold other rows on %s than on lower ones: these are stored, "
                "and restored on all ranks, and what others have trained since the last average "
                "is lost. Call the DMPCollection's sync() right before a save",
                *apart,
            )

    def _apart(self, of_ranks: Sequence[Mapping[str, bytes]]) -> tuple[str, str] | None:
        """Describe what differs from its first digest and was not told of, and on which ranks."""
        first: dict[str, bytes] = {}
        apart: dict[str, list[int]] = {}
        for rank, digests in enumerate(of_ranks):
            for name, digest in digests.items():
                if first.setdefault(name, digest) != digest and name not in self.told:
                    apart.setdefault(name, []).append(rank)
        if not apart:
            return None
        self.told.update(apart)
        return listed(sorted(apart)), ranks_text(sorted({r for of in apart.values() for r in of}))

    def _warn(self, name: str, held: Held) -> None:
        """Warn once of a model's differing parameters, and once of its differing buffers."""
        first, others, values = self._compare(name, held)
        buffers = [value for value in values if value in self.buffers - self.broadcast]
        parameters = [value for value in values if value not in self.buffers]
        if (parameters or not values) and name not in self.told:
            self.told.add(name)
            logger.warning(
                "dense parameters differ between rank %d and %s: %s. Rank %d's are stored and "
                "restored on all ranks; broadcast them before training, or wrap their module with "
                "DistributedDataParallel. Metrics, which count on each rank, are given as state "
                'objects as well, state={"metrics": PerRank(metrics)}',
                first,
                ranks_text(others),
                listed(parameters) or "not among the first of them",
                first,
            )
        if buffers and (told := f"buffers of {name}") not in self.told:
            self.told.add(told)
            logger.warning(
                "buffers differ between rank %d and %s: %s. Rank %d's are stored and restored on "
                'all ranks; with per_rank_buffers=["…"], patterns over their names, each rank '
                "keeps its own",
                first,
                ranks_text(others),
                listed(buffers),
                first,
            )

    def _warn_of_wrappers(self, name: str, held: Held) -> None:
        """Warn once of an optimizer's wrappers that hold other values on other ranks."""
        if name in self.told:
            return
        self.told.add(name)
        first, others, values = self._compare(name, held)
        logger.warning(
            "state %r: its wrappers hold other values on rank %d than on %s%s. Rank %d's are "
            "stored and restored on all ranks; declare PerRank(optimizer) if each rank needs its "
            "own",
            name,
            first,
            ranks_text(others),
            f" (in {listed(values)})" if values else "",
            first,
        )

    def _compare(self, name: str, held: Held) -> tuple[int, list[int], list[str]]:
        """Return the lowest rank, the ranks that differ from it, and the values that differ."""
        (first, own), *others = held
        differing = [(rank, digest) for rank, digest in others if digest.whole != own.whole]
        tree = self.trees.get(name)
        values: dict[str, None] = {}
        # A few ranks, of thousands, suffice to name the values.
        if tree is not None and first == 0:
            for _, digest in differing[:_MOST_NAMES]:
                values.update(dict.fromkeys(own.differing(digest, tree)))
        return first, [rank for rank, _ in differing], [value or "its keys" for value in values]
