"""Hold what this rank's shards restore to, for the tables stored as differences, between saves.

The training thread asks whether the next checkpoint can be a link, begins its changes at the cut,
and ends them once the outcome is known. The references belong to one checkpoint: the one that was
committed or restored last. Whatever doesn't lead from there to the next checkpoint (a failed base,
other shards, a rank that never heard of a commit, images) makes that one a base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import NamedTuple, TypeVar

import torch

from torchrec_checknrun.codecs import Chained, Codec, Delta, Fisher
from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.delta.references import References, Upon
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot, own_range

REFERENCE_SHARES = 2
"""Default memory for references, in default budgets for saves: half of the free memory."""
NO_LINKS = ""
"""Stands for the checkpoint of a rank's references where no table is stored as differences."""

_Key = tuple[str, Rectangle]
_T = TypeVar("_T")


class _Kind(NamedTuple):
    """The kind of references to keep of a shard.

    Attributes:
        states: names of the optimizer states to keep.
    """

    references: type[References]
    states: frozenset[str]

    @classmethod
    def of(cls, shard: LocalShard, encoding: TableEncoding) -> _Kind | None:
        """Return what to keep; None where no rows are differences."""
        if not isinstance(encoding.codec, Chained):
            return None
        states = (name for name, of in shard.optimizer.items() if encoding.keeps(name, of))
        return cls(encoding.codec.references, frozenset(states))

    def fits(self, known: References | None) -> bool:
        """Return whether references are of this kind."""
        return isinstance(known, self.references) and known.states.keys() == self.states

    def make(self, table: str, place: Rectangle) -> References:
        """Make references without any rows."""
        return self.references(table, place, self.states)


@dataclass(frozen=True)
class _Recorder:
    """Encodes one shard's rows within a transaction."""

    transaction: Transaction
    references: References

    @property
    def base(self) -> bool:
        return self.transaction.base

    def encode(self, ids: torch.Tensor, upon: Upon[_T]) -> _T:
        return self.transaction.encode(self.references, ids, upon)


class HeldReferences:
    """The references of this rank's shards, and the checkpoint that they belong to."""

    def __init__(self) -> None:
        self._checkpoint: str | None = None
        """The manifest's checksum; None: the next checkpoint must be a base."""
        self._held: dict[_Key, References] = {}
        self._rates: dict[str, float] = {}
        """By table, the largest learning rate of a save since the base."""
        self._constants: dict[str, float] = {}
        """By table, the settled constant of the base's codec."""
        self._seen: list[object] = []
        """The choice, shards and states that ``_wanted`` was found for: the same at most cuts."""
        self._wanted: dict[_Key, _Kind] = {}

    def belong_to(self, tracked: TrackedModel, quantization: Quantization) -> str | None:
        """Return the checksum of the checkpoint that the next one can be a link to; None if it must
        be a base.
        """
        wanted = self._keys(tracked, quantization)
        fits = self._held.keys() == wanted.keys() and all(
            kind.fits(self._held[key]) for key, kind in wanted.items()
        )
        return self._checkpoint if fits else None

    def _keys(self, tracked: TrackedModel, quantization: Quantization) -> dict[_Key, _Kind]:
        shards = [shard.local for shard in tracked.shards]
        seen = [quantization, *shards, *(s for each in shards for s in each.optimizer.values())]
        if len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._seen, self._wanted = seen, _keys(tracked, quantization)
        return self._wanted

    def begin(
        self,
        proposal: Proposal,
        snapshot: Snapshot,
        quantization: Quantization,
    ) -> Transaction | None:
        """Begin a save: have the snapshot's shards encoded upon their references, and limit steps
        by the learning rates.

        Returns:
            The save's changes; None without tables stored as differences.
        """
        if not any(codec.chained or isinstance(codec, Fisher) for codec in quantization.codecs):
            self.forget()
            return None
        base = proposal.header.parent is None
        found: dict[_Key, References] = {}
        rates: dict[str, float] = {} if base else dict(self._rates)
        bound: list[tuple[ShardSnapshot, References | None]] = []
        for each in snapshot.shards:
            shard, encoding = each.shard, _encoding_of(each.shard, quantization)
            codec, kind, references = encoding.codec, _Kind.of(shard, encoding), None
            clock = snapshot.progress.get(shard.table)
            if isinstance(codec, Fisher) and clock is not None and clock.learning_rate:
                rates[shard.table] = max(rates.get(shard.table, 0.0), clock.learning_rate)
            if kind is not None and shard.rectangle.area:
                key = shard.table, shard.rectangle
                known = self._held.get(key)
                assert base or kind.fits(known), f"{shard} has no such references"
                references = found[key] = known if known and kind.fits(known) else kind.make(*key)
            if isinstance(codec, (Fisher, Chained)):
                bound.append((each, references))
        self._rates, self._held = rates, found
        if base:
            self._checkpoint, self._constants = None, {}
        choices = (quantization.for_table(name, t.rows) for name, t in snapshot.tables.items())
        chained = any(choice.codec.chained for choice in choices)
        changes = Transaction(found.values(), base) if chained else None
        for each, references in bound:
            each.bind = partial(self._bound, each.shard.table, changes, references)
        return changes

    def _bound(
        self,
        table: str,
        changes: Transaction | None,
        references: References | None,
        codec: Codec,
    ) -> Codec:
        """Return the codec of a table at this cut."""
        if isinstance(codec, Fisher):
            codec = codec.at_rate(self._rates.get(table))
        if references is None:
            return codec
        if isinstance(codec, Delta):
            codec = codec.with_constant(self._constants.get(table))
        assert isinstance(codec, Chained)
        assert changes is not None
        return codec.upon(_Recorder(changes, references))

    def committed(self, changes: Transaction | None, manifest: Manifest) -> None:
        """Keep the changes of a save that is committed."""
        if changes is None:
            return
        changes.keep()
        self._checkpoint = manifest.checksum
        self._constants |= constants_of(manifest)

    def copied(self, copy: Manifest) -> None:
        """Let the next link build on a compacted copy that restores to the same rows as its
        original, if the references belong to that.
        """
        if copy.previous is not None and self._checkpoint == copy.previous.checksum:
            self._checkpoint = copy.checksum

    def failed(self, changes: Transaction | None) -> None:
        """Undo the changes of a save that was not committed, or may not have been."""
        if changes is None:
            return
        changes.undo()
        if changes.base:
            self._checkpoint = None

    def restored(
        self,
        manifests: tuple[Manifest, ...],
        references: Iterable[References],
        tracked: TrackedModel,
        quantization: Quantization,
    ) -> None:
        """Take the references of a restored chain's head.

        Args:
            manifests: the chain, oldest first.
            references: of shards with the columns that were stored.
        """
        self.forget()
        tables = delta_tables(tracked, quantization)
        if not tables or manifests[-1].deltas.keys() != tables:
            return
        wanted = _keys(tracked, quantization)
        keys: dict[str, list[_Key]] = {}
        for key in wanted:
            keys.setdefault(key[0], []).append(key)
        for one in references:
            for key in keys.get(one.table, ()):
                # Else the chain's codec or scheme was another.
                if _holds(one.rectangle, key[1]) and wanted[key].fits(one):
                    self._held[key] = one.part(key[1])
        if self._held.keys() != wanted.keys():
            self.forget()
            return
        self._checkpoint = manifests[-1].checksum
        for manifest in manifests:
            self._constants |= constants_of(manifest)
            for name, table in manifest.tables.items():
                self._rates[name] = max(self._rates.get(name, 0.0), table.learning_rate or 0.0)

    def forget(self) -> None:
        """Forget everything: the next checkpoint is a base."""
        self._checkpoint, self._held, self._rates, self._constants = None, {}, {}, {}

    @property
    def bytes(self) -> int:
        """Return the memory of the references, in bytes."""
        return sum(one.bytes for one in self._held.values())


def agreed(proposal: Proposal, known: Iterable[str | None]) -> Proposal:
    """Return the proposal that all ranks can follow: a base in place of a link that some can't.

    Args:
        known: what each rank's references belong to.
    """
    header = proposal.header
    if header.parent is None:
        return proposal
    is_link = proposal.decision is Decision.SINCE_LAST
    if is_link and all(one == header.parent.checksum for one in known):
        return proposal
    return proposal.as_full()


def links_exceed_base(history: tuple[Manifest, ...]) -> bool:
    """Tell whether the tables' links since the last base have more bytes than the base."""
    if not history:
        return False
    base, *links = (_delta_bytes(manifest) for manifest in history)
    return sum(links) > base


def delta_tables(tracked: TrackedModel, quantization: Quantization) -> frozenset[str]:
    """Name the tables to be stored as differences."""
    return frozenset(
        name
        for name, shape in tracked.tables.items()
        if quantization.for_table(name, shape.rows).codec.chained
    )


def constants_of(manifest: Manifest) -> dict[str, float]:
    """Return the settled constants of the codecs of a checkpoint's tables stored as differences."""
    found: dict[str, float] = {}
    for name in manifest.deltas:
        for spec in manifest.tables[name].codecs:
            constant = spec.get("constant")
            if isinstance(constant, float) and 0 < constant < math.inf:
                found[name] = constant
    return found


def too_large(tracked: TrackedModel, quantization: Quantization, most: int) -> list[str]:
    """Name the tables whose references don't fit into memory beside those of smaller ones."""
    sizes: dict[str, int] = {}
    for (table, place), kind in _keys(tracked, quantization).items():
        expected = kind.references.expected_bytes(place, len(kind.states))
        sizes[table] = sizes.get(table, 0) + expected
    left, beyond = most, []
    for table in sorted(sizes, key=lambda name: (sizes[name], name)):
        if sizes[table] <= left:
            left -= sizes[table]
        else:
            beyond.append(table)
    return beyond


def _delta_bytes(manifest: Manifest) -> int:
    tables = (manifest.tables[name] for name in manifest.deltas)
    return sum(t.weight_bytes + t.ids_bytes + t.optimizer_bytes for t in tables)


def _keys(tracked: TrackedModel, quantization: Quantization) -> dict[_Key, _Kind]:
    """Return the places of this rank's parts of tables stored as differences, each with the kind of
    its references.
    """
    keys: dict[_Key, _Kind] = {}
    for shard in tracked.shards:
        kind = _Kind.of(shard.local, _encoding_of(shard.local, quantization))
        if kind is not None:
            whole = shard.local.rectangle
            start, stop = (whole.row_start + at for at in own_range(shard.local))
            place = replace(whole, row_start=start, row_stop=stop)
            if not place.area:
                continue
            keys[shard.table, place] = kind
    return keys


def _encoding_of(shard: LocalShard, quantization: Quantization) -> TableEncoding:
    return quantization.for_table(shard.table, shard.shape.rows)


def _holds(whole: Rectangle, part: Rectangle) -> bool:
    return whole.intersect(part) == part
