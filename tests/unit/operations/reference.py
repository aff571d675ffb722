"""Predict in plain Python which checkpoints of a root can be restored, and which must stay.

Knows what was committed, what was damaged by hand and what was pinned; reads nothing of a root but
the names in it, so that it says nothing about how this package sees a root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from tests.distributed.states import State


@dataclass
class Known:
    """A checkpoint that was committed once.

    Attributes:
        state: the whole job's state that a restore must give, bit for bit.
        steps: the position in the data at its cut.
        original: the id of the checkpoint that a compacted copy stands for; its own id otherwise.
        link: id and checksum, by which others build on it; ``parent`` and ``previous`` are such.
        differences: whether tables are stored as differences to the parent, so that a compacted
            copy of the parent may take the parent's place.
    """

    id: str
    state: State
    steps: int
    sequence: int
    parent: tuple[str, str] | None
    previous: tuple[str, str] | None
    link: tuple[str, str]
    original: str
    differences: bool

    @property
    def place(self) -> tuple[int, bool, str]:
        """Return what orders checkpoints from the oldest to the newest."""
        return self.sequence, self.original != self.id, self.id


@dataclass
class Reference:
    """All checkpoints that were ever committed to a root, and what has become of them.

    Attributes:
        there: ids of the committed checkpoints whose directory holds a manifest.
        counting: ids that count for restores; adopted ones among them.
        cut: ids that lack a file, or a part of one.
        flipped: ids with a changed byte: only those who read everything can tell.
        pins: ids of pinned checkpoints.
    """

    known: dict[str, Known] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    counting: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)
    pins: set[str] = field(default_factory=set)

    def chain(self, id: str, without: Collection[str] = ()) -> list[str] | None:
        """Return what a restore needs, the oldest first; None if something is missing.

        Args:
            without: more ids that can't be used.
        """
        if id not in self.there or id in self.cut or id in without:
            return None
        one = self.known[id]
        if one.parent is None:
            return [id]
        parent = self.known.get(one.parent[0])
        if parent is not None and parent.link == one.parent:
            before = self.chain(parent.id, without)
            if before is not None:
                return [*before, id]
        copies = [other for other in self._stand_ins(one) if self.chain(other, without)]
        return [max(copies), id] if copies else None

    def _stand_ins(self, one: Known) -> list[str]:
        """Return the compacted copies that may take the place of a checkpoint's parent."""
        copies = (other for other in self.known.values() if other.original != other.id)
        return [c.id for c in copies if one.differences and c.previous == one.parent]

    def sound(self, id: str) -> bool:
        """Return whether a checkpoint and all that it needs are undamaged."""
        return self.chain(id, self.flipped) is not None

    def restorable(self) -> set[str]:
        """Return the ids of all checkpoints whose chains are undamaged, counting or not."""
        return {id for id in self.there if self.sound(id)}

    def in_order(self, ids: Iterable[str]) -> list[str]:
        """Sort ids, the newest first."""
        return sorted(ids, key=lambda id: self.known[id].place, reverse=True)

    def newest(self, flipped: bool = False) -> str | None:
        """Return the newest counting checkpoint that can be restored.

        Args:
            flipped: take checkpoints with changed bytes for sound ones.
        """
        whole = (i for i in self.counting & self.there if self.chain(i, self._bad(flipped)))
        return next(iter(self.in_order(whole)), None)

    def _bad(self, flipped: bool) -> set[str]:
        return set() if flipped else self.flipped

    def newest_points(self, count: int) -> list[str]:
        """Return the newest restorable points that a retention must keep: those of the newest
        lineage, and behind its beginning whatever else is there. Pinned ones and what they need
        are not counted; nor are two that hold the same point. Of two points with one number, as
        after a copy from another root, either may be the newer one: none that follows is certain.
        """
        pinned = {id for pin in self.pins & self.there for id in self.chain(pin) or [pin]}
        whole = {i for i in self.counting & self.there if self.chain(i) is not None}
        originals: dict[str, list[str]] = {}
        for id in self.in_order(whole):
            originals.setdefault(self.known[id].original, []).append(id)
        found: list[str] = []
        at = self.newest(flipped=True)
        last = at
        while at is not None:
            found += [] if at in pinned else [at]
            last, link = at, self.known[at].previous
            before = self.known.get(link[0]) if link is not None else None
            held = originals.get(before.original, []) if before is not None else []
            same = self.known[last].original
            following = [id for id in held if self.known[id].original != same]
            if before is not None and before.original == same:  # a copy's original: go behind it
                link = before.previous
                before = self.known.get(link[0]) if link is not None else None
                following = originals.get(before.original, []) if before is not None else []
            at = following[0] if following else None
        behind = self.known[last].sequence if last is not None else 0
        older = (id for id in self.in_order(whole) if self.known[id].sequence < behind)
        found += [id for id in older if id not in pinned and id not in found]
        points: dict[str, str] = {}
        for id in found:
            points.setdefault(self.known[id].original, id)
        numbers = [self.known[id].sequence for id in set(self._originals(whole))]
        certain = takewhile(lambda id: numbers.count(self.known[id].sequence) == 1, points.values())
        return list(certain)[:count]

    def _originals(self, ids: Iterable[str]) -> list[str]:
        return [self.known[id].original for id in ids]

    def must_stay(self, keep: int) -> set[str]:
        """Return the originals' ids of the points that a pruning must leave restorable."""
        pinned = {id for id in self.pins & self.there if self.chain(id)}
        return {self.known[id].original for id in [*self.newest_points(keep), *pinned]}

    def points(self) -> set[str]:
        """Return the originals' ids of all points that can be restored."""
        return {self.known[id].original for id in self.there if self.chain(id)}

    def problems(self) -> set[str]:
        """Return the ids of checkpoints of which a verification must tell something."""
        own = self.there & (self.cut | self.flipped)
        return own | {id for id in self.there if self.chain(id) is None}

    def may_be_told(self) -> set[str]:
        """Return the ids of checkpoints of which a verification may tell something: they or what
        they need are damaged.
        """
        return self.problems() | {id for id in self.there if not self.sound(id)}
