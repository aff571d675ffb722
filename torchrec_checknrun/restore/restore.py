"""Restore a model from a root: find the newest whole chain, check it, load it.

Nothing is changed before manifests, sizes, indexes and the layout were checked on all ranks. If the
storage fails after that, everything is restored from the next whole chain, or the caller gets
``ModelPartlyRestored``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.delta.references import References
from torchrec_checknrun.dense.state_objects import StateObjects
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    ClaimDamaged,
    CorruptCheckpoint,
    ModelPartlyRestored,
    StorageUnreachable,
)
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import Ranks, listed
from torchrec_checknrun.restore.chunks import ChainContent, read_content, share_indexes
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.model_loading import (
    copied,
    forget_pruning,
    load_copied,
    other_extra_states,
)
from torchrec_checknrun.restore.plan import ChainRestore
from torchrec_checknrun.restore.states import Merge, Owners, SavedStates, present_states
from torchrec_checknrun.root.chain import Chain, newest, resolve
from torchrec_checknrun.root.checkpoints import has_manifest
from torchrec_checknrun.root.counting import is_newest
from torchrec_checknrun.root.shared_root import require_shared
from torchrec_checknrun.store.copied_folder import CopiedFolder
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import tells_nothing
from torchrec_checknrun.values.buffers import BUFFERS, PerRankBuffers
from torchrec_checknrun.values.own_loading import load_again, loads_more
from torchrec_checknrun.writers.claims import latest_claim

logger = logging.getLogger(__name__)

_LOOKS = 10
"""Looks for a chain that no retention deletes before all ranks have seen it."""


@dataclass
class Restored:
    """The result of a restore.

    Attributes:
        chain: the chain that was restored.
        converted: whether rows lie in other column ranges than stored, on any rank.
        passed_over: newer checkpoints that could not be used, with the reasons.
        skipped: descriptions of tables and values on one side only, on any rank.
        forks: whether newer checkpoints are abandoned.
        known: those that could not be used, as ``passed_over``, and what these need that is
            damaged; None: all newer ones are abandoned, since an older one was asked for.
        references: what this rank's shards restore to, of tables stored as differences.
        unread: ids of newer chains that were passed over since the storage failed: a disk may give
            later what it doesn't now.
        memory_bytes: bytes that this rank has read from copies of the storage's files.
    """

    chain: Chain
    converted: bool
    passed_over: list[str]
    skipped: list[str]
    forks: bool
    known: tuple[str, ...] | None = ()
    memory_bytes: int = 0
    references: list[References] = field(default_factory=list)
    unread: tuple[str, ...] = ()


@dataclass
class Target:
    """The objects to restore.

    Attributes:
        model: the model; None: only the tables, not the dense parameters.
        tracked: the model's tables.
        states: state objects by name.
        per_rank: merge functions of the states of which each rank has its own.
        fit: allowed differences between checkpoint and model.
        replicated: names of states of which rank 0's content is stored.
        buffers: the model's buffers of which each rank has its own.
    """

    model: nn.Module | None
    tracked: TrackedModel
    states: Mapping[str, Stateful]
    per_rank: Mapping[str, Merge | None]
    fit: Fit = field(default_factory=Fit)
    replicated: frozenset[str] = frozenset()
    buffers: PerRankBuffers = field(default_factory=PerRankBuffers)


def restore(
    root: Folder, target: Target, ranks: Ranks, checkpoint: str | None, verify_all: bool
) -> Restored | None:
    """Restore a checkpoint, or the newest whole chain.

    Args:
        root: on all ranks with copies in memory, or on none.
        checkpoint: an id, which excludes a fallback to another checkpoint; None: the newest.
        verify_all: read and decode everything once before anything is changed.

    Returns:
        The chain that was restored; None if the root has no checkpoint.

    Raises:
        CheckNRunError: see ``Checkpointer.restore``; the same error on all ranks.
    """
    attempts = _Attempts(root, target, ranks, checkpoint)
    try:
        return _restore(attempts, checkpoint, verify_all)
    except ModelPartlyRestored:
        raise
    except (CheckNRunError, OSError) as error:
        if not attempts.changed:
            raise
        raise ModelPartlyRestored(
            f"a restore failed half-way: {error}. The model is no longer one state: restore "
            "another checkpoint, or start again"
        ) from error


def _restore(attempts: _Attempts, checkpoint: str | None, verify_all: bool) -> Restored | None:
    while (chain := attempts.next_chain()) is not None:
        try:
            live = attempts.load(chain, verify_all)
        except (CorruptCheckpoint, ChainBroken, OSError) as error:
            if attempts.without_copies(error):
                continue  # the same chain, from the storage
            # What this process can't read is not damaged: it would be abandoned, and deleted.
            if checkpoint is None and not tells_nothing(error):
                attempts.pass_over(chain, error)
                continue
            raise
        return attempts.finish(chain, live)
    return None


class _Attempts:
    """The attempts of one restore, which falls back to older chains.

    Attributes:
        changed: whether anything may have been changed, on any rank.
    """

    def __init__(self, root: Folder, target: Target, ranks: Ranks, checkpoint: str | None) -> None:
        self._root, self._target, self._ranks = root, target, ranks
        self._checkpoint = checkpoint
        self._optimizers = DenseStates(target.model, target.states, target.tracked)
        others = {n: state for n, state in target.states.items() if n not in self._optimizers}
        self._owners = Owners(
            target.per_rank,
            self._optimizers,
            target.buffers,
            StateObjects(others),
            target.model,
            target.tracked.dense.of_some,
        )
        self._passed_over: list[str] = []
        self._unread: list[str] = []
        self._unusable: set[str] = set()
        self._numbers: dict[str, int] = {}
        """The sequence numbers of checkpoints of chains that failed."""
        self._newest = True
        self._converted = False
        self._skipped: list[str] = []
        self.changed = False

    def next_chain(self) -> Chain | None:
        """Find the next chain to try; None if the root has no checkpoint. A collective.

        Raises:
            ModelPartlyRestored: all chains failed, one of them half-way.
            ChainBroken: all chains failed.
        """
        for _ in range(_LOOKS):
            chain, self._passed_over, self._newest = self._ranks.from_rank_0(self._find)
            head = "" if chain is None or self._passed_over else chain.head.id
            if not head or require_shared(self._root, self._ranks, head, MANIFEST_NAME):
                break
        if chain is None and self.changed:
            raise ModelPartlyRestored(
                "a restore failed half-way and no other whole chain is left; the model is no "
                f"longer one state. Start again from a new model. {listed(self._passed_over, '; ')}"
            )
        if chain is None and self._passed_over:
            reasons = listed(self._passed_over, "; ")
            raise ChainBroken(
                f"{self._root} holds checkpoints, but none can be restored: {reasons}. "
                "Fix the storage, or start a fresh run with another root"
            )
        return chain

    def without_copies(self, error: Exception) -> bool:
        """Read the storage alone from now on, if copies may have been the damage; on all ranks
        alike.
        """
        if not isinstance(self._root, CopiedFolder) or isinstance(error, StorageUnreachable):
            return False
        self._root = self._root.storage
        logger.warning("a copy in memory may be damaged, all is read from the storage: %s", error)
        return True

    def pass_over(self, chain: Chain, error: Exception) -> None:
        """Exclude a chain that failed, and the others that need what is damaged: each would be read
        up to there, and there may be hundreds.
        """
        self._unusable.add(chain.head.id)
        self._numbers |= {manifest.id: manifest.sequence for manifest in chain.manifests}
        if isinstance(error, CorruptCheckpoint) and error.checkpoint:
            self._unusable.add(error.checkpoint)
        self._passed_over.append(f"{chain.head.id}: {error}")
        if isinstance(error, OSError):
            self._unread += [manifest.id for manifest in chain.manifests]

    def load(self, chain: Chain, verify_all: bool) -> dict[str, Any]:
        """Load a chain into the live objects; return their restored state dict. A collective."""
        live: dict[str, Any] = {}
        for dry_run in (True, False) if verify_all else (False,):
            self._chain_restore = ChainRestore(
                self._target.tracked, self._owners, self._target.fit, dry_run=dry_run
            )
            try:
                with self._optimizers.fitted(undo=dry_run):
                    live = self._load(chain)
            finally:
                began = self._ranks.gather(self._chain_restore.began)
                self.changed = self.changed or any(began)
            found = self._chain_restore
            of_ranks = self._ranks.gather((found.converted, found.skipped))
            self._converted = any(converted for converted, _ in of_ranks)
            self._skipped = sorted({what for _, skipped in of_ranks for what in skipped})
        return live

    def finish(self, chain: Chain, live: dict[str, Any]) -> Restored:
        """Give the objects their restored content, and report. A collective."""
        progress = self._chain_restore.progress
        hand_back(self._target, self._optimizers, live, progress, self._ranks)
        known = (*self._passed_over, *(f"{id}: " for id in self._unusable))
        return Restored(
            chain,
            self._converted,
            self._passed_over,
            skipped=self._skipped,
            forks=bool(self._passed_over) or not self._newest,
            known=known if self._newest else None,
            memory_bytes=self._root.taken.bytes if isinstance(self._root, CopiedFolder) else 0,
            references=self._chain_restore.references,
            unread=tuple(dict.fromkeys(self._unread)),
        )

    def _find(self) -> tuple[Chain | None, list[str], bool]:
        """Find the chain; also return why newer ones were passed over until now, and whether it is
        the newest.
        """
        if self._checkpoint is None:
            chain, problems = newest(self._root, self._unusable, resumes=True)
            told = dict.fromkeys((*self._passed_over, *problems))
            return chain, [line for line in told if not self._is_gone(line, chain)], True
        chain = resolve(self._root, self._checkpoint)
        try:
            return chain, [], is_newest(self._root, latest_claim(self._root), chain.head)
        except ClaimDamaged:  # prevents saves to this root, but not a restore
            return chain, [], is_newest(self._root, None, chain.head)

    def _is_gone(self, line: str, chain: Chain | None) -> bool:
        """Tell whether what was passed over was deleted as it was read, as by a retention that knew
        the chain found now, which is no older: nothing was damaged, or is abandoned.
        """
        id = line.partition(": ")[0]
        number = self._numbers.get(id)
        if chain is None or number is None or number > chain.head.sequence:
            return False
        with suppress(CheckNRunError, OSError):
            return not self._root.is_link(id) and not has_manifest(self._root, id)
        return False

    def _load(self, chain: Chain) -> dict[str, Any]:
        """Plan a chain's restore on all ranks, then load the chain."""
        target, ranks, chain_restore = self._target, self._ranks, self._chain_restore
        live: dict[str, Any] = {}
        read: list[ChainContent] = []
        # Before states are asked for, which may be a collective: every rank gets there, or none.
        shared = share_indexes(self._root, chain, ranks)
        ranks.reduce(lambda: read.append(read_content(self._root, chain, at_hand=shared)), len)

        def read_live() -> None:
            target.tracked.flush()
            if target.model is not None:
                live[MODEL] = target.model.state_dict()
            live.update(present_states(target.states, self._optimizers, SavedStates.of(read[0])))

        ranks.on_all_ranks(read_live)
        head = chain.head
        unasked = head.states.keys() - live.keys() - {BUFFERS}
        for name in unasked if target.model is not None else ():
            logger.warning(
                "%s holds state %r, which is not restored: the Checkpointer has no such state",
                *(head.id, name),
            )
        live = dict(sorted(live.items()))  # the same order on all ranks
        # Nothing is decided: only errors matter.
        ranks.reduce(lambda: chain_restore.plan(read[0], live), len)
        if head.deltas:  # on all ranks
            ranks.reduce(lambda: chain_restore.build(self._root), chain_restore.check_digests)
        ranks.reduce(lambda: chain_restore.load(self._root), len)
        return live


def hand_back(
    target: Target,
    optimizers: DenseStates,
    live: dict[str, Any],
    progress: Mapping[str, OptimizerClock],
    ranks: Ranks,
) -> None:
    """Give the state objects their content, the tables' optimizers their progress, and the model
    what it loads by itself (see ``model_loading``); all else was written in place. A collective.

    Args:
        live: state dicts by name, restored.

    Raises:
        ModelPartlyRestored: the model or an object refused its content.
    """
    content = live.get(MODEL)

    def find() -> tuple[bool, bool]:
        if target.model is None:
            return False, False
        copies = copied(target.model, content, target.tracked) or other_extra_states(content)
        return bool(copies), loads_more(target.model)

    def act() -> None:
        if any_copied:
            assert target.model is not None
            load_copied(target.model, content, target.tracked)
        elif any_more:
            assert target.model is not None
            load_again(target.model)
            target.tracked.acknowledge_writes()  # of rows onto themselves
        if target.model is not None:
            forget_pruning(target.model)
        for name, stateful in target.states.items():
            if name in optimizers:
                optimizers.load(name, live[name])
            else:
                _load_state(name, stateful, live[name])
        optimizers.finish()
        target.tracked.set_progress(progress)
        target.tracked.acknowledge_writes()  # of data-parallel tables' optimizers, too

    try:
        # Loading may be a collective.
        any_copied, any_more = map(any, zip(*ranks.on_all_ranks(find), strict=True))
        ranks.on_all_ranks(act)
    except Exception as error:
        refused = f"the model or a state object refused its restored content: {error!r}"
        if isinstance(error, _RefusedState):
            refused = str(error)
        raise ModelPartlyRestored(
            f"{refused}. The model is no longer one state: start again from a new model"
        ) from error


class _RefusedState(Exception):
    """An error of a state object's ``load_state_dict``, with the object's name."""


def _load_state(name: str, state: Stateful, content: Any) -> None:
    try:
        state.load_state_dict(content)
    except Exception as error:
        raise _RefusedState(
            f"state {name!r} refused its restored content: {type(state).__name__}.load_state_dict "
            f"raised {error!r}. Let it take what its state_dict() gave, or leave the object out of "
            "`state`"
        ) from error
