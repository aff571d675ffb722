"""Break one thing that images must do: the sweep has to find each of them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import torch

from torchrec_checknrun.marks.intervals import IntervalClock, KeptMarks
from torchrec_checknrun.memory.descent import KeptDescent
from torchrec_checknrun.memory.held_states import Taker
from torchrec_checknrun.memory.step_journal import StepJournal
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.shared_memory.areas import Areas
from torchrec_checknrun.shared_memory.header import Place


def one_table_unjournaled(rank: int) -> None:
    """Journal nothing of one table, as if it never changed."""
    append = StepJournal.append

    def without_first(
        journal: StepJournal, values: torch.Tensor, offsets: list[int], shards: list[int]
    ) -> None:
        kept = [i for i, shard in enumerate(shards) if shard != 0]
        parts = [values[offsets[i] : offsets[i + 1]] for i in kept]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part))
        if parts:
            append(journal, torch.cat(parts), starts, [shards[i] for i in kept])

    mock.patch.object(StepJournal, "append", without_first).start()


def state_not_written(rank: int) -> None:
    """Publish steps as done whose state was never written."""
    write = Place.write

    def only_odd(place: Place, number: int, pieces: Sequence[Any]) -> None:
        if len(pieces) > 1 and number % 2 == 0 and place.number >= 0:
            return
        write(place, number, pieces)

    if rank == 0:
        mock.patch.object(Place, "write", only_odd).start()


def older_state(rank: int) -> None:
    """Write the state of the step before under each step's number."""
    take = Taker.take
    before: list[Any] = []

    def take_older(taker: Taker) -> Any:
        now = [piece.clone() for piece in take(taker)]
        before.append(now)
        return before[-2] if len(before) > 1 else now

    if rank == 0:
        mock.patch.object(Taker, "take", take_older).start()


def marks_not_pending(rank: int) -> None:
    """Forget the marks that a cut takes, before its checkpoint is committed."""
    begin = KeptDescent.begin

    def begin_and_forget(descent: KeptDescent, id: str, full: bool) -> None:
        begin(descent, id, full)
        known = descent.known
        descent._write(msgspec.structs.replace(known, last=known.interval - 1))

    mock.patch.object(KeptDescent, "begin", begin_and_forget).start()


def journals_dropped_early(rank: int) -> None:
    """Forget journals before the state of the step is read and all ranks are there."""
    undo = StepJournal.undo_to

    def drop_first(journal: StepJournal, step: int) -> None:
        journal.drop()
        undo(journal, step)

    mock.patch.object(StepJournal, "undo_to", drop_first).start()


def unmarked(rank: int) -> None:
    """Mark no row in the image."""
    init = StepJournal.__init__

    def with_other_marks(
        journal: StepJournal,
        areas: Areas,
        shards: Sequence[LocalShard],
        kept: Sequence[KeptMarks],
        clock: IntervalClock,
    ) -> None:
        others = [KeptMarks(each.memory.clone(), clock) for each in kept]
        init(journal, areas, shards, others, clock)

    mock.patch.object(StepJournal, "__init__", with_other_marks).start()
