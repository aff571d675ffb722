"""The lineage: checkpoints that descend from each other through actual restores and commits.

Plain bookkeeping, the same on every rank: the next checkpoint's parent, and whether it must be full
regardless of the policy. Also the highest sequence number that this process has committed to each
root.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.format.manifest import Header, Link, Manifest
from torchrec_checknrun.format.names import new_id
from torchrec_checknrun.root.chain import Chain, incompatibility, narrow, stands_in
from torchrec_checknrun.root.policy import Decision, Policy
from torchrec_checknrun.root.report import CheckpointReport, Progress, checkpoint_report
from torchrec_checknrun.store.folder import Folder

_numbers: dict[str, int] = {}
"""By root, the highest sequence number that this process has committed."""


@dataclass(frozen=True)
class Proposal:
    """Rank 0's decision on one checkpoint, for all ranks."""

    id: str
    header: Header
    decision: Decision

    def as_full(self) -> Proposal:
        """Return the proposal of all rows in place of modified ones."""
        header = replace(self.header, kind="full", parent=None, earlier_fractions=())
        return replace(self, header=header, decision=Decision.FULL)


class Lineage:
    """The last checkpoint committed or restored, and the history since the last full one.

    Attributes:
        history: the last full checkpoint and those based on it, oldest first.
        previous: the last checkpoint; None at a run's start.
        lossy_restores: restores from lossy checkpoints so far.
        losses: what partial recoveries have cost so far.
        id: the lineage's name; until the first commit, rank 0's is the one that counts.
    """

    def __init__(self) -> None:
        self.history: tuple[Manifest, ...] = ()
        self.previous: Manifest | None = None
        self.lossy_restores = 0
        self.losses: tuple[Loss, ...] = ()
        self.id = secrets.token_hex(8)
        self._converted = False
        self._widths: dict[str, int] = {}
        """The history's widths, see ``Chain.widths``: kept up to date rather than recomputed while
        training waits, which would take longer with each checkpoint.
        """
        self._chain: tuple[Manifest, ...] = ()
        """The last one's, see ``chain``: kept up to date for the same reason."""

    @property
    def chain(self) -> list[Manifest]:
        """Return the checkpoints that a restore of the last one reads, as far as the history has
        them: oldest first, the last one included.
        """
        return list(self._chain)

    @property
    def chain_length(self) -> int:
        """Return the number of checkpoints that a restore of the last one reads."""
        return len(self._chain)

    def ancestors(self, parent: Link | None) -> tuple[str, ...]:
        """Return the ids of what a checkpoint with this parent builds on, oldest first; none where
        this rank has given the parent up, which rank 0 has committed.
        """
        last = next((m for m in self.history if parent is not None and m.id == parent.id), None)
        return () if last is None else tuple(manifest.id for manifest in self._chain_of(last))

    def propose(
        self,
        policy: Policy,
        bits: int | None,
        widths: Mapping[str, int],
        step: int,
        sequence: int,
        epoch: int,
    ) -> Proposal:
        """Decide on the next checkpoint (on rank 0).

        Args:
            bits: the requested quantization, None for exact.
            widths: by table, the bits of a value that this means.
            sequence: its sequence number, used by no attempt before.
            epoch: the writer's.

        Raises:
            TypeError: the policy returns something other than a ``Decision``.
        """
        decision = Decision.FULL if self._must_be_full(widths) else policy.decide(self.history)
        if not isinstance(decision, Decision):
            raise TypeError(
                f"the policy {policy!r} decided {decision!r}: decide() must return a Decision"
            )
        if decision is Decision.SINCE_LAST and not self._is_previous(self.history[-1]):
            # The last checkpoint builds on the chain that a compacted copy has replaced.
            decision = Decision.SINCE_BASELINE
        previous = self.previous.link if self.previous else None
        parent: Link | None = None
        if decision is Decision.SINCE_BASELINE:
            parent = self.history[0].link
        elif decision is Decision.SINCE_LAST:
            parent = previous
        header = Header(
            kind="differential" if parent else "full",
            step=step,
            sequence=sequence,
            parent=parent,
            previous=previous,
            lossy_restores=self.lossy_restores,
            bits=bits,
            earlier_fractions=self._fractions() if parent else (),
            lineage=self.id,
            epoch=epoch,
            losses=self.losses,
        )
        return Proposal(new_id(sequence, step), header, decision)

    def report(self, progress: Progress) -> CheckpointReport:
        """Report on the last checkpoint, which took these times."""
        assert self.previous is not None
        return checkpoint_report(self.previous, self.chain_length, progress)

    def committed(self, manifest: Manifest) -> None:
        """Append a proposed checkpoint, now committed; idempotent."""
        if self._is_previous(manifest):
            return
        self.id = manifest.lineage
        full = manifest.kind == "full"
        self._widths = {} if full else self._widths
        narrow(self._widths, manifest)
        # In one assignment: a pruning reads the history meanwhile.
        self.history = (manifest,) if full else (*self.history, manifest)
        self._chain = self._chain_of(manifest)
        self.previous = manifest
        self._converted = False

    def copied(self, original: str, copy: Manifest) -> bool:
        """Take a compacted copy for the full checkpoint that the next ones build on.

        Checkpoints that were committed upon the original meanwhile are no part of the history any
        more: the next one holds all rows modified since the original. That is no way for tables
        stored as differences to the last checkpoint: of these the original must be the last one.

        Returns:
            Whether the lineage goes on from the copy; if not, nothing is changed.
        """
        found = next((manifest for manifest in self.history if manifest.id == original), None)
        if found is None or copy.previous != found.link:
            return False
        if found.deltas and not (self._is_previous(found) and restores_alike(found, copy)):
            return False
        self._widths = {}
        narrow(self._widths, copy)
        self.history = (copy,)  # in one assignment, as in ``committed``
        if self._is_previous(found):
            self.previous = copy
        assert self.previous is not None, "it is in the history, or newer"
        self._chain = ()  # of the original
        self._chain = self._chain_of(self.previous)
        return True

    def restored(self, chain: Chain, converted: bool, forks: bool) -> None:
        """Continue from a chain to whose head the model was restored.

        Args:
            converted: on some rank, the shards' column ranges differ from the stored ones.
            forks: the restore abandons a newer checkpoint.
        """
        self.history, self.previous = chain.manifests, chain.head
        self._chain = chain.manifests
        self._widths = chain.widths
        self.lossy_restores = chain.head.lossy_restores + int(chain.lossy)
        self.losses = chain.head.losses
        self.id = secrets.token_hex(8) if forks else chain.head.lineage
        self._converted = converted

    @property
    def converted(self) -> bool:
        """Return whether the next checkpoint must be full, whatever the policy decides."""
        return self._converted

    def force_full(self) -> None:
        """Make the next checkpoint full: the column ranges have changed, or a checkpoint of the
        history is damaged.
        """
        self._converted = True

    def holds(self, step: int, widths: Mapping[str, int]) -> bool:
        """Return whether the last checkpoint is of this step and at least as wide as a new one.

        That of another lineage was restored in place of a newer one, which a restart would take: a
        new checkpoint says that the run goes on from here.
        """
        last = self.previous
        if last is None or last.lineage != self.id:
            return False
        return last.step == step and not self._must_be_full(widths)

    def _chain_of(self, manifest: Manifest) -> tuple[Manifest, ...]:
        """Return the checkpoints that a restore of one of the history reads, oldest first, as far
        as the history has them.
        """
        later = [manifest]
        while (link := later[-1].parent) is not None:
            for end in range(len(self._chain), 0, -1):  # mostly the last one
                last = self._chain[end - 1]
                if (last.id, last.checksum) == (link.id, link.checksum):
                    return (*self._chain[:end], *reversed(later))
            parent = parent_among(later[-1], {one.id: one for one in self.history})
            if parent is None:
                break
            later.append(parent)
        return tuple(reversed(later))

    def _is_previous(self, manifest: Manifest) -> bool:
        last = self.previous
        return last is not None and (last.id, last.checksum) == (manifest.id, manifest.checksum)

    def _fractions(self) -> tuple[float, ...]:
        """Return the fractions of the differential checkpoints since the last full one."""
        last, baseline = self.history[-1], self.history[0]
        if last.kind == "full":
            return ()
        return (*last.earlier_fractions, last.fraction_of(baseline))

    def _must_be_full(self, widths: Mapping[str, int]) -> bool:
        if not self.history or self._converted:
            return True
        # Rows not written again would stay in fewer bits.
        return widths != self._widths and any(
            bits > self._widths.get(table, bits) for table, bits in widths.items()
        )


def parent_among(child: Manifest, known: Mapping[str, Manifest]) -> Manifest | None:
    """Find a checkpoint's parent, or a compacted copy that stands in for a parent that is lost.

    Args:
        known: checkpoints by id.

    Returns:
        The parent, even one that the child can't build on; None without a parent or any copy.
    """
    if child.parent is None:
        return None
    parent = known.get(child.parent.id)
    if parent is None or incompatibility(child, parent) is not None:
        return copy_among(child, known.values()) or parent
    return parent


def ancestors(manifest: Manifest, known: Mapping[str, Manifest]) -> list[Manifest]:
    """Return a checkpoint and those that it builds on, newest first, as far as they are known."""
    found = [manifest]
    while (parent := parent_among(found[-1], known)) and parent.sequence < found[-1].sequence:
        found.append(parent)
    return found


def copy_among(child: Manifest, known: Iterable[Manifest]) -> Manifest | None:
    """Find the compacted copy that stands in for a checkpoint's parent: of several the one with the
    highest id, so that nobody deletes what another one reads.
    """
    if not child.deltas:
        return None
    copies = (one for one in known if stands_in(child, one))
    fitting = (copy for copy in copies if incompatibility(child, copy) is None)
    return max(fitting, key=lambda copy: copy.id, default=None)


def restores_alike(one: Manifest, other: Manifest) -> bool:
    """Tell whether the tables stored as differences restore to the same rows, by their digests."""
    ends = [{name: said.after for name, said in m.deltas.items()} for m in (one, other)]
    return ends[0] == ends[1]


def last_number(root: Folder) -> int:
    """Return the highest sequence number that this process has committed to a root."""
    return _numbers.get(root.url.rstrip("/"), 0)


def note_number(root: Folder, sequence: int) -> None:
    """Remember that this process has committed a sequence number to a root."""
    _numbers[root.url.rstrip("/")] = max(sequence, last_number(root))
