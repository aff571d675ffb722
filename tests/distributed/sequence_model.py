"""Predict what a sequence of operations leads to: a Checkpointer in plain Python, without rows.

``Reference`` knows of every checkpoint whether it will be listed, and of every call on every rank
what it returns or raises. ``sequences`` compares rows, with copies taken when a checkpoint was
begun; ``sequence_parents`` tells which checkpoint each one is differential to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any


class Point(IntEnum):
    """A point on a checkpoint's way at which it can be held or fail, in the order of time."""

    FILE = 0
    """A rank is about to write its file."""
    IN_FILE = 1
    """A part of it is written."""
    MANIFEST = 2
    """All files are written, and rank 0 is about to commit."""
    COMMITTED = 3
    """The checkpoint is listed, but rank 0 doesn't know: the answer of the storage is lost."""
    HEARD = 4
    """A rank is about to hear of it."""


@dataclass(frozen=True)
class Life:
    """One life of the training processes: their number and their options.

    Attributes:
        plan: seed of the sharding.
        links: the method that stores rows as differences, ``delta`` or ``lc``, which is without
            ``bits``; empty: rows are whole.
        log_state: with ``delta``, row-wise optimizer state is stored so, too, by logarithms.
        lc_bits: the x of ``lc``.
        as_before: store rows by the method of the life before.
        in_parts: so little staging memory that no snapshot fits.
        at_end: a checkpoint is due when they close.
    """

    world_size: int = 2
    plan: int = 0
    policy: str = "one_shot"
    bits: int | None = None
    background: str = "thread"
    staging: str = "copy_on_write"
    in_parts: bool = False
    when_busy: str = "skip"
    max_failures: int = 0
    at_end: bool = False
    links: str = ""
    log_state: bool = False
    lc_bits: int = 2
    as_before: bool = False

    def fitted(self) -> Life:
        """Return the life as its options allow it."""
        log_state = self.log_state and self.links == "delta"
        lc_bits = self.lc_bits if self.links == "lc" else 0
        life = replace(self, log_state=log_state, lc_bits=lc_bits)
        if not self.links:
            return life
        return replace(life, policy="consecutive", bits=None, background="thread")

    def after(self, before: Life) -> Life:
        """Return the life, with the method of the one before if it is to have that."""
        if not self.as_before:
            return self
        return replace(self, links=before.links, log_state=before.log_state)

    @property
    def scheme(self) -> str:
        """Name the method of the rows and of their optimizer state."""
        return "logdelta" if self.log_state else self.links


@dataclass(frozen=True)
class Way:
    """The holds and faults on a checkpoint's way to the storage.

    Attributes:
        hold: where it is held until it is let go.
        hold_rank: who is held at ``HEARD``; elsewhere everyone who comes there is.
        fault: where it fails.
        fault_rank: for whom; None for all who come there.
    """

    hold: Point | None = None
    hold_rank: int = 0
    fault: Point | None = None
    fault_rank: int | None = None

    def fitted(self, life: Life) -> Way:
        """Return the way as it can happen in a life.

        Nobody is held behind the point of failure, and a snapshot in parts is staged only while its
        file is written.
        """
        hold = self.hold
        if hold is not None and self.fault is not None and self.fault < hold:
            hold = None
        if life.in_parts and hold is Point.FILE:
            hold = None if self.fault in (Point.FILE, Point.IN_FILE) else Point.MANIFEST
        rank = None if self.fault_rank is None else self.fault_rank % life.world_size
        return Way(hold, self.hold_rank % life.world_size, self.fault, rank)

    def holds(self, point: Point, rank: int) -> bool:
        return point is self.hold and (point is not Point.HEARD or rank == self.hold_rank)

    def fails(self, point: Point, rank: int) -> bool:
        return point is self.fault and (
            point in (Point.MANIFEST, Point.COMMITTED) or self.fault_rank in (None, rank)
        )

    def heard_by(self, rank: int) -> bool:
        """Tell whether a rank hears that the checkpoint was committed."""
        return self.fault is None or (
            self.fault is Point.HEARD and not self.fails(self.fault, rank)
        )

    def to_json(self) -> dict[str, int | None]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Way:
        points = {
            name: None if document[name] is None else Point(document[name])
            for name in ("hold", "fault")
        }
        return cls(**{**document, **points})


@dataclass(eq=False)
class Begun:
    """A checkpoint that was begun.

    Attributes:
        held: on its way, and not let go yet.
        listed: whether it is or will be; None if that can't be known.
        life: the life that began it.
        id: known once the sequence has run so far.
        digest: of the state that its first restore gave.
    """

    number: int
    step: int
    way: Way
    held: bool
    listed: bool | None
    life: Life
    id: str = ""
    digest: str = ""

    def known_to(self, rank: int) -> bool:
        """Tell whether a rank knows by now how the checkpoint ended."""
        elsewhere = self.way.hold is Point.HEARD and rank != self.way.hold_rank
        return not self.held or elsewhere


@dataclass
class Answer:
    """The required outcome of a call on one rank.

    Attributes:
        told: of which checkpoints the callbacks hear.
    """

    error: bool = False
    report: Begun | None = None
    told: list[Begun] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "error": self.error,
            "report": self.report and self.report.id,
            "told": [begun.id for begun in self.told],
        }


@dataclass
class _Rank:
    running: Begun | None = None
    failures: int = 0
    tell: bool = False
    """True if the checkpoint on its way was asked for by a ``save`` that waits, and raises errors
    that are logged else.
    """
    missed: bool = False
    """The last checkpoint failed here, possibly here alone: there is something to save again."""
    logged: bool = False
    """A failure was only logged, and nothing has made it good: ``close`` raises it."""
    error: bool = False
    report: Begun | None = None
    told: list[Begun] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """An event that decides the next checkpoint's kind: ``restored``, ``begun``, or ``committed``.

    Committed ones count once rank 0 knows.
    """

    what: str
    checkpoint: Begun


@dataclass
class Call:
    """A call and its required outcome: answers by rank, and the checkpoint that it begins."""

    answers: list[Answer]
    begun: Begun | None = None


class Reference:
    """The state of a run: which checkpoints are listed, and what each rank of this life knows.

    Attributes:
        begun: every checkpoint that was ever begun, in order.
        events: of this life.
        only_logged: how many failures in this life nobody is told of.
    """

    def __init__(self) -> None:
        self.begun: list[Begun] = []
        self.steps = 0
        self._written = False
        """Rows were written by hand since the last checkpoint began."""

    @property
    def listed(self) -> list[Begun]:
        """Return the listed checkpoints in the order of their sequence numbers."""
        return [begun for begun in self.begun if begun.listed]

    def born(self, life: Life) -> None:
        """Start new processes."""
        self._life = life
        self._ranks = [_Rank() for _ in range(life.world_size)]
        self._last: Begun | None = None
        self.events: list[Event] = []
        self.only_logged = 0
        self.steps, self._written = 0, False

    def fitted(self, way: Way) -> Way:
        """Return the way as it can happen in this life."""
        return way.fitted(self._life)

    @property
    def held(self) -> Begun | None:
        """Return the checkpoint that is on its way, and held."""
        return next((r.running for r in self._ranks if r.running and r.running.held), None)

    @property
    def pending(self) -> bool:
        """Tell whether a rank has something to hear of."""
        return any(rank.running or rank.error for rank in self._ranks)

    def let_go(self) -> None:
        if self.held:
            self.held.held = False

    def restore(self, source: Begun | None) -> Begun | None:
        """Restore a checkpoint, or the newest, and return it."""
        self._settle_all()
        for rank in self._ranks:  # what failed before is only logged
            rank.error, rank.report, rank.told, rank.missed = False, None, [], False
            rank.logged = False
        found = source or (self.listed[-1] if self.listed else None)
        if found is not None:
            self._last, self.steps, self._written = found, found.step, False
            self.events.append(Event("restored", found))
        return found

    def evict(self) -> None:
        """Write rows by hand."""
        self.let_go()
        self._written = True

    def step(self, due: Way | None = None) -> Call:
        """Train one step and call ``step``, at which a checkpoint may be due."""
        self.steps += 1
        for rank in range(len(self._ranks)):
            self._settle(rank, wait=False)
        begun = None
        if due is not None:
            if self._life.when_busy == "wait":
                self._settle_all()
            begun = self._begin(due)
        return Call(self._outcomes(), begun)

    def save(self, way: Way, wait: bool) -> Call:
        self._settle_all()
        begun = self._begin(way, tell=wait)
        reports = [rank.report for rank in self._ranks]
        answers = self._outcomes()
        for answer in answers:
            answer.report = None
            answer.error |= wait and begun is None  # it failed before, on some rank
        if begun is not None and wait:
            return Call(_joined(answers, self.wait().answers), begun)
        for rank, answer, report in zip(self._ranks, answers, reports, strict=True):
            rank.report = None if answer.error else report  # the next call gives it
        return Call(answers, begun)

    def wait(self) -> Call:
        self._settle_all()
        return Call(self._outcomes())

    def close(self, way: Way) -> Call:
        """Close the checkpointer."""
        self._settle_all()
        begun = None
        unsaved = self._written or self._last is None or self._last.step != self.steps
        unsaved |= any(rank.missed for rank in self._ranks)
        if self._life.at_end and self.steps > 0 and unsaved:
            for rank in self._ranks:  # what failed before is part of this one
                rank.error = rank.logged = False
            begun = self._begin(way)
            self._settle_all()
        for rank in self._ranks:
            rank.error |= rank.logged
        answers = self._outcomes()
        for answer in answers:
            answer.report = None
        return Call(answers, begun)

    def die(self, let_go: bool) -> None:
        """End the processes without ``close``.

        Args:
            let_go: what was held goes on, and gets nobody knows how far.
        """
        held = self.held
        if held is None or held.way.hold is None or held.way.hold >= Point.COMMITTED:
            return
        if let_go and held.listed:
            held.listed = None
        else:
            held.listed = False

    def _begin(self, way: Way, tell: bool = False) -> Begun | None:
        if any(rank.error or rank.running for rank in self._ranks):
            return None
        way = self.fitted(way)
        listed = way.fault is None or way.fault >= Point.COMMITTED
        held = way.hold is not None
        begun = Begun(len(self.begun), self.steps, way, held, listed, self._life)
        self._written = False
        self.begun.append(begun)
        self.events.append(Event("begun", begun))
        for rank in self._ranks:
            rank.running, rank.tell = begun, tell
        return begun

    def _settle_all(self) -> None:
        self.let_go()
        for rank in range(len(self._ranks)):
            self._settle(rank, wait=True)

    def _settle(self, number: int, wait: bool) -> None:
        rank = self._ranks[number]
        begun = rank.running
        if begun is None or not (wait or begun.known_to(number)):
            return
        rank.running = None
        rank.missed = not begun.way.heard_by(number)
        if not rank.missed:
            rank.failures, rank.logged = 0, False
            rank.report = begun
            rank.told.append(begun)
            if number == 0:
                self._last = begun
                self.events.append(Event("committed", begun))
            return
        rank.failures += 1
        if rank.tell or rank.failures > self._life.max_failures:
            rank.error = True
        else:
            rank.logged = True
            self.only_logged += 1

    def _outcomes(self) -> list[Answer]:
        answers = []
        for rank in self._ranks:
            report = None if rank.error else rank.report
            answers.append(Answer(rank.error, report, rank.told))
            rank.logged &= not rank.error
            rank.error, rank.report, rank.told = False, None, []
        return answers


def _joined(first: list[Answer], second: list[Answer]) -> list[Answer]:
    return [
        Answer(b.error, b.report, [*a.told, *b.told]) for a, b in zip(first, second, strict=True)
    ]
