"""Journal rows before a step changes them, and undo steps that not all ranks have done.

Two journals lie in the image. Each goes back to the end of one step: the first change after a
step's end begins a journal, in the place of the older one. Of a row that changes several times
until the next end of a step the first value counts. Which journals are to be undone, and in which
order, follows from the steps alone, so that a roll-back that is itself killed can be repeated.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.marks.intervals import IntervalClock, KeptMarks
from torchrec_checknrun.model.hand_written import Lookup
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.shared_memory.areas import Areas
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import Word

logger = logging.getLogger(__name__)

FIRST_SIZE = 1 << 20
_NONE = -1
_CALM = 100
"""Steps without a write by hand after which none is expected any more."""
_BITS = {True: 1, False: 2}
"""Bits of ``Word.BY_HAND``, by whether a write comes after a step's first update."""
_FAILURES = (
    RuntimeError,
    ValueError,
    IndexError,
    MemoryError,
    ImagesRefused,
    NoImage,
    OSError,
)
"""Errors that end the journal of a step, not the step."""


class StepJournal:
    """The undo journals of one rank's shards.

    Args:
        areas: the image.
        shards: the shards whose rows are journaled; their memory lies in the image.
        kept: their marks, which are set as rows are journaled.

    Attributes:
        rows, changed: how many rows were put back, and how many of them the step had changed.
    """

    def __init__(
        self,
        areas: Areas,
        shards: Sequence[LocalShard],
        kept: Sequence[KeptMarks],
        clock: IntervalClock,
    ) -> None:
        self._areas, self._words = areas, areas.words
        self._clock, self._kept = clock, kept
        tensors: list[torch.Tensor] = []
        for shard, marks in zip(shards, kept, strict=True):
            tensors += [*shard.tensors, marks.memory]
        parts = [len(shard.tensors) for shard in shards]
        self._native: Any = torch.classes.checknrun.StepJournal(tensors, parts)
        self._open: int | None = None
        self._told = self._told_ahead = False
        self.rows = self.changed = 0
        self._pending: weakref.WeakSet[Lookup] = weakref.WeakSet()
        """Lookups whose backward pass may still come; those of evaluations, and what activation
        checkpointing looks up again, go with their graph.
        """
        self._ahead: weakref.WeakSet[Lookup] = weakref.WeakSet()
        """Lookups before the end of a step that would be others after it."""
        self._changes = self._ends = 0
        self._written: dict[bool, int] = {}
        """The last step in which the program wrote rows by hand, by whether that was noticed after
        the step's first update.
        """
        bits = self._words[Word.BY_HAND]
        self._guarded = {moment for moment, bit in _BITS.items() if bits & bit}
        """The moments at which the program, perhaps in a process before, writes in each step."""

    @staticmethod
    def clear(areas: Areas) -> None:
        """Make both journals of an image empty ones."""
        for place in range(2):
            areas.words.publish(Word.JOURNAL_FROM + place, _NONE)
            if not areas.has(_name(place)):
                areas.add(_name(place), FIRST_SIZE)

    def append(self, values: torch.Tensor, offsets: list[int], shards: list[int]) -> None:
        """Journal rows before they change; never raise an error of its own.

        Args:
            values: shard-local ids of several features, ``(n,)`` of any integer dtype.
            offsets: place of each feature's first id, and the end.
            shards: each feature's shard.
        """
        self._changes += 1
        try:
            ids = values.to(torch.int64).contiguous()
            place = self._begin() if self._open is None else self._open
            used, area = Word.JOURNAL_USED + place, self._areas.get(_name(place))
            words = self._words.tensor
            found = self._native.append(
                ids, offsets, shards, self._clock.interval, area, words, used
            )
            if found < 0:
                area = self._areas.grow(_name(place), 2 * -found, self._words[used])
                self._native.write(area, words, used)
        except _FAILURES as error:
            for shard in set(shards):
                self._kept[shard].mark_all()  # which of them were marked is unknown
            self.missed(f"they could not be journaled: {error}")

    def missed(self, why: str) -> None:
        """Note that rows change unjournaled: the steps done so far can't be gone back to."""
        self._changes += 1
        self._raise_floor()
        if not self._told:
            self._told = True
            logger.warning(
                "rows of tables change, and %s: until the end of this step, and of each that does "
                "so, a killed process means a restore from the newest checkpoint",
                why,
            )

    def written(self) -> None:
        """Note that the program has written rows by hand since the last look.

        Where it does so in each step, these are out of reach from the moment on at which it may: a
        write is noticed only later, and a process that was killed before would leave it there.
        """
        self.missed("they were written outside of training")
        moment, last = self.is_open, self._written.get(self.is_open)
        self._written[moment] = self._ends
        if last == self._ends - 1 and moment not in self._guarded:
            self._guarded.add(moment)
            self._keep_guarded()
            logger.warning(
                "the program writes rows of tables by hand in each step, and a process that is "
                "killed before that is noticed would leave them written: from now on a process "
                "that is killed %s means a restore from the newest checkpoint. Write inside "
                "`with checkpointer.writing(table, rows):` or with write_rows, and none does",
                "between a step's first update of tables and its end" if moment else "at any time",
            )

    def _keep_guarded(self) -> None:
        self._words.publish(Word.BY_HAND, sum(_BITS[moment] for moment in self._guarded))

    def _raise_floor(self) -> None:
        try:
            self._words.publish(Word.FLOOR, self._words[Word.DONE] + 1)
        except NoImage:  # nobody knows the step: the image is given up at the step's end
            self._words.publish(Word.READY, 0)

    @property
    def is_open(self) -> bool:
        """Return whether rows have changed since the last step's end."""
        return self._open is not None

    def looked_up(self, lookup: Lookup, moves: bool) -> None:
        """Note a lookup that a backward pass may follow, and whether it moves state by itself."""
        lookup.changes = _NONE if moves else self._changes
        self._pending.add(lookup)

    def goes_back(self, lookup: Lookup) -> None:
        """Note that the backward pass has come to a lookup; warn of the first one that was made
        before the end of a step, where a new process would look up other values.
        """
        self._pending.discard(lookup)
        if lookup in self._ahead and not self._told_ahead:
            self._told_ahead = True
            logger.warning(
                "a batch was looked up before the end of the step before it, as semi-synchronous "
                "pipelines do: after a killed process such a batch is looked up again, and the run "
                "is not the same bit for bit"
            )

    def begin_step(self) -> None:
        """Put a step's beginning out of reach where the program writes rows there."""
        if False in self._guarded:
            self._raise_floor()

    def end_step(self) -> None:
        """Close the present journal, once the step's end is published."""
        self._open = None
        self._ends += 1
        if calm := {m for m in self._guarded if self._ends - self._written.get(m, 0) > _CALM}:
            self._guarded -= calm
            self._keep_guarded()
        self.begin_step()
        self._ahead.update(each for each in self._pending if each.changes < self._changes)

    def verify(self) -> None:
        """Check that the journals can be undone; change nothing.

        Raises:
            NoImage, ValueError: one is damaged.
        """
        for place in range(2):
            since, used = (self._words[w + place] for w in (Word.JOURNAL_FROM, Word.JOURNAL_USED))
            outside = since >= 0 and not 0 <= used <= len(self._areas.get(_name(place)))
            if since > self._words[Word.DONE] or outside:
                raise NoImage("its journal is damaged")
        for place in self._places_since(_NONE + 1):
            area = self._areas.get(_name(place))
            self._native.verify(area, self._words[Word.JOURNAL_USED + place])

    def undo_to(self, step: int) -> None:
        """Put rows back as they were at the end of a step; repeatable.

        Raises:
            ValueError: a journal is damaged; rows may have been put back.
        """
        for place in self._places_since(step):
            size = self._words[Word.JOURNAL_USED + place]
            area = self._areas.get(_name(place))
            rows, changed = self._native.undo(area, size, self._clock.interval)
            self.rows += rows
            self.changed += changed

    def drop(self) -> None:
        """Forget all journals, the newest first: a kill in between leaves those that may still be
        undone once more.
        """
        for place in self._places_since(_NONE + 1):
            self._words.publish(Word.JOURNAL_FROM + place, _NONE)
        self._open = None

    def _places_since(self, step: int) -> list[int]:
        """Return the places of journals that go back to a step or a later one, newest first."""
        begun = [(self._words[Word.JOURNAL_FROM + place], place) for place in range(2)]
        return [place for since, place in sorted(begun, reverse=True) if since >= step]

    def _begin(self) -> int:
        words = self._words.tensor
        place: int = self._native.begin(words, Word.JOURNAL_FROM, Word.JOURNAL_USED, Word.DONE)
        self._open = place
        if True in self._guarded:
            self._raise_floor()
        return place


class KernelJournal:
    """The journal as one kernel's hooks see it.

    Args:
        first: the number of the kernel's first shard among the rank's.
        rows: of each of its shards.
        small: whether all rows may be journaled at once.
        moves: whether lookups move state by themselves: maps of ids, averages of rows.
    """

    def __init__(
        self, journal: StepJournal, first: int, rows: Sequence[int], small: bool, moves: bool
    ) -> None:
        self._journal = journal
        self._moves = moves
        self._first = first
        self._rows = rows
        self._small = small

    def looked_up(self, lookup: Lookup) -> None:
        """Note a lookup that a backward pass may follow."""
        self._journal.looked_up(lookup, self._moves)

    def goes_back(self, lookup: Lookup) -> None:
        """Note that the backward pass has come to a lookup."""
        self._journal.goes_back(lookup)

    def before_update(
        self, values: torch.Tensor, offsets: list[int], feature_to_shard: list[int]
    ) -> None:
        """Journal the rows of a backward pass, in one compiled call."""
        shards = [self._first + shard for shard in feature_to_shard]
        self._journal.append(values, offsets, shards)

    def before_write(self, place: int, ids: torch.Tensor) -> None:
        """Journal rows of one shard."""
        ids = ids.reshape(-1)
        self._journal.append(ids, [0, len(ids)], [self._first + place])

    def before_any(self) -> None:
        """Journal all rows, where they are few."""
        if not self._small:
            self._journal.missed("their kernel may change rows that were not looked up")
            return
        for place, rows in enumerate(self._rows):
            self.before_write(place, torch.arange(rows))

    def missed(self, why: str) -> None:
        """See ``StepJournal.missed``."""
        self._journal.missed(why)

    def written(self) -> None:
        """See ``StepJournal.written``."""
        self._journal.written()


def _name(place: int) -> str:
    return f"journal-{place}"
